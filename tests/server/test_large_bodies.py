"""Parsing a large body blocks no other client, neither by its constraint nor by its parts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pagespec import LLM, AsyncLLM
from pagespec.engine import structured_outputs
from pagespec.server import bodies
from tests.support.chat_models import save_chat_model
from tests.support.server import serving

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
JSON = {"Content-Type": "application/json"}
QUICK_S = 20.0
NUM_SLOW = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = save_chat_model(tmp_path_factory.mktemp("model"))
    llm = LLM(model, compile="eager", max_num_seqs=8, num_blocks=400)
    with serving(AsyncLLM(llm, max_num_requests=64)) as url:
        assert httpx.post(f"{url}{CHAT}", json=chat(), timeout=60).status_code == 200  # warms up
        yield url


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **more}


def schema(name: str, num_properties: int = 1000) -> dict[str, Any]:
    names = {f"{name}_property_{i}": {"type": "string"} for i in range(num_properties)}
    return {"type": "object", "properties": names}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema(name)}}


READ: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "guided_json": (CHAT, lambda name: chat(guided_json=schema(name))),
    "text": (CHAT, lambda name: chat(guided_json=json.dumps(schema(name)))),
    "response_format": (
        CHAT,
        lambda name: chat(
            response_format={"type": "json_schema", "json_schema": {"schema": schema(name)}}
        ),
    ),
    "structured_outputs": (CHAT, lambda name: chat(structured_outputs={"json": schema(name)})),
    "tools": (CHAT, lambda name: chat(tools=[tool(name)], tool_choice="required")),
    "choice": (
        CHAT,
        lambda name: chat(guided_choice=[f"{name} choice {i}" for i in range(2000)]),
    ),
    "completions": (
        COMPLETIONS,
        lambda name: {"prompt": "a", "max_tokens": 2, "guided_json": schema(name)},
    ),
    "generate": (
        GENERATE,
        lambda name: {
            "token_ids": [5],
            "sampling_params": {"max_tokens": 2, "structured_outputs": {"json": schema(name)}},
        },
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_a_large_constraint_is_read_off_the_loop(
    url: str, hold: Callable[..., Any], kind: str
) -> None:
    """The event loop answers other requests while it waits for the constraint."""
    held = hold(structured_outputs, "_require_short", lambda _, text: f"slow_{kind}" in text)
    path, make = READ[kind]
    content = json.dumps(make(f"slow_{kind}")).encode()
    assert len(content) > bodies.MAX_INLINE_BYTES
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(httpx.post(f"{url}{path}", content=content, headers=JSON, timeout=60))

    thread = threading.Thread(target=post)
    thread.start()
    assert held.has_begun.wait(30), "it is not read there"
    try:
        assert httpx.get(f"{url}/health", timeout=QUICK_S).status_code == 200
        assert httpx.post(f"{url}{CHAT}", json=chat(), timeout=QUICK_S).status_code == 200
    finally:
        held.goes_on.set()
    thread.join()
    # Tools are a part of the prompt, too, which then is too long.
    assert answers[0].status_code == (400 if kind == "tools" else 200), answers[0].text[:300]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies_of_some_size_take_no_thread_of_chats(
    url: str, hold: Callable[..., Any], path: str
) -> None:
    """Many large bodies at once wait for each other, and no chat waits for them."""
    held = hold(bodies, "parse", lambda body: len(body) > bodies.MAX_INLINE_BYTES)
    asked = chat() if path == CHAT else {"prompt": "a", "max_tokens": 2}
    content = json.dumps(asked).encode() + b" " * (2 * bodies.MAX_INLINE_BYTES)
    statuses: list[int] = []

    def post() -> None:
        answer = httpx.post(f"{url}{path}", content=content, headers=JSON, timeout=60)
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=post) for _ in range(NUM_SLOW)]
    for thread in threads:
        thread.start()
    assert held.has_begun.wait(30), "it is not parsed there"
    time.sleep(0.5)  # the others wait behind it
    try:
        assert httpx.post(f"{url}{CHAT}", json=chat(), timeout=QUICK_S).status_code == 200
        assert not statuses, "they were not held"
    finally:
        held.goes_on.set()
    for thread in threads:
        thread.join()
    assert statuses == [200] * NUM_SLOW


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "schema": {"guided_json": {"type": "integer", "divisibleBy": 2}},
    "two": {"guided_regex": "a", "guided_choice": ["a"]},
    "format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
    "bias": {"logit_bias": {"x": 1.0}},
    "temperature": {"temperature": -1.0},
    "role": {"messages": [{"role": "banana", "content": "a"}], "temperature": -1.0},
    "tool_choice": {"tool_choice": "auto", "temperature": -1.0},
    "best_of": {"best_of": 3},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", BAD_FIELDS)
def test_errors_are_those_of_a_small_body(url: str, kind: str, stream: bool) -> None:
    """Each error precedes the answer; of several errors, the same one is reported."""
    content = json.dumps({**chat(stream=stream), **BAD_FIELDS[kind]}).encode()
    answers = [
        httpx.post(f"{url}{CHAT}", content=content + padding, headers=JSON, timeout=60)
        for padding in (b"", b" " * (2 * bodies.MAX_INLINE_BYTES))
    ]
    assert answers[0].status_code == answers[1].status_code
    if answers[0].status_code == 200:
        assert (kind, stream) == ("best_of", False)
        return
    assert answers[0].status_code == 400
    assert answers[0].json() == answers[1].json()
