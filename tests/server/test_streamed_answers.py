"""A streamed answer adds up to the unstreamed one, for every kind of request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagespec import LLM
from tests.server.chunks import alike, joined_answer, read_events
from tests.support.chat_models import WEATHER, save_chat_model
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

USAGE = {"include_usage": True}
TEXTS = ["hé ab", "a" * 40]
HELLO = [{"role": "user", "content": "hé?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
ANSWERS = [
    "Plain words, 語.",
    "<think>\nHow so? é\n</think>\n\nBecause.",
    "<think>\nAsk.\n</think>\n\nI ask:\n" + CALL % "Oslo" + "\n" + CALL % "Rome",
    CALL % "Bern",
    "<think>never closed",
    "<tool_call>\n{no json\n</tool_call> and on",
]


@pytest.fixture(scope="module")
def model_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model with random weights, so that log-probabilities and tokens of every kind occur."""
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    llm = LLM(folder, max_num_seqs=8, num_blocks=200, compile="eager")
    with serving(llm) as url:
        yield url


@pytest.fixture(scope="module")
def script_url() -> Iterator[str]:
    with serving(scripted_llm("qwen3", ANSWERS, max_num_seqs=3)) as url:
        yield url


def both(url: str, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The unstreamed answer, and the streamed one joined from its chunks."""
    whole = httpx.post(url + path, json=body, timeout=60)
    assert whole.status_code == 200, whole.text
    streaming = {**body, "stream": True, "stream_options": USAGE}
    streamed = httpx.post(url + path, json=streaming, timeout=60)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = read_events(streamed.text)
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    return whole.json(), joined_answer(chunks)


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": TEXTS[0]},
    {"prompt": TEXTS, "max_tokens": 5},
    {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True},
    {"prompt": [[5, 6, 7], [8, 9]], "n": 3, "return_token_ids": True, "logprobs": 2},
    {"prompt": TEXTS[0], "echo": True},
    {"prompt": TEXTS[0], "echo": True, "logprobs": 0},
    {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 3, "n": 2, "max_tokens": 4},
    {"prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": TEXTS, "echo": True, "max_tokens": 0, "return_token_ids": True},
    {"prompt": TEXTS[0], "logprobs": 4, "return_tokens_as_token_ids": True},
    {"prompt": TEXTS[0], "logprobs": 0, "temperature": 0, "max_tokens": 30},
    {"prompt": TEXTS[0], "stop": ["a", "é"], "max_tokens": 60, "logprobs": 1},
    {"prompt": TEXTS[0], "stop": "b", "include_stop_str_in_output": True, "max_tokens": 60},
    {"prompt": TEXTS[1], "truncate_prompt_tokens": 4, "echo": True},
    {"prompt": TEXTS[0], "skip_special_tokens": False, "max_tokens": 40, "ignore_eos": True},
    {"prompt": TEXTS[0], "guided_choice": ["abba", "baab"], "logprobs": 1},
    {"prompt": TEXTS[0], "add_special_tokens": False, "echo": True},
]


@pytest.mark.parametrize("body", COMPLETIONS, ids=str)
def test_completions(model_url: str, body: dict[str, Any]) -> None:
    whole, streamed = both(model_url, "/v1/completions", {"seed": 3, **body})
    assert alike(whole) == alike(streamed)


CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3, "logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "return_token_ids": True},
    {"stop": ["a", "\n"], "max_tokens": 60, "return_token_ids": True},
    {"temperature": 0, "max_completion_tokens": 30, "logprobs": True},
    {"response_format": {"type": "json_object"}, "max_tokens": 20},
    {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 12,
    },
]


@pytest.mark.parametrize("body", CHATS, ids=str)
def test_chats(model_url: str, body: dict[str, Any]) -> None:
    body = {"messages": HELLO, "seed": 3, "max_tokens": 20, **body}
    whole, streamed = both(model_url, "/v1/chat/completions", body)
    assert alike(whole) == alike(streamed)


GENERATIONS: list[dict[str, Any]] = [
    {},
    {"output_mode": "text"},
    {"sampling_params": {"logprobs": 2, "n": 2, "max_tokens": 7, "seed": 5}},
    {"sampling_params": {"stop": ["a"], "max_tokens": 60, "seed": 5}, "output_mode": "text"},
]


@pytest.mark.parametrize("body", GENERATIONS, ids=str)
def test_tokens_in_tokens_out(model_url: str, body: dict[str, Any]) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "seed": 3}, **body}
    whole, streamed = both(model_url, "/inference/v1/generate", body)
    assert alike(whole) == alike(streamed)


ASKED: list[dict[str, Any]] = [
    {},
    {"tools": [WEATHER]},
    {"include_reasoning": False},
    {"tools": [WEATHER], "parallel_tool_calls": False},
    {"tools": [WEATHER], "max_tokens": 40},
    {"tools": [WEATHER], "tool_choice": "none"},
]


@pytest.mark.parametrize("extra", ASKED, ids=str)
@pytest.mark.parametrize("seed", range(len(ANSWERS)))
def test_reasoning_and_calls(script_url: str, seed: int, extra: dict[str, Any]) -> None:
    body = {"messages": HELLO, "seed": seed, "max_tokens": 400, **extra}
    whole, streamed = both(script_url, "/v1/chat/completions", body)
    assert alike(whole) == alike(streamed)


def test_several_answers_with_calls_of_their_own(script_url: str) -> None:
    body = {"messages": HELLO, "seed": 0, "n": len(ANSWERS), "tools": [WEATHER], "max_tokens": 400}
    whole, streamed = both(script_url, "/v1/chat/completions", body)
    reasons = [choice["finish_reason"] for choice in whole["choices"]]
    assert reasons == ["stop", "stop", "tool_calls", "tool_calls", "stop", "stop"]
    ids = [c["id"] for choice in whole["choices"] for c in choice["message"].get("tool_calls", ())]
    assert len(ids) == len(set(ids)) == 3
    assert alike(whole) == alike(streamed)
