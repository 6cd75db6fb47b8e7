"""What clients of vLLM and OpenAI rely on: null fields, usage in streams, echo, a root path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pagespec import AsyncLLM, SamplingParams
from pagespec.server.app import create_app
from tests.server.chunks import read_events
from tests.support.content_llm import content_llm
from tests.support.scripted_llm import scripted_llm
from tests.support.server import client, serving

HELLO = [{"role": "user", "content": "hé?"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
USAGES = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with served() as http:
        yield http


@contextmanager
def served(**config: Any) -> Iterator[httpx.Client]:
    llm = scripted_llm("qwen3", ["Plain words."], max_num_seqs=4)
    with (
        serving(llm, model="tiny", **config) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield http


# Null fields ------------------------------------------------------------------------------------

SHARED = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params")
NULLS = {
    CHAT: (
        {"messages": HELLO},
        (*SHARED, "metrics", "prompt_logprobs", "prompt_token_ids", "prompt_text"),
        ("logprobs", "stop_reason", "token_ids", "routed_experts"),
    ),
    COMPLETIONS: (
        {"prompt": "ab"},
        (*SHARED, "metrics"),
        (*("logprobs", "stop_reason", "token_ids", "routed_experts"),
         *("prompt_logprobs", "prompt_token_ids")),
    ),
    GENERATE: (
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}},
        ("prompt_logprobs", "kv_transfer_params", "ec_transfer_params"),
        ("logprobs", "stop_reason", "routed_experts"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", NULLS)
def test_absent_fields_are_null(http: httpx.Client, path: str) -> None:
    body, of_answer, of_choice = NULLS[path]
    answer = http.post(path, json=body).json()
    (choice,) = answer["choices"]
    assert [answer[name] for name in of_answer] == [None] * len(of_answer)
    assert [choice[name] for name in of_choice] == [None] * len(of_choice)
    if path == CHAT:
        message = choice["message"]
        assert message["annotations"] is message["audio"] is message["function_call"] is None
        assert "tool_calls" not in message


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_absent_fields_of_chunks_are_null(http: httpx.Client, path: str) -> None:
    chunks = read_events(http.post(path, json={**NULLS[path][0], "stream": True}).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    if path == CHAT:
        # As in vLLM: only the first chunk has a field for the prompt.
        assert ["prompt_token_ids" in chunk for chunk in chunks] == [
            True,
            *[False] * len(chunks[1:]),
        ]
        assert "token_ids" not in choices.pop(0)
    else:
        assert all(choice["prompt_token_ids"] is None for choice in choices)
    assert all(choice["token_ids"] is None for choice in choices)
    assert choices[-1]["stop_reason"] is None


# Usage in streams -------------------------------------------------------------------------------


def counts_of(answer: httpx.Response) -> list[int | None]:
    chunks = read_events(answer.text)
    return [(chunk.get("usage") or {}).get("completion_tokens") for chunk in chunks]


@pytest.mark.parametrize("max_tokens", [6, None])  # it ends with and without text in its last delta
def test_each_chunk_counts_more_tokens(http: httpx.Client, max_tokens: int | None) -> None:
    body = {"messages": HELLO, "max_tokens": max_tokens, "stream": True}
    answer = http.post(CHAT, json={**body, "stream_options": USAGES})
    counts = counts_of(answer)
    assert counts[0] == 0  # the role's chunk
    assert counts[:-1] == sorted({*counts})
    assert counts[-1] == counts[-2]  # a chunk of its own, without choices
    assert read_events(answer.text)[-1]["choices"] == []


def test_the_server_can_force_usages() -> None:
    with served(enable_force_include_usage=True) as http:
        counts = counts_of(http.post(CHAT, json={"messages": HELLO, "stream": True}))
    assert counts[0] == 0
    assert counts[-1] == counts[-2] > 0


def test_usage_of_each_chunk_needs_the_usage(http: httpx.Client) -> None:
    body = {"prompt": "ab", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert not any(counts_of(http.post(COMPLETIONS, json=body)))


# Echo -------------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "So"}, {"type": "text", "text": " far"}]


@pytest.mark.parametrize(("content", "echoed"), [("So far", "So far"), (PARTS, "So\n far")])
@pytest.mark.parametrize("stream", [False, True])
def test_the_last_message_is_echoed(
    http: httpx.Client, content: Any, echoed: str, stream: bool
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain = http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    answer = http.post(CHAT, json={**body, "echo": True, "stream": stream})
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in read_events(answer.text)]
        assert deltas[1] == {"content": echoed}
        found = "".join(delta.get("content", "") for delta in deltas)
    else:
        found = answer.json()["choices"][0]["message"]["content"]
    assert found == echoed + plain


def test_a_users_message_is_not_echoed(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": HELLO, "echo": True}).json()
    assert answer["choices"][0]["message"]["content"] == "Plain words."


@pytest.mark.parametrize("stream", [False, True])
def test_the_rendered_prompt_is_returned(http: httpx.Client, stream: bool) -> None:
    body = {"messages": HELLO, "return_prompt_text": True, "stream": stream}
    answer = http.post(CHAT, json=body)
    first, *rest = read_events(answer.text) if stream else [answer.json()]
    assert "hé?" in first["prompt_text"]
    assert first["prompt_text"].endswith("assistant\n")
    assert not any("prompt_text" in chunk for chunk in rest)


# Truncation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abcdefgh", [5, 6, 7, 8, 9, 10, 11, 12]])
def test_a_prompt_loses_its_beginning_or_its_end(http: httpx.Client, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}

    def ids(**fields: Any) -> list[int]:
        answer = http.post(COMPLETIONS, json={**body, **fields}).json()
        found: list[int] = answer["choices"][0]["prompt_token_ids"]
        return found

    whole = ids()
    for side, kept in ((None, whole[-4:]), ("left", whole[-4:]), ("right", whole[:4])):
        assert ids(truncate_prompt_tokens=4, truncation_side=side) == kept
    assert ids(truncate_prompt_tokens=-1, truncation_side="right") == whole


# Other paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_invocations_are_chats_or_completions(http: httpx.Client, path: str) -> None:
    body = NULLS[path][0]
    here, there = (http.post(where, json=body).json() for where in ("/invocations", path))
    assert here["choices"] == there["choices"]
    assert here["object"] == there["object"]


@pytest.mark.parametrize(
    ("content", "param"),
    [('{"messages": 1}', "messages"), ('{"prompt": 1}', "prompt"), ("{}", "prompt"), ("[", None),
     ('{"messages": [], "suffix": "a"}', "suffix")],
)  # fmt: skip
def test_wrong_invocations_are_refused(http: httpx.Client, content: str, param: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/invocations", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_message_is_left_open_or_answered(http: httpx.Client) -> None:
    body = {"messages": HELLO, "continue_final_message": True}
    assert http.post("/tokenize", json=body).status_code == 200
    answer = http.post("/tokenize", json={**body, "add_generation_prompt": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"


# Options of the server --------------------------------------------------------------------------


def test_a_root_path_is_served_with_and_without_it() -> None:
    with served(root_path="/llm", api_keys=("abc-123",)) as http:
        for prefix in ("", "/llm"):
            assert http.get(prefix + "/health").status_code == 200
            for key, status in (("abc", 401), ("abc-123", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                assert http.get(prefix + "/v1/models", headers=headers).status_code == status
                body = {"prompt": "ab", "max_tokens": 2}
                answer = http.post(prefix + COMPLETIONS, json=body, headers=headers)
                assert answer.status_code == status
        assert http.get("/llm/llm/health").status_code == 401


# Errors -----------------------------------------------------------------------------------------

VALID = {path: body for path, (body, *_) in NULLS.items()}


@pytest.mark.parametrize("path", NULLS)
@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_a_seed_beyond_64_signed_bits_is_refused(http: httpx.Client, path: str, seed: int) -> None:
    given = {"sampling_params": {"seed": seed}} if path == GENERATE else {"seed": seed}
    answer = http.post(path, json={**VALID[path], **given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "seed", 400)
    assert str(2**63 - 1) in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"bad1": 1, "2": 1, "bad2": 1}},
         'logit_bias = "bad1, bad2": its keys must be token ids, as "17"'),
        ({"stop": ["a", ""]}, 'stop = ["a", ""]: every stop string must be non-empty text'),
        ({"guided_regex": "a", "guided_choice": ["a"]},
         'guided_choice = "guided_regex, guided_choice": only one of these may be given'),
        ({"structured_outputs": {"whitespace_pattern": "a", "xml": None}},
         "structured_outputs.xml = null: is not supported"),
        ({"structured_outputs": {"json_object": True, "xml": True}},
         "structured_outputs.xml = true: is not supported"),
        ({"max_tokens": 0}, "max_tokens = 0: must be an integer of 1 or more, or null"),
    ],
)  # fmt: skip
def test_errors_show_values_as_json(
    http: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    error = http.post(COMPLETIONS, json={"prompt": "ab", **fields}).json()["error"]
    assert error["message"] == message
    assert set(error) == {"message", "type", "param", "code"}


# Metrics ----------------------------------------------------------------------------------------


def test_steps_count_prompt_and_generated_tokens() -> None:
    """vLLM counts 9 + 10 tokens for a prompt of 9 and an answer of 10, not the 18 positions."""

    async def scraped() -> str:
        engine = AsyncLLM(content_llm())
        params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        async with client(create_app(engine)) as http:
            for token in (0, 16):
                await (await engine.submit([token] * 9, params)).result()
            text = (await http.get("/metrics")).text
            await engine.shutdown()
        return text

    lines = asyncio.run(scraped()).splitlines()
    found = {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines)
             if name.startswith("vllm:iteration_tokens_total_")}  # fmt: skip
    (total,) = (number for name, number in found.items() if "_sum{" in name)
    (num_steps,) = (number for name, number in found.items() if "_count{" in name)
    assert (total, num_steps) == (2 * (9 + 10), 2 * 10)
    waiting = [line for line in lines if line.startswith("vllm:num_requests_waiting_by_reason{")]
    assert [json.dumps(reason) in line for line, reason in zip(waiting, ("capacity", "deferred"),
            strict=True)] == [True, True]  # fmt: skip
