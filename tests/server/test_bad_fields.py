"""Errors about requests name the client's field, arrive early, and say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.test_requests import CHAT, COMPLETIONS, GENERATE, VALID
from tests.support.chat_models import WEATHER
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

MANY = 100_000
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    llm = scripted_llm("qwen3", ["Plain words."], max_num_seqs=4)
    with serving(llm, model="tiny") as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def error_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": [1] * MANY + [1.5]}, f"prompt.{MANY}"),
    (COMPLETIONS, {"prompt": ["a"] * MANY + [1]}, f"prompt.{MANY}"),
    (COMPLETIONS, {"prompt": [[1]] * MANY + [[1, "a"]]}, f"prompt.{MANY}.1"),
    (COMPLETIONS, {"prompt": [0.5] * MANY}, "prompt.0"),
    (COMPLETIONS, {"stop_token_ids": [0.5] * MANY}, "stop_token_ids.0"),
    (COMPLETIONS, {"stop": [1] * MANY}, "stop.0"),
    (COMPLETIONS, {"logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
    (COMPLETIONS, {f"k{i}": 1 for i in range(MANY)}, "k0"),
    (GENERATE, {"token_ids": [1.0] * MANY}, "token_ids.0"),
    (CHAT, {"messages": [1] * MANY}, "messages.0"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": ["a"] * MANY}, "tools.0"),
    ("/detokenize", {"tokens": [1] + [None] * MANY}, "tokens.1"),
    ("/tokenize", {"messages": ["a"] * MANY}, "messages.0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), LONG, ids=lambda value: str(value)[:50])
def test_one_wrong_item_is_enough(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({**VALID.get(path, {}), **fields})
    error = error_of(http.post(path, content=body, headers=JSON))
    # "... and 99997 more": to find and report them took up to 14 s of the event loop.
    assert "more" not in error["message"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert len(error["message"]) < 200


SCHEMA = {"extends": []}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
NAMED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 0, "max_tokens": 3}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": None, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"response_format": FORMAT}, "response_format.json_schema.schema"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tools"),
    (COMPLETIONS, {"guided_json": SCHEMA}, "guided_json"),
    (COMPLETIONS, {"guided_json": 5}, "guided_json"),
    (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    (COMPLETIONS, {"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"stop": 5}, "stop"),
    (CHAT, {"tool_choice": "some"}, "tool_choice"),
    (CHAT, {"tool_choice": 5}, "tool_choice"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"tool_choice": "auto", "tools": []}, "tool_choice"),
    (COMPLETIONS, {"logit_bias": {"1_0": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {" 7": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"\u0663": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"7": 1, "07": 2}}, "logit_bias"),
    (GENERATE, {"sampling_params": {"logit_bias": {"07": 2}}}, "logit_bias"),
    (CHAT, {"response_format": {**FORMAT, "type": "text"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {**FORMAT, "type": "json_object"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "text", "format": {}}}, "response_format.format"),
    (CHAT, {"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": "no"}},
     "structured_outputs.structural_tag"),
    (COMPLETIONS, {"request_id": "x" * 257}, "request_id"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), NAMED, ids=str)
def test_the_name_is_the_clients(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(http.post(path, json={**VALID[path], **fields}))
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_limits_name_what_the_client_sent(http: httpx.Client) -> None:
    body = {**VALID[CHAT], "max_completion_tokens": 2, "min_tokens": 3}
    assert "max_completion_tokens = 2" in error_of(http.post(CHAT, json=body))["message"]
    long_id = {**VALID[COMPLETIONS], "request_id": "x" * 300}
    assert "256" in error_of(http.post(COMPLETIONS, json=long_id))["message"]


def test_an_id_may_be_as_long_as_its_limit(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={**VALID[COMPLETIONS], "request_id": "x" * 256})
    assert answer.json()["id"] == "cmpl-" + "x" * 256


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"priority": None}),
        (GENERATE, {"priority": None, "output_mode": None, "sampling_params": None}),
        (GENERATE, {"sampling_params": {"temperature": None, "max_tokens": None, "n": None}}),
        ("/tokenize", {"prompt": "a", "return_token_strs": None, "add_generation_prompt": None}),
        (COMPLETIONS, {"logit_bias": {"0": 1, "10": -1.5}, "stop": ["a"]}),
        (COMPLETIONS, {"prompt": [[5, 6], [7]]}),
    ],
    ids=str,
)
def test_null_is_the_default(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    answer = http.post(path, json={**VALID.get(path, {}), **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "\xff"}', "UTF-8 text: invalid start byte, at byte 12"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "at most 4300"),
        (b'{"prompt": ', "at character"),
    ],
    ids=["utf-8", "depth", "digits", "cut"],
)
def test_why_a_body_is_not_read(http: httpx.Client, content: bytes, reason: str) -> None:
    assert reason in error_of(http.post(COMPLETIONS, content=content, headers=JSON))["message"]
