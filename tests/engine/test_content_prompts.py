"""Prompts with content segments, from the input dict to the tokens of the answer."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash

from pagespec import InvalidInputError, SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.generation import GenerationLoop
from pagespec.engine.inputs import PromptReader
from pagespec.engine.plan import StepPlan
from pagespec.engine.request_factory import RequestFactory
from pagespec.engine.scheduler import Scheduler
from pagespec.engine.segments import Segment
from tests.support.content_runner import ContentRunner, stream_alone

VOCAB_SIZE = 50


def read_sound(field: str, value: Any) -> Segment:
    """A position per letter."""
    if not isinstance(value, str) or not value:
        raise InvalidInputError(field, value, "must be text of at least one letter")
    return Segment(len(value), xxhash.xxh3_128_digest(value.encode()), value)


READER = PromptReader(None, VOCAB_SIZE, 40, {"sound": read_sound})


class ListeningRunner(ContentRunner):
    """Keeps what plans carry of each request."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.heard: dict[str, list[object]] = {}

    def dispatch(self, plan: StepPlan) -> object:
        for info in plan.requests:
            self.heard[info.request_id] = [segment.content for segment in info.segments]
        return super().dispatch(plan)


def answers(items: list[dict[str, Any]], params: SamplingParams) -> tuple[Any, dict[str, Any]]:
    scheduler = Scheduler(BlockManager(60, 4), max_num_seqs=4, max_num_batched_tokens=6)
    runner = ListeningRunner(num_blocks=60, block_size=4, vocab_size=VOCAB_SIZE)
    engine = Engine(scheduler, runner, takes_contents=True, check_invariants=True)
    factory = RequestFactory(
        None, vocab_size=1 << 20, eos_token_ids=frozenset(), max_model_len=40, seed=0
    )
    return GenerationLoop(engine, factory).run(READER.read_all(items), params, False), runner.heard


def test_content_reaches_the_runner_and_decides_the_answer() -> None:
    """In chunks of six tokens, for each of several continuations."""
    prompts = [
        {"segments": [{"prompt_token_ids": [1, 2]}, {"sound": sound}, {"prompt_token_ids": [3]}]}
        for sound in ("a long tone", "a long tune", "a long tone")
    ]
    params = [SamplingParams(max_tokens=6, seed=5, n=2)] * 3
    outputs, heard = answers(prompts, params)
    for output, prompt in zip(outputs, prompts, strict=True):
        sound = prompt["segments"][1]["sound"]
        segments = (Segment(2), read_sound("", sound), Segment(1))
        assert output.prompt_token_ids == [1, 2, *[0] * 11, 3]
        for i, answer in enumerate(output.outputs):
            alone = stream_alone(
                output.prompt_token_ids, 20, seed=5 + i, vocab_size=VOCAB_SIZE, segments=segments
            )
            assert answer.token_ids == alone
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids
    assert sorted(map(str, heard.values())) == sorted(
        str([None, prompt["segments"][1]["sound"], None]) for prompt in prompts for _ in range(2)
    )


def test_a_declared_kind_of_tokens_alone_changes_nothing() -> None:
    prompt = READER.read({"segments": [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]})
    assert (prompt.token_ids, prompt.segments) == ([1, 2, 3], None)


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        ({"sound": ""}, r"^prompt.segments\[1\].sound = '': must be text of at least one letter"),
        ({"sound": "a", "prompt_token_ids": [1]}, r"segments\[1\] = .*other content is not"),
        ({"image": "a"}, r"\[1\] = .*: must be .*prompt_token_ids.* or .*'sound'.*: other content"),
        ({}, r"segments\[1\] = {}: must be"),
        ({"sound": "a" * 39}, "40 tokens"),
    ],
)
def test_bad_content_is_refused_by_name(segment: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        READER.read({"segments": [{"prompt_token_ids": [1]}, segment]})


def test_what_is_for_tokens_alone_is_refused_by_name() -> None:
    item = {"segments": [{"prompt_token_ids": [1, 2]}, {"sound": "abc"}]}
    assert READER.read(item, truncate=5).token_ids == [1, 2, 0, 0, 0]
    with pytest.raises(InvalidInputError, match=r"truncate_prompt_tokens = 4: must keep all 5"):
        READER.read(item, truncate=4)
    with pytest.raises(InvalidInputError, match=r"truncate_prompt_tokens = 4: must keep all 5"):
        READER.read_or_keep(READER.read(item), truncate=4)
    with pytest.raises(InvalidInputError, match=r"prompts\[1\] = .*must be tokens to be scored"):
        READER.read_all([[1], item], is_scored=True)
    with pytest.raises(InvalidInputError, match="prompt_logprobs = 1: must be None"):
        answers([item], [SamplingParams(prompt_logprobs=1)])
