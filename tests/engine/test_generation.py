"""The text of answers is the same by ``generate``, ``generate_iter`` and ``stream``.

It does not depend on why an answer ends or where it is cut into pieces.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.generation import GenerationLoop, only_text
from pagespec.engine.inputs import PromptInput
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.request_factory import RequestFactory
from pagespec.engine.scheduler import Scheduler
from tests.support.tokenizers import SPECIAL, byte_fallback, byte_level, text_of

FALLBACK, LEVEL = byte_fallback(), byte_level()
EOS = SPECIAL.index("</s>")
PROMPT = [1]


class ScriptRunner:
    """Samples the tokens of a script, by position."""

    pipeline_depth = 0

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script

    def dispatch(self, plan: StepPlan) -> StepResult:
        return StepResult(
            [
                self._script[start + num_tokens - len(PROMPT)]
                for _, start, num_tokens, is_sampled in plan.rows()
                if is_sampled
            ]
        )

    def collect(self, handle: StepResult) -> StepResult:
        return handle


def serving_of(
    tokenizer: Any, script: Sequence[int], runner: type[ScriptRunner] = ScriptRunner
) -> GenerationLoop:
    scheduler = Scheduler(
        BlockManager(64, 16), max_num_seqs=2, max_num_batched_tokens=64, pipeline_depth=0
    )
    factory = RequestFactory(
        tokenizer,
        vocab_size=len(tokenizer),
        eos_token_ids=frozenset({EOS}),
        max_model_len=512,
        seed=0,
    )
    return GenerationLoop(Engine(scheduler, runner(script)), factory)


def answers(
    tokenizer: Any, script: Sequence[int], **params: Any
) -> list[tuple[str, list[int], str | None]]:
    """(text, token ids, finish reason) by each way to an answer; of a stream the text is its own
    and the rest that of ``generate``."""
    sampling = SamplingParams(**{"max_tokens": len(script), "temperature": 0.0} | params)
    prompt = PromptInput(None, list(PROMPT))
    serving = serving_of(tokenizer, script)
    [whole] = serving.run([prompt], [sampling], use_tqdm=False)
    [item] = serving.iterate([(prompt, sampling)], lambda given, _: given, window=1)
    given = [(o.text, o.token_ids, o.finish_reason) for o in (whole.outputs[0], item.outputs[0])]
    streamed = "".join(only_text(serving.stream(prompt, sampling, tokenizer)))
    return [*given, (streamed, *given[0][1:])]


SCRIPT = st.lists(st.integers(0, len(LEVEL) - 1).filter(lambda i: i != EOS), min_size=1, max_size=9)
KINDS = pytest.mark.parametrize("tokenizer", [FALLBACK, LEVEL], ids=["byte fallback", "byte level"])


def tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@KINDS
@given(
    script=SCRIPT,
    stop=st.sampled_from([None, "a", "ab", "\ufffd", "never", "\ufffd\ufffd"]),
    stops_at=st.none() | st.integers(0, 8),
)
def test_all_ways_to_an_answer_give_one_text(
    tokenizer: Any, script: list[int], stop: str | None, stops_at: int | None
) -> None:
    stop_ids = None if stops_at is None else [script[stops_at % len(script)]]
    found = answers(tokenizer, script, stop=stop, stop_token_ids=stop_ids)
    assert len({text for text, _, _ in found}) == 1
    assert stop is None or stop not in found[0][0], "also where it is complete only at the end"


@KINDS
@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("last", ["b", "</s>", "is eos"])
@pytest.mark.parametrize("body", ["aé", "a😀"])
def test_a_stop_token_is_among_the_ids_and_not_in_the_text(
    tokenizer: Any, stop: str | None, last: str, body: str
) -> None:
    begin = tokens(tokenizer, body)[:-1]  # it ends inside the second character
    stop_id = EOS if last == "is eos" else tokens(tokenizer, last)[0]
    script = [*begin, stop_id, stop_id]
    stop_ids = None if last == "is eos" else [stop_id]
    for text, ids, reason in answers(tokenizer, script, stop=stop, stop_token_ids=stop_ids):
        assert (text, ids, reason) == (text_of(tokenizer, begin), script[:-1], "stop")


@KINDS
def test_an_end_token_that_is_ignored_has_no_text(tokenizer: Any) -> None:
    script = [*tokens(tokenizer, "a"), EOS, *tokens(tokenizer, "b")]
    for text, ids, reason in answers(tokenizer, script, ignore_eos=True):
        assert (text, ids, reason) == ("ab", script, "length")


@KINDS
def test_a_stop_string_may_be_the_sign_for_an_incomplete_character(tokenizer: Any) -> None:
    script = [*tokens(tokenizer, "a"), *tokens(tokenizer, "😀")[:1]]
    for text, ids, reason in answers(tokenizer, script, stop="\ufffd"):
        assert (text, ids, reason) == ("a", script, "stop")


class SlowRunner(ScriptRunner):
    """Each step takes as long as the progress bar is left alone."""

    def dispatch(self, plan: StepPlan) -> StepResult:
        time.sleep(0.26)
        return super().dispatch(plan)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_has_the_rate_while_the_first_prompt_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    serving = serving_of(LEVEL, [5] * 4, SlowRunner)
    serving.run([PromptInput(None, [1])], [SamplingParams(max_tokens=4)], use_tqdm=True)
    running = [bar for bar in screen.getvalue().split("\r") if " 0/1 " in bar and "tok/s" in bar]
    assert running
    assert "0.0 tok/s" not in running[-1]
    assert " 1/1 " in screen.getvalue()


def test_a_log_file_has_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    serving = serving_of(LEVEL, [5])
    serving.run([PromptInput(None, [1])], [SamplingParams(max_tokens=1)], use_tqdm=True)
    assert file.getvalue() == ""
