"""Bodies, headers, content types and timeouts that the server rejects before any endpoint runs."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from pagespec import AsyncLLM
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig
from pagespec.server.run import listen
from tests.server.raw_http import connected, head, read_answer
from tests.support.content_llm import content_llm
from tests.support.server import running, serving

MAX_BYTES = 5000
JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def app() -> FastAPI:
    config = ServerConfig(max_body_bytes=MAX_BYTES, body_timeout_s=2.0, request_timeout_s=2.5)
    app = create_app(AsyncLLM(content_llm()), config)
    app.state.cancelled = []

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @app.post("/mirror")
    async def mirror(request: Request) -> Response:
        return Response(await request.body())

    @app.post("/slow")
    async def slow(stream: bool = False) -> object:
        async def events() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: {}\n\n"
                    await asyncio.sleep(0.1)
            finally:
                app.state.cancelled.append("stream")

        if stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        try:
            await asyncio.sleep(30)
        finally:
            app.state.cancelled.append("plain")
        return None

    @app.post("/broken")
    async def broken() -> None:
        raise RuntimeError("secret of the house")

    return app


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with running(app) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as http:
        yield http


def error_of(answer: httpx.Response) -> dict[str, object]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return error


def test_a_body_within_the_limit_is_taken_in(http: httpx.Client) -> None:
    assert http.post("/echo", json="x" * (MAX_BYTES - 2)).json() == MAX_BYTES


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("num_bytes", [MAX_BYTES + 1, 3_000_000])
def test_a_larger_one_is_refused(http: httpx.Client, num_bytes: int, is_chunked: bool) -> None:
    body = b"x" * num_bytes
    content = iter([body[i : i + 1000] for i in range(0, num_bytes, 1000)]) if is_chunked else body
    answer = http.post("/echo", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert error_of(answer)["message"] == "the body has more than 5000 bytes"


def test_a_body_that_is_announced_too_large_is_not_waited_for(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(head("/echo", JSON, "Content-Length: 6000", "Expect: 100-continue"))
        assert read_answer(connection)[0] == 413


@pytest.mark.parametrize("size", [2, 4000])
def test_an_offer_of_another_protocol_is_not_taken_and_the_body_is_read(
    url: str, size: int
) -> None:
    """Java's client sends such an offer on each new connection."""
    offer = ["Connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "HTTP2-Settings: AAMA"]
    body = b" " * (size - 2) + b"{}"
    with connected(url) as connection:
        for headers in (offer, [], offer):
            whole = head("/echo", JSON, f"Content-Length: {size}", *headers) + body
            connection.sendall(whole[:100])
            connection.sendall(whole[100:])
            status, _, answer = read_answer(connection)
            assert (status, answer) == (200, str(size).encode())
        text = b"a\r\nUpgrade: h2c\r\n"
        connection.sendall(head("/mirror", JSON, f"Content-Length: {len(text)}") + text)
        assert read_answer(connection)[2] == text, "a body is left alone"


def test_nothing_is_written_into_an_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of the next request are incomplete while a stream is written."""
    monkeypatch.setattr("pagespec.server.connection.HEADER_TIMEOUT_S", 0.5)
    with connected(url) as connection:
        connection.sendall(head("/slow?stream=true", JSON, "Content-Length: 0"))
        time.sleep(0.2)
        connection.sendall(b"POST /ec")
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    answer = b"".join(parts)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"0\r\n\r\n"), "it came to its end"


def test_an_answer_does_not_wait_for_acknowledgements() -> None:
    """On a connection that asyncio accepts from the server's own socket."""
    listener = listen(ServerConfig(host="127.0.0.1", port=0))

    async def main() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(take, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            async with asyncio.timeout(20):
                is_set = await found
            writer.close()
        return is_set

    assert asyncio.run(main())


def test_a_slow_body_is_given_up(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(head("/echo", JSON, "Content-Length: 10") + b"{")
        status, headers, body = read_answer(connection)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["message"] == "the body took longer than 2 s"
        assert connection.recv(1) == b""


def test_a_body_that_is_not_read_must_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagespec.server.connection.DISCARD_TIMEOUT_S", 0.5)
    with connected(url) as connection:
        connection.sendall(head("/version", "Content-Length: 99", method="GET"))
        assert read_answer(connection)[0] == 200
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(90):
                connection.sendall(b"x")
                time.sleep(0.1)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_other_types_are_refused(http: httpx.Client, kind: str) -> None:
    answer = http.post("/echo", content=b"{}", headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert "must be application/json" in str(error_of(answer)["message"])


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/ld+json"])
def test_types_of_json_are_taken(http: httpx.Client, kind: str) -> None:
    assert http.post("/echo", content=b"{}", headers={"Content-Type": kind}).json() == 2


def test_large_headers_are_refused(http: httpx.Client) -> None:
    answer = http.get("/version", headers={"X-Large": "x" * (66 << 10)})
    assert answer.status_code == 431
    assert error_of(answer)["type"] == "RequestHeaderFieldsTooLargeError"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/nothing", 404),
        ("POST", "/version", 405),
        ("DELETE", "/v1/models", 405),
        ("HEAD", "/echo", 405),
        ("OPTIONS", "/echo", 405),
    ],
)
def test_unknown_paths_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    if method != "HEAD":
        error_of(answer)
    if status == 405:
        assert answer.headers["allow"]


def test_time_is_limited(http: httpx.Client, app: FastAPI) -> None:
    app.state.cancelled.clear()
    answer = http.post("/slow")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert error_of(answer)["message"] == "the request took longer than 2.5 s"
    assert app.state.cancelled == ["plain"]


def test_time_of_a_stream_is_limited(http: httpx.Client, app: FastAPI) -> None:
    app.state.cancelled.clear()
    events = http.post("/slow?stream=true").text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == 503
    wait_for(lambda: app.state.cancelled == ["stream"])


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_no_work_is_done_for_a_disconnected_client(url: str, app: FastAPI, kind: str) -> None:
    app.state.cancelled.clear()
    began = time.monotonic()
    with connected(url) as connection:
        query = "?stream=true" if kind == "stream" else ""
        connection.sendall(head(f"/slow{query}", "Content-Length: 0"))
        time.sleep(0.1)
        assert not app.state.cancelled
    wait_for(lambda: app.state.cancelled == [kind])
    assert time.monotonic() - began < 2, "it was the limit of time"
    wait_for(lambda: app.state.context.num_requests == 0)


def test_an_internal_error_reveals_no_details(http: httpx.Client) -> None:
    answer = http.post("/broken")
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "the server failed"
    assert "secret" not in answer.text


def test_request_ids_are_kept_or_given(http: httpx.Client) -> None:
    own = http.get("/version", headers={"X-Request-Id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    given = {http.get("/version").headers["x-request-id"] for _ in range(3)}
    assert len(given) == 3
    for bad in ("two words", "x" * 200, ""):
        answer = http.get("/nothing", headers={"X-Request-Id": bad})
        assert len(answer.headers["x-request-id"]) == 32


def test_two_hundred_connections() -> None:
    # A server of its own: 200 threads that begin at once are slower than the others' limits.
    limits = httpx.Limits(max_connections=200)
    with (
        serving(content_llm()) as url,
        httpx.Client(base_url=url, limits=limits, timeout=60) as http,
        ThreadPoolExecutor(200) as pool,
    ):
        answers = pool.map(
            lambda n: http.post("/tokenize", json={"prompt": "a" * n}).json(), range(1, 201)
        )
        assert [answer["count"] for answer in answers] == list(range(1, 201))


def wait_for(condition: object, limit_s: float = 5.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)
