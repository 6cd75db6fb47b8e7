"""A long text blocks no other request: not by its tokens or bytes, nor after a disconnect."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from pagespec.server.bodies import MAX_TEXT_BYTES
from pagespec.server.tokenization import MAX_NUM_TOKENS
from tests.server.raw_http import connected, head, read_answer
from tests.support.scripted_llm import BLOCK_SIZE, scripted_llm
from tests.support.server import serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_BLOCKS = 600
MAX_MODEL_LEN = NUM_BLOCKS * BLOCK_SIZE
HUGE = 8 << 20  # bytes; to tokenise them takes tens of seconds
SHORT_S = 8.0  # for an answer to a short text, also on a machine that is busy


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = scripted_llm("qwen3", ["Plain words."], num_blocks=NUM_BLOCKS, max_num_seqs=4)
    with serving(llm) as url:
        yield url


@pytest.fixture(scope="module")
def roomy_url() -> Iterator[str]:
    """A server whose context fits a text that takes seconds to tokenise."""
    llm = scripted_llm(
        "qwen3",
        ["Plain words."],
        num_blocks=100_000,
        max_num_seqs=4,
        max_num_batched_tokens=1 << 19,
    )
    with serving(llm) as url:
        yield url


def asked(path: str, text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    if path == CHAT:
        return path, {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
    return path, {"prompt": text, **more}


KINDS: dict[str, Any] = {
    "completions": lambda text: asked(COMPLETIONS, text, max_tokens=2),
    "chat": lambda text: asked(CHAT, text),
    "no special tokens": lambda text: asked(COMPLETIONS, text, add_special_tokens=False),
    "echo": lambda text: asked(COMPLETIONS, text, echo=True, max_tokens=2),
    "list": lambda text: (COMPLETIONS, {"prompt": ["a", text], "max_tokens": 2}),
    "truncated": lambda text: asked(COMPLETIONS, text, truncate_prompt_tokens=3, max_tokens=2),
    "truncated chat": lambda text: asked(CHAT, text, truncate_prompt_tokens=3),
    "tokenize": lambda text: asked("/tokenize", text),
    "tokenize chat": lambda text: ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
}
TEXTS = {"words": "ab a ", "letters": "b", "spaces": " ", "lines": "a\n"}


def text_of(name: str, num_bytes: int) -> str:
    return TEXTS[name] * (num_bytes // len(TEXTS[name]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(url: str, kind: str) -> None:
    path, body = KINDS[kind](text_of("words", HUGE))
    began = time.monotonic()
    answer = httpx.post(f"{url}{path}", json=body, timeout=300)
    elapsed_s = time.monotonic() - began
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    if "truncated" in kind or "tokenize" in kind:
        assert str(MAX_TEXT_BYTES) in message
    else:
        assert str(MAX_MODEL_LEN) in message
    assert len(message) < 500
    assert elapsed_s < SHORT_S


@pytest.mark.parametrize("text", TEXTS)
def test_others_are_answered_meanwhile(url: str, text: str) -> None:
    with ExitStack() as stack:
        for kind in KINDS:
            path, body = KINDS[kind](text_of(text, HUGE // 2))
            content = json.dumps(body).encode()
            connection = stack.enter_context(connected(url))
            size = f"Content-Length: {len(content)}"
            connection.sendall(head(path, "Content-Type: application/json", size) + content)
        for kind in KINDS:
            path, body = KINDS[kind]("ab a")
            began = time.monotonic()
            assert httpx.post(f"{url}{path}", json=body, timeout=300).status_code == 200
            assert time.monotonic() - began < SHORT_S, kind


def test_a_slow_text_does_not_delay_a_short_one(roomy_url: str) -> None:
    text = text_of("words", 400_000)
    done: list[float] = []

    def post() -> None:
        began = time.monotonic()
        answer = httpx.post(f"{roomy_url}{COMPLETIONS}", json={"prompt": text, "max_tokens": 1},
                            timeout=300)  # fmt: skip
        assert answer.status_code == 200, answer.text
        done.append(time.monotonic() - began)

    thread = threading.Thread(target=post)
    thread.start()
    try:
        num_answers = 0
        until = time.monotonic() + 300
        while not done and time.monotonic() < until:
            for path, body in (KINDS["chat"]("a"), KINDS["completions"]("a b"),
                               KINDS["completions"]("ab " * 3000)):  # fmt: skip
                began = time.monotonic()
                assert httpx.post(f"{roomy_url}{path}", json=body, timeout=300).is_success
                assert time.monotonic() - began < SHORT_S
                load = httpx.get(f"{roomy_url}/load").json()["server_load"]
                num_answers += 1
                assert load == 1 or done or num_answers < 3
    finally:
        thread.join()
    assert done


def test_texts_of_disconnected_clients_are_not_tokenised(roomy_url: str) -> None:
    path, body = KINDS["tokenize"](text_of("words", 250_000))
    content = json.dumps(body).encode()
    size = f"Content-Length: {len(content)}"
    whole = head(path, "Content-Type: application/json", size) + content
    began = time.monotonic()
    with connected(roomy_url, timeout_s=300) as alone:
        alone.sendall(whole)
        assert read_answer(alone)[0] == 200
    alone_s = time.monotonic() - began
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connected(roomy_url)).sendall(whole)
        time.sleep(0.5)
    began = time.monotonic()
    with connected(roomy_url, timeout_s=300) as last:
        last.sendall(whole)
        assert read_answer(last)[0] == 200
    assert time.monotonic() - began < 5 * alone_s + 2, "one of the others may be under way"
    until = time.monotonic() + 30
    while httpx.get(f"{roomy_url}/load").json()["server_load"]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_request_counts_from_when_it_arrives(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(head(COMPLETIONS, "Content-Type: application/json", "Content-Length: 9"))
        until = time.monotonic() + 20
        while httpx.get(f"{url}/load").json()["server_load"] != 1:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize("kind", ["truncated", "tokenize", "tokenize chat"])
def test_texts_beyond_the_context_are_cut_and_counted(url: str, kind: str) -> None:
    text = text_of("words", 40_000)
    path, body = KINDS[kind](text)
    answer = httpx.post(f"{url}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    if kind == "truncated":
        assert answer.json()["usage"]["prompt_tokens"] == 3
    else:
        assert answer.json()["count"] > MAX_MODEL_LEN
        assert answer.json()["count"] == len(answer.json()["tokens"])


def test_so_many_ids_are_decoded(url: str) -> None:
    answer = httpx.post(f"{url}/detokenize", json={"tokens": [70] * 100_000}, timeout=60)
    assert len(answer.json()["prompt"]) == 100_000
    answer = httpx.post(f"{url}/detokenize", json={"tokens": [70] * (MAX_NUM_TOKENS + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens"
    assert str(MAX_NUM_TOKENS) in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN])
def test_the_last_token_that_fits_is_taken(url: str, num_tokens: int) -> None:
    """The byte count must not cost a token: each of these tokens is two letters."""
    text = "ab" * num_tokens
    count = httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=60).json()["count"]
    assert count == num_tokens
    path, body = KINDS["completions"](text)
    status = httpx.post(f"{url}{path}", json=body | {"max_tokens": 1}, timeout=60).status_code
    assert status == (200 if num_tokens < MAX_MODEL_LEN else 400)
