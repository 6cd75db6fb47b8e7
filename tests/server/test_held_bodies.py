"""Only requests that may have a body get one buffered, and all buffers share one limit."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.server.raw_http import connected, head, read_answer
from tests.server.serve_content import server_process

MIB = 1 << 20
NUM_CLIENTS = 60
JSON = "Content-Type: application/json"


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / MIB


@pytest.fixture(scope="module", params=["key", "open"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:  # type: ignore[type-arg]
    log = tmp_path_factory.mktemp("bodies") / "log"
    options = ["--api-key", "one"] if request.param == "key" else []
    with server_process(log, *options) as server:
        httpx.get(f"{server.url}/health")
        yield server


def send_much(connection: socket.socket, num_bytes: int) -> int:
    """Send as many bytes as the server accepts; return their number."""
    connection.settimeout(0.3)
    num_sent = 0
    try:
        while num_sent < num_bytes:
            num_sent += connection.send(b" " * min(MIB, num_bytes - num_sent))
    except (TimeoutError, OSError):
        pass
    return num_sent


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/page/app.js", "/health/"])
def test_open_paths_hold_no_body(server, method: str, path: str) -> None:  # type: ignore[no-untyped-def]
    before = rss_mib(server.process.pid)
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS // 5):
            connection = stack.enter_context(connected(server.url))
            size = f"Content-Length: {16 * MIB}"
            connection.sendall(head(path, JSON, size, method=method))
            send_much(connection, 15 * MIB)
        assert rss_mib(server.process.pid) - before < 50
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_open_path_is_answered_before_its_body_ends(server) -> None:  # type: ignore[no-untyped-def]
    with connected(server.url) as connection:
        body = b" " * 100_000
        whole = head("/version", f"Content-Length: {len(body)}", method="GET")
        connection.sendall(whole)
        assert read_answer(connection)[0] == 200
        connection.sendall(body)  # dropped, and the connection goes on
        connection.sendall(head("/version", method="GET"))
        assert read_answer(connection)[0] == 200


def test_all_bodies_together_have_a_limit(server) -> None:  # type: ignore[no-untyped-def]
    """Bodies are incomplete, so they stay buffered. Without a key, none is buffered."""
    before = rss_mib(server.process.pid)
    with ExitStack() as stack:
        connections = []
        for _ in range(NUM_CLIENTS // 3):
            connection = stack.enter_context(connected(server.url))
            connection.sendall(head("/v1/completions", JSON, f"Content-Length: {16 * MIB}"))
            send_much(connection, 15 * MIB)
            connections.append(connection)
        assert rss_mib(server.process.pid) - before < 140
        # A small one is answered beside them.
        headers = {"Authorization": "Bearer one"}
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 1},
                            headers=headers, timeout=30)  # fmt: skip
        assert answer.status_code == 200
    until = time.monotonic() + 30
    while True:  # when those have left there is room again
        content = json.dumps({"prompt": "ab", "max_tokens": 1}).encode() + b" " * (10 * MIB)
        answer = httpx.post(f"{server.url}/v1/completions", content=content, timeout=60,
                            headers={**headers, "Content-Type": "application/json"})  # fmt: skip
        if answer.status_code == 200:
            break
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert time.monotonic() < until
        time.sleep(0.1)
