"""Pipelined requests, sent before the previous answer, are all answered in order."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from pagespec import AsyncLLM
from pagespec.server.app import create_app
from tests.server.raw_http import connected, head
from tests.support.content_llm import slow_llm
from tests.support.server import running, serving

PATH = "/v1/completions"
JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(slow_llm(0.02, num_blocks=200)) as url:
        yield url


def request(name: str, num_bytes: int = 0, is_chunked: bool = False) -> bytes:
    """A request that is answered after about 0.2 s, with a body of at least so many bytes."""
    content = json.dumps({"prompt": "ab", "max_tokens": 8, "ignore_eos": True, "request_id": name})
    body = content.encode().ljust(num_bytes)
    if is_chunked:
        parts = [body[i : i + 30_000] for i in range(0, len(body), 30_000)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
        return head(PATH, JSON, "Transfer-Encoding: chunked") + body
    return head(PATH, JSON, f"Content-Length: {len(body)}") + body


class Answers:
    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def next(self) -> tuple[int, str, dict[str, str]]:
        """The status, the id of the request, and the headers of the next answer."""
        line = self._file.readline()
        assert line, "the connection was closed without an answer"
        headers = {}
        while (row := self._file.readline().strip()) != b"":
            name, _, value = row.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = json.loads(self._file.read(int(headers["content-length"])))
        return int(line.split()[1]), str(body.get("id")).removeprefix("cmpl-"), headers


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 60_000, 70_000, 200_000, 1_000_000])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_half_of_a_head_behind_a_body(
    url: str, num_bytes: int, share: float, is_chunked: bool
) -> None:
    second = request("second")
    cut = int(share * (second.index(b"\r\n\r\n") + 3))
    with connected(url) as connection:
        answers = Answers(connection)
        connection.sendall(request("first", num_bytes, is_chunked) + second[:cut])
        assert answers.next()[:2] == (200, "first")
        connection.sendall(second[cut:] + request("third", 100_000))
        assert answers.next()[:2] == (200, "second")
        assert answers.next()[:2] == (200, "third")


def test_several_at_once(url: str) -> None:
    with connected(url) as connection:
        answers = Answers(connection)
        sizes = [0, 150_000, 0, 80_000, 300_000]
        connection.sendall(b"".join(request(str(i), n) for i, n in enumerate(sizes)))
        for number in range(len(sizes)):
            assert answers.next()[:2] == (200, str(number))


def test_headers_without_an_end_take_no_answer_away(url: str) -> None:
    with connected(url) as connection:
        answers = Answers(connection)
        connection.sendall(request("first", 200_000) + b"POST /v1/completions HTTP/1.1\r\nX: ")
        try:
            for _ in range(100):
                connection.sendall(b"x" * 10_000)
        except OSError:
            pass  # it is not read any more
        assert answers.next()[:2] == (200, "first")
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b"", "then it is closed"


@pytest.mark.parametrize("num_bytes", [60_000, 100_000, 200_000])
def test_half_of_a_head_in_the_data_that_ends_a_large_body(num_bytes: int) -> None:
    """The server reads both at once, since it was busy while they arrived."""
    app = create_app(AsyncLLM(slow_llm(0.02, num_blocks=200)))

    @app.post("/busy")
    async def busy() -> None:
        time.sleep(1.5)

    second = request("second")
    with running(app) as url, connected(url) as connection, connected(url) as other:
        answers = Answers(connection)
        connection.sendall(request("warm"))
        assert answers.next()[:2] == (200, "warm")
        other.sendall(head("/busy", "Content-Length: 0"))
        time.sleep(0.5)
        connection.sendall(request("first", num_bytes) + second[:30])
        assert answers.next()[:2] == (200, "first")
        connection.sendall(second[30:])
        assert answers.next()[:2] == (200, "second")


def test_requests_of_a_client_that_left_are_aborted(url: str) -> None:
    """Including the first request, for which uvicorn sends no disconnect event."""
    body = json.dumps({"prompt": "ab", "max_tokens": 300, "ignore_eos": True}).encode()
    whole = head(PATH, JSON, f"Content-Length: {len(body)}") + body
    with connected(url) as connection:
        connection.sendall(whole * 3)
        until = time.monotonic() + 20
        while httpx.get(f"{url}/load").json()["server_load"] != 1:
            assert time.monotonic() < until
            time.sleep(0.01)
    until = time.monotonic() + 4  # one takes 6 s at least
    while httpx.get(f"{url}/load").json()["server_load"]:
        assert time.monotonic() < until
        time.sleep(0.01)
