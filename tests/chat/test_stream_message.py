"""``LLM.stream_message``: the deltas of an answer add up to the message of ``LLM.chat``."""

from __future__ import annotations

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.chat.deltas import ReasoningDelta, message_of
from tests.support.scripted_llm import scripted_llm

USER = [{"role": "user", "content": "hé?"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    "text", ["<think>\nHm, so.\n</think>\n\nvery well", "very well", "<think>cut", CALL, ""]
)
def test_the_deltas_make_the_message(text: str) -> None:
    llm = scripted_llm("qwen3", [text])
    params = SamplingParams(max_tokens=200, seed=0)
    deltas = list(llm.stream_message(USER, params))
    if text == CALL:
        assert message_of(deltas)["content"] == CALL
        return
    (output,) = llm.chat(USER, params, use_tqdm=False)
    assert message_of(deltas) == output.outputs[0].message
    assert ("think" in text) == any(isinstance(delta, ReasoningDelta) for delta in deltas)


def test_a_stream_that_is_closed_leaves_nothing_behind() -> None:
    llm = scripted_llm("qwen3", ["very well, and on and on"])
    stream = llm.stream_message(USER, SamplingParams(max_tokens=200, seed=0))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    assert len(list(llm.stream_message(USER, SamplingParams(max_tokens=3, seed=0)))) > 0


def test_several_answers_are_refused_at_once() -> None:
    llm = scripted_llm("qwen3", ["x"])
    with pytest.raises(InvalidInputError, match="n"):
        llm.stream_message(USER, SamplingParams(n=2))
