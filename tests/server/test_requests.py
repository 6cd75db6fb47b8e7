"""The generating endpoints, field by field: rejected values, accepted values, and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.chunks import read_events
from tests.support.chat_models import WEATHER
from tests.support.content_llm import content_llm
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

HELLO = [{"role": "user", "content": "hé?"}]
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    llm = scripted_llm("qwen3", ["Plain words."], max_num_seqs=4)
    with serving(llm, model="tiny") as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"frobnicate": 1}, "frobnicate"),
    (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"length_penalty": True}, "length_penalty"),
    (COMPLETIONS, {"store": True}, "store"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompts[1]"),
    (COMPLETIONS, {"prompt": [1, 10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
    (COMPLETIONS, {"prompt": "\ud800", "add_special_tokens": False}, "prompt"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"temperature": 10**400}, "temperature"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"top_p": 0}, "top_p"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": 2, "temperature": 0}, "n"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETIONS, {"stop": [""]}, "stop"),
    (COMPLETIONS, {"best_of": 3, "n": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"stream": True, "stream_options": {"often": 1}}, "stream_options.often"),
    (COMPLETIONS, {"priority": 1}, "priority"),
    (COMPLETIONS, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    (COMPLETIONS, {"guided_regex": "a", "response_format": {"type": "json_object"}},
     "response_format"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}},
     "response_format.json_schema.schema"),
    (COMPLETIONS, {"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0]"),
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": "some"}, "tool_choice"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice"),
    (CHAT, {"tools": [WEATHER], "tool_choice": "required",
            "response_format": {"type": "json_object"}}, "tool_choice"),
    (GENERATE, {"token_ids": []}, "token_ids"),
    (GENERATE, {"token_ids": [-1]}, "token_ids"),
    (COMPLETIONS, {"cache_salt": "\ud800"}, "cache_salt"),
    (GENERATE, {"sampling_params": {"max_token": 1}}, "sampling_params.max_token"),
    (GENERATE, {"sampling_params": {"logits_processors": []}}, "sampling_params.logits_processors"),
    (GENERATE, {"sampling_params": {"extra_args": 1}}, "extra_args"),
    (COMPLETIONS, {"vllm_xargs": {"a": 1}}, "extra_args"),
    (CHAT, {"vllm_xargs": 1}, "vllm_xargs"),
    (GENERATE, {"sampling_params": {"stop": 3}}, "stop"),
    (GENERATE, {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
     "sampling_params.prompt_logprobs"),
    (GENERATE, {"output_mode": "sound"}, "output_mode"),
]  # fmt: skip
VALID = {
    COMPLETIONS: {"prompt": "ab"},
    CHAT: {"messages": HELLO},
    GENERATE: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
}


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=str)
def test_it_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    # Not by httpx, which writes no lone surrogates.
    body = json.dumps({**VALID[path], **fields})
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert str(error["param"]).startswith(param), error
    assert param.rpartition(".")[2] in error["message"]


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"user": "u", "store": False, "service_tier": "auto", "metadata": {"a": "b"},
                   "safety_identifier": "s", "prompt_cache_key": "k", "model": "tiny"}),
    (COMPLETIONS, {"suffix": None, "logprobs": None, "use_beam_search": False, "temperature": None,
                   "length_penalty": 1.0, "best_of": None, "stop": None, "stream": None}),
    (COMPLETIONS, {"repetition_penalty": 1.0, "ignore_eos": True, "min_tokens": 2, "top_k": -1}),
    (COMPLETIONS, {"max_tokens": None, "cache_salt": "s", "request_id": "mine", "priority": 0}),
    (COMPLETIONS, {"logit_bias": {"5": -100}, "stop": "x", "bad_words": ["zz"]}),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": None, "parallel_tool_calls": True}),
    (CHAT, {"tools": None, "tool_choice": None, "echo": False, "reasoning_effort": "medium"}),
    (CHAT, {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"add_generation_prompt": False, "continue_final_message": True,
            "messages": [*HELLO, {"role": "assistant", "content": "Pla"}]}),
    (GENERATE, {"sampling_params": {}, "return_token_ids": True}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), ACCEPTED, ids=str)
def test_it_is_accepted(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    answer = http.post(path, json={**VALID[path], **fields})
    assert answer.status_code == 200, answer.text


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    for path, body in VALID.items():
        answer = http.post(path, json={**body, "model": "other"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_the_answer_of_a_chat(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": HELLO, "request_id": "it"}).json()
    assert (answer["id"], answer["object"], answer["model"]) == (
        "chatcmpl-it",
        "chat.completion",
        "tiny",
    )
    assert answer["choices"][0] == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Plain words.",
            "reasoning_content": None,
            "reasoning": None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens"}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_the_chunks_of_a_chat(http: httpx.Client) -> None:
    chunks = read_events(http.post(CHAT, json={"messages": HELLO, "stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_continuous_usage_counts_what_was_sent(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ab", "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, last = read_events(http.post(COMPLETIONS, json=body).text)
    num_tokens = 0
    for chunk in chunks:
        num_tokens += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == num_tokens
    assert last["usage"] == chunks[-1]["usage"]
    assert last["choices"] == []


def test_what_is_left_of_the_context() -> None:
    llm = content_llm(num_blocks=16)
    with serving(llm) as url:
        for params, num_tokens in ({"max_tokens": 4}, 4), ({}, llm.max_model_len - 3):
            body = {"token_ids": [0, 256, 512], "sampling_params": {"ignore_eos": True, **params}}
            choice = httpx.post(url + GENERATE, json=body).json()["choices"][0]
            assert len(choice["token_ids"]) == num_tokens
            assert choice["finish_reason"] == "length"


def test_priority_is_for_its_policy() -> None:
    with serving(content_llm(policy="priority")) as url:
        for priority, status in (5, 200), (-1, 400), (10**9, 400):
            answer = httpx.post(url + COMPLETIONS, json={"prompt": "abc", "priority": priority})
            assert answer.status_code == status
            assert answer.json().get("error", {"param": "priority"})["param"] == "priority"
