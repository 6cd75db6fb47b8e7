"""`LLM.chat` with tools, on a tiny Qwen3 model that is forced to produce given answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, SamplingParams, StructuredOutputs
from pagespec.chat.deltas import message_of
from pagespec.chat.tool_choice import forced_output
from tests.support.chat_models import END, WEATHER, chat_tokenizer, ids_of
from tests.support.models import tiny_model

USER = {"role": "user", "content": "Köln?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nI ask.\n{CALL}"


TOKENIZER = chat_tokenizer("qwen3")


def exactly(text: str, **params: Any) -> SamplingParams:
    """Parameters with which the model says this, and ends."""
    ids = ids_of(TOKENIZER, text + END["qwen3"])

    def force(token_ids: list[int], logits: Any) -> Any:
        logits[:] = float("-inf")
        logits[ids[len(token_ids)]] = 0
        return logits

    return SamplingParams(max_tokens=300, seed=1, logits_processors=[force], **params)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(folder)
    end = TOKENIZER.convert_tokens_to_ids(END["qwen3"])
    model = tiny_model("qwen3")
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    model.save_pretrained(folder)
    return LLM(folder, device="cpu", num_blocks=128, compile="eager")


def chat(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, **more: Any) -> Any:
    return llm.chat(messages, params, use_tqdm=False, **more)[0].outputs[0]


def test_an_answer_with_reasoning_and_a_call(llm: LLM) -> None:
    answer = chat(llm, [USER], exactly(ANSWER), tools=[WEATHER])
    assert answer.text == ANSWER
    assert answer.finish_reason == "stop"
    assert answer.message["reasoning_content"] == "hm"
    assert answer.message["content"] == "I ask."
    (call,) = answer.message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    result = {"role": "tool", "content": "9", "tool_call_id": call["id"]}
    conversation = [USER, answer.message, result]
    prompt = llm.read_messages(conversation)
    assert prompt.text is not None
    assert CALL in prompt.text
    assert chat(llm, conversation, exactly("Nine.")).message["content"] == "Nine."


def test_generate_makes_no_messages_and_neither_does_chat_without_text(llm: LLM) -> None:
    (output,) = llm.generate("ab", exactly("a"), use_tqdm=False)
    assert output.outputs[0].message is None
    assert chat(llm, [USER], SamplingParams(max_tokens=3, detokenize=False)).message is None


def test_each_answer_of_several_is_read(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=1, n=3)
    outputs = llm.chat([[USER], [USER]], [params, exactly(ANSWER, n=2)], use_tqdm=False)
    for answer in outputs[0].outputs:
        message = answer.message
        assert message is not None
        assert message["content"] is not None or message["reasoning_content"] is not None
    ids = [answer.message["tool_calls"][0]["id"] for answer in outputs[1].outputs]  # type: ignore
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": WEATHER["function"]}]
)
def test_a_forced_call(llm: LLM, choice: Any) -> None:
    short = {"city": {"enum": ["Ulm", "Köln"]}, "days": {"enum": [1, 2]}}
    parameters = {"type": "object", "properties": short, "required": ["city"]}
    parameters["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    forced = forced_output([tool], choice)
    assert forced is not None
    forced = StructuredOutputs(json=forced.json, disable_any_whitespace=True)
    ends_early = {ids_of(TOKENIZER, "]")[0]: 100.0}
    params = SamplingParams(
        max_tokens=300, seed=3, structured_outputs=forced, logit_bias=ends_early
    )
    prompt = llm.chat_reader.read([USER], tools=[tool])
    (output,) = llm.generate({"prompt_token_ids": prompt.token_ids}, params, use_tqdm=False)
    reader = llm.chat_reader.reader(prompt, params, tools=[tool], tool_choice=choice)
    deltas = [d for i in output.outputs[0].token_ids for d in reader.feed([i])]
    message = message_of([*deltas, *reader.finish()])
    assert message["tool_calls"], message
    for call in message["tool_calls"]:
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Köln")


def test_stop_strings_cut_the_message_as_the_text(llm: LLM) -> None:
    for include, text in ((False, "I "), (True, "I ask")):
        params = exactly("I ask.", stop=["ask"], include_stop_str_in_output=include)
        answer = chat(llm, [USER], params)
        assert answer.text == text
        assert answer.message["content"] == text.strip()


def test_threads_share_the_reader(llm: LLM) -> None:
    (alone,) = llm.chat([USER], exactly(ANSWER), use_tqdm=False, tools=[WEATHER])
    ids = alone.outputs[0].token_ids
    params = exactly(ANSWER)

    def read(number: int) -> Any:
        prompt = llm.chat_reader.read([USER], tools=[WEATHER])
        reader = llm.chat_reader.reader(prompt, replace(params, seed=number), tools=[WEATHER])
        deltas = [d for i in ids for d in reader.feed([i])]
        return prompt.token_ids, message_of([*deltas, *reader.finish()])

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(read, range(40)))
    assert all(result == results[0] for result in results)
