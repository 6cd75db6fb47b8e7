"""Constraints of chat requests whose prompt ends inside the reasoning, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pagespec import LLM, SamplingParams, StructuredOutputs
from tests.support.chat_models import save_chat_model

OPENS, OFF = {"opens_thinking": True}, {"enable_thinking": False}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "weather"}}
CITY = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Köln"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def is_json(content: str) -> bool:
    return json.loads(content).keys() == {"n"}


TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "regex", "pattern": "[xy]"},
    "end": ">",
}
CONSTRAINTS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"guided_choice": ["yes", " no"]}, lambda text: text in ("yes", " no")),
    ({"guided_regex": "[a-c]{3}"}, lambda text: bool(re.fullmatch("[a-c]{3}", text))),
    ({"guided_json": SCHEMA}, is_json),
    ({"structured_outputs": {"choice": ["x"]}}, lambda text: text == "x"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, is_json),
    (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        lambda text: bool(re.fullmatch("<a>[xy]>", text)),
    ),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    return LLM(folder, max_num_seqs=8, num_blocks=400)


def bias(llm: LLM, **tokens: float) -> dict[str, float]:
    """Make delimiters likely, since the model is random."""
    names = {"opening": "<think>", "closing": "</think>", "end": "<|im_end|>"}
    ids = llm.tokenizer.convert_tokens_to_ids
    return {str(ids(names[name])): value for name, value in tokens.items()}


def body_of(template: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "hé?"}],
        "chat_template_kwargs": template,
        "seed": 1,
        "max_tokens": 300,
        "temperature": 1,
    } | changes


def ask(http: httpx.Client, template: dict[str, Any] | None, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=body_of(template, **body))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


def streamed(http: httpx.Client, template: dict[str, Any] | None, **body: Any) -> tuple[str, str]:
    """Reasoning and content, joined from the chunks."""
    body = body_of(template, stream=True, **body)
    texts = {"reasoning_content": "", "content": ""}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for name in texts:
                        texts[name] += choice["delta"].get(name) or ""
    return texts["reasoning_content"], texts["content"]


@pytest.mark.parametrize(("constraint", "is_met"), CONSTRAINTS, ids=lambda c: str(c)[:24])
def test_the_content_behind_the_reasoning_meets_the_constraint(
    http: httpx.Client, llm: LLM, constraint: dict[str, Any], is_met: Callable[[str], bool]
) -> None:
    likely = bias(llm, closing=3, end=-100)
    num_reasoned = 0
    for seed in range(4):
        asked = {**constraint, "seed": seed, "logit_bias": likely}
        choice = ask(http, OPENS, **asked)
        message = choice["message"]
        assert choice["finish_reason"] in ("stop", "length")
        assert message["content"] is not None
        assert is_met(message["content"])
        num_reasoned += bool(message["reasoning_content"])
        texts = message["reasoning_content"] or "", message["content"]
        assert streamed(http, OPENS, **asked) == texts
        hidden = ask(http, OPENS, **asked, include_reasoning=False)["message"]
        assert (hidden["reasoning_content"], hidden["content"]) == (None, message["content"])
    assert num_reasoned


def test_the_reasoning_is_that_without_a_constraint(http: httpx.Client, llm: LLM) -> None:
    asked = {"logit_bias": bias(llm, closing=3, end=-100), "return_token_ids": True}
    closing = llm.tokenizer.convert_tokens_to_ids("</think>")
    for seed in range(4):
        own = ask(http, OPENS, **asked, guided_choice=["yes"], seed=seed)["token_ids"]
        free = ask(http, OPENS, **asked, seed=seed)["token_ids"]
        num = own.index(closing) + 1
        assert own[:num] == free[:num]


def test_a_model_may_open_its_reasoning_itself(http: httpx.Client, llm: LLM) -> None:
    opens = bias(llm, opening=7, closing=7, end=-100)
    opened = ask(http, None, guided_choice=["yes"], logit_bias=opens)["message"]
    assert opened["content"] == "yes"
    assert opened["reasoning_content"]
    never = ask(http, None, guided_choice=["yes"], logit_bias=bias(llm, opening=-100))["message"]
    assert (never["reasoning_content"], never["content"]) == (None, "yes")


def test_without_reasoning_all_of_the_answer_is_constrained(http: httpx.Client, llm: LLM) -> None:
    opens = bias(llm, opening=100, closing=100)
    message = ask(http, OFF, guided_choice=["yes"], logit_bias=opens)["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "yes")


def test_a_limit_inside_the_reasoning(http: httpx.Client, llm: LLM) -> None:
    never = bias(llm, closing=-100, end=-100)
    choice = ask(http, OPENS, guided_choice=["yes"], logit_bias=never, max_tokens=9)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"]


def test_an_end_token_inside_the_reasoning_ends_the_answer(http: httpx.Client, llm: LLM) -> None:
    ends = bias(llm, closing=-100, end=100)
    choice = ask(http, OPENS, guided_choice=["yes"], logit_bias=ends)
    assert choice["finish_reason"] == "stop"
    assert not choice["message"]["content"]


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=str)
def test_a_forced_call_comes_behind_the_reasoning(
    http: httpx.Client, llm: LLM, choice: Any
) -> None:
    likely = bias(llm, closing=3, end=-100)
    num_called = num_reasoned = 0
    for seed in range(4):
        asked = {"tools": [CITY], "tool_choice": choice, "logit_bias": likely, "seed": seed}
        found = ask(http, OPENS, **asked)
        message = found["message"]
        num_reasoned += bool(message["reasoning_content"])
        if found["finish_reason"] == "length":  # of "required": a long list
            assert choice == "required"
            continue
        assert found["finish_reason"] == "tool_calls"
        assert message["content"] is None
        for call in message["tool_calls"]:
            assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Köln")
            num_called += 1
    assert num_called
    assert num_reasoned


def test_offline_it_is_the_same(http: httpx.Client, llm: LLM) -> None:
    closing, end = llm.tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    params = SamplingParams(
        max_tokens=300,
        seed=1,
        logit_bias={closing: 3, end: -100},
        structured_outputs=StructuredOutputs(choice=["yes", " no"]),
    )
    messages = [{"role": "user", "content": "hé?"}]
    (output,) = llm.chat(messages, params, use_tqdm=False, chat_template_kwargs=OPENS)
    message = output.outputs[0].message
    assert message is not None
    served = ask(http, OPENS, guided_choice=["yes", " no"], logit_bias={closing: 3, end: -100})
    assert message["content"] == served["message"]["content"]
    assert message["content"] in ("yes", " no")
    assert message["reasoning_content"] == served["message"]["reasoning_content"]


def test_several_answers_beside_others(http: httpx.Client, llm: LLM) -> None:
    likely = bias(llm, closing=3, end=-100)
    body = {
        "messages": [{"role": "user", "content": "hé?"}],
        "chat_template_kwargs": OPENS,
        "guided_choice": ["yes", "no"],
        "logit_bias": likely,
        "n": 4,
        "seed": 5,
        "temperature": 1,
        "max_tokens": 300,
    }
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    for number, choice in enumerate(choices):
        assert choice["message"]["content"] in ("yes", "no")
        alone = ask(http, OPENS, guided_choice=["yes", "no"], logit_bias=likely, seed=5 + number)
        assert alone["message"] == choice["message"]
