"""Requests added by id and computed step by step: outputs of all kinds, ends, aborts, failures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pagespec import EngineError, InvalidInputError, SamplingParams
from pagespec.engine.inputs import PromptInput
from pagespec.engine.outputs import RequestOutput
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.stepwise import StepwiseRequests
from tests.engine.test_generation import LEVEL, ScriptRunner, serving_of
from tests.support.tokenizers import text_of

WORDS = [LEVEL(word)["input_ids"][0] for word in ("a", "ab", "é", "a", "b")]
PROMPT = PromptInput("the prompt", [1])


class Broken(ScriptRunner):
    """Fails in its second step."""

    num_steps = 0

    def dispatch(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.num_steps == 2:
            raise RuntimeError("the device is gone")
        return super().dispatch(plan)

    def reset(self) -> None:
        pass


def requests_of(runner: type[ScriptRunner] = ScriptRunner) -> StepwiseRequests:
    loop = serving_of(LEVEL, WORDS, runner)
    return StepwiseRequests(loop._engine, loop, loop._factory, LEVEL)


def params_of(**named: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": len(WORDS), "temperature": 0.0} | named)


def outputs_of(requests: StepwiseRequests) -> list[RequestOutput]:
    found = []
    for _ in range(50):
        if not requests.num_unfinished:
            return found
        found += requests.step()
    raise AssertionError("the requests do not end")


def whole() -> Any:
    (output,) = serving_of(LEVEL, WORDS).run([PROMPT], [params_of()], use_tqdm=False)
    return output.outputs[0]


def test_each_output_has_the_whole_answer_so_far() -> None:
    requests = requests_of()
    requests.add("a", PROMPT, params_of())
    outputs = outputs_of(requests)
    assert [o.outputs[0].token_ids for o in outputs] == [WORDS[: n + 1] for n in range(5)]
    assert [o.finished for o in outputs] == [False] * 4 + [True]
    assert {(o.request_id, o.prompt, *o.prompt_token_ids) for o in outputs} == {
        ("a", "the prompt", 1)
    }
    texts = [o.outputs[0].text for o in outputs]
    assert all(late.startswith(early) for early, late in pairwise(texts))
    last = outputs[-1].outputs[0]
    assert (last.text, last.finish_reason) == (text_of(LEVEL, WORDS), "length")


def test_deltas_are_the_new_parts() -> None:
    requests = requests_of()
    requests.add("a", PROMPT, params_of(), "DELTA")
    outputs = outputs_of(requests)
    assert [o.outputs[0].token_ids for o in outputs] == [[token] for token in WORDS]
    assert "".join(o.outputs[0].text for o in outputs) == whole().text
    assert [o.outputs[0].finish_reason for o in outputs] == [None] * 4 + ["length"]


def test_only_the_end_is_returned() -> None:
    requests = requests_of()
    requests.add_all(["b", "a"], [PROMPT] * 2, [params_of(), params_of(max_tokens=2)])
    assert requests.num_unfinished == 2
    ended = requests.complete(use_tqdm=False)
    assert [o.request_id for o in ended] == ["b", "a"], "in the order of arrival"
    assert [o.outputs[0].token_ids for o in ended] == [WORDS, WORDS[:2]]
    assert requests.complete(use_tqdm=False) == []


def test_continuations_of_a_prompt_count_and_share_an_output() -> None:
    requests = requests_of()
    requests.add("a", PROMPT, params_of(n=2, temperature=1.0))
    assert requests.num_unfinished == 2
    outputs = outputs_of(requests)
    assert [[answer.index for answer in o.outputs] for o in outputs] == [[0, 1]] * len(outputs)
    assert [answer.token_ids for answer in outputs[-1].outputs] == [WORDS, WORDS]


def test_an_aborted_request_leaves_the_engine_and_gives_no_output() -> None:
    requests = requests_of()
    for name in ("a", "b"):
        requests.add(name, PROMPT, params_of())
    requests.step()
    requests.abort(["a", "unknown"])
    assert {o.request_id for o in outputs_of(requests)} == {"b"}
    assert not requests._engine.scheduler.requests


def test_an_id_is_text_and_not_in_use() -> None:
    requests = requests_of()
    requests.add("a", PROMPT, params_of())
    with pytest.raises(InvalidInputError, match=r"^request_id = 'a': is in use"):
        requests.add("a", PROMPT, params_of())
    with pytest.raises(TypeError, match="request_id must be a string, got int"):
        requests.add(3, PROMPT, params_of())  # type: ignore[arg-type]
    outputs_of(requests)
    requests.add("a", PROMPT, params_of())  # it has ended


def test_if_one_of_several_is_refused_none_is_added() -> None:
    requests = requests_of()
    bad = params_of(stop_token_ids=[10**6])
    with pytest.raises(InvalidInputError, match="stop_token_ids"):
        requests.add_all(["a", "b"], [PROMPT] * 2, [params_of(), bad])
    assert requests.num_unfinished == 0
    assert not requests._engine.scheduler.requests


def test_a_failed_step_ends_all_requests_and_the_next_are_served() -> None:
    requests = requests_of(Broken)
    requests.add_all(["a", "b"], [PROMPT] * 2, [params_of()] * 2)
    with pytest.raises(EngineError, match="the device is gone"):
        outputs_of(requests)
    assert requests.num_unfinished == 0
    requests.add("a", PROMPT, params_of())
    assert outputs_of(requests)[-1].outputs[0].token_ids == WORDS
