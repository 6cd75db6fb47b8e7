"""Constrained answers in chat end with the end-of-turn token of the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import LLM, SamplingParams, StructuredOutputs
from pagespec.chat.tool_choice import forced_output
from tests.support.chat_models import WEATHER, save_chat_model

USER = [{"role": "user", "content": "hé?"}]
OPENS, OFF = {"opens_thinking": True}, {"enable_thinking": False}
LONG = [
    StructuredOutputs(regex="[ab]{2,90}"),
    StructuredOutputs(choice=["ab" * n for n in range(1, 40)]),
    StructuredOutputs(grammar='start: "a" "b" /[ab]{0,90}/'),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The configs name "</s>", the chat template ends turns by "<|im_end|>"."""
    folder = save_chat_model(tmp_path_factory.mktemp("model"), end="</s>")
    return LLM(folder, max_num_seqs=8, num_blocks=400)


def ids(llm: LLM, *names: str) -> list[int]:
    return list(llm.tokenizer.convert_tokens_to_ids(list(names)))


def likely(llm: LLM, **given: Any) -> SamplingParams:
    """The end of a turn is likely wherever it is allowed, the end of the configs never."""
    turn, own, closing = ids(llm, "<|im_end|>", "</s>", "</think>")
    bias = {turn: 100.0, own: -100.0, closing: 0.0} | given.pop("bias", {})
    return SamplingParams(max_tokens=120, seed=0, logit_bias=bias, **given)


@pytest.mark.parametrize("outputs", LONG, ids=["regex", "choice", "grammar"])
def test_the_end_of_a_turn_ends_content_that_is_complete(
    llm: LLM, outputs: StructuredOutputs
) -> None:
    (turn, own) = ids(llm, "<|im_end|>", "</s>")
    params = likely(llm, structured_outputs=outputs, n=2)
    (output,) = llm.chat([USER], params, use_tqdm=False, chat_template_kwargs=OFF)
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        assert answer.token_ids[-1] == turn
        assert answer.message is not None
        assert len(answer.message["content"]) in (2, 3)
    # The end of the configs still is one.
    params = likely(llm, structured_outputs=outputs, bias={turn: -100.0, own: 100.0})
    (output,) = llm.chat([USER], params, use_tqdm=False, chat_template_kwargs=OFF)
    assert output.outputs[0].token_ids[-1] == own


def test_it_ends_content_behind_reasoning_and_forced_calls(llm: LLM) -> None:
    turn, closing = ids(llm, "<|im_end|>", "</think>")
    # In the reasoning the end of a turn would end the answer.
    params = likely(llm, structured_outputs=LONG[0], bias={closing: 100.0, turn: 50.0})
    (output,) = llm.chat([USER], params, use_tqdm=False, chat_template_kwargs=OPENS)
    (answer,) = output.outputs
    assert answer.token_ids[0] == closing
    assert answer.token_ids[-1] == turn
    assert answer.message is not None
    assert len(answer.message["content"]) in (2, 3)

    params = likely(llm, structured_outputs=forced_output([WEATHER], "required"))
    (output,) = llm.chat([USER], params, use_tqdm=False, chat_template_kwargs=OFF, tools=[WEATHER])
    if output.outputs[0].finish_reason == "stop":
        assert output.outputs[0].token_ids[-1] == turn


def test_it_does_not_end_completions_nor_answers_that_ignore_ends(llm: LLM) -> None:
    (turn,) = ids(llm, "<|im_end|>")
    constrained = likely(llm, structured_outputs=LONG[0])
    (output,) = llm.generate("hé?", constrained, use_tqdm=False)
    assert turn not in output.outputs[0].token_ids
    ignoring = likely(llm, structured_outputs=LONG[0], ignore_eos=True)
    (output,) = llm.chat([USER], ignoring, use_tqdm=False, chat_template_kwargs=OFF)
    assert turn not in output.outputs[0].token_ids


def test_each_request_of_a_batch_has_its_own_ends(llm: LLM) -> None:
    (turn,) = ids(llm, "<|im_end|>")
    params = likely(llm, structured_outputs=LONG[0])
    chat = llm.chat_reader.read(USER, chat_template_kwargs=OFF)
    outputs = list(llm.generate_iter([(chat, params), ("hé?", params), (chat, params)]))
    lengths = []
    for output in outputs:
        assert not isinstance(output, Exception), output
        lengths.append(len(output.outputs[0].text))
        assert (output.outputs[0].token_ids[-1] == turn) == (lengths[-1] < 4)
    assert lengths[0] == lengths[2] < 4 < lengths[1]
