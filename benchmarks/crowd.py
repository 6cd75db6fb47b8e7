"""What steady clients of a server feel of bad ones: the time to the first token, and the memory.

A tiny random model is served by ``pagespec serve`` in a process of its own. Steady clients stream
short chats, alone and beside each kind of crowd:

* leavers: of 200 clients a third leaves in the midst of answers; "alone" are 200 that stay;
* texts: 8 MB of text each second from each of six clients, which leave;
* schemas: twelve clients with schemas that are always new and take long to compile;
* readers: clients that never read their answers;
* bodies: 11 MB of JSON, and bodies for paths that take none.

Prints the time to the first token at the 50th and 90th percentile, the ratio to the same clients
alone, and the most memory of the server (RSS).

    python -m benchmarks.crowd --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.chat_models import save_chat_model

_ROOT = Path(__file__).resolve().parents[1]
_CHAT = "/v1/chat/completions"
_NUM_STEADY, _NUM_MANY = 8, 200
_PAUSE_S = 1.0  # of bad clients, so that it is not their bandwidth that is measured
_MIB = 1 << 20
_FIRST_TOKEN = re.compile(rb'"token_ids":\[\d')
_numbers = itertools.count()


class Server:
    """A server's process; ``port`` is where it listens."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        model = save_chat_model(folder / "model")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "pagespec.cli", "serve", "--model", model, "--compile"]
        command += ["eager", "--port", str(self.port), "--no-access-log", "--num-blocks", "2000"]
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                cwd=_ROOT,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def wait(self, limit_s: float = 120.0) -> None:
        until = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(self._log.read_text()[-3000:])
            time.sleep(0.1)

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def _request(path: str, body: bytes, method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _chat(max_tokens: int, **more: object) -> bytes:
    text = f"hello {next(_numbers)}"
    messages = [{"role": "user", "content": text}]
    fields = {"messages": messages, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return _request(_CHAT, json.dumps({**fields, "max_tokens": max_tokens, **more}).encode())


async def _send(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def _steady(port: int, until: float, found: list[float], max_tokens: int) -> None:
    while time.monotonic() < until:
        began = time.monotonic()
        reader, writer = await _send(port, _chat(max_tokens))
        received = b""
        while _FIRST_TOKEN.search(received) is None:
            part = await reader.read(1 << 16)
            if not part:
                raise RuntimeError(f"no first token: {received[-500:]!r}")
            received += part
        found.append(time.monotonic() - began)
        while await reader.read(1 << 16):
            pass
        writer.close()
        await asyncio.sleep(0.05)


async def _repeat(until: float, act: Callable[[], Awaitable[None]]) -> None:
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            await act()


async def _leave(port: int) -> None:
    _, writer = await _send(port, _chat(64))
    await asyncio.sleep(random.uniform(0.02, 0.5))
    writer.transport.abort()


def _texts() -> list[bytes]:
    texts = ["a b c " * (8 * _MIB // 6), "a" * (8 * _MIB), " \n" * (4 * _MIB)]
    return [_request(_CHAT, json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
            for text in texts]  # fmt: skip


async def _send_and_leave(port: int, data: bytes, stay_s: float) -> None:
    reader, writer = await _send(port, data)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(stay_s):
            await writer.drain()
            await reader.read()
    writer.transport.abort()
    await asyncio.sleep(_PAUSE_S)


async def _slow_schema(port: int) -> None:
    names = {
        f"n{next(_numbers)}_{i}": {"type": "string", "maxLength": 100 + i} for i in range(2000)
    }
    schema = {"type": "object", "properties": names, "required": list(names)}
    await _send_and_leave(port, _chat(2, guided_json=schema), 10.0)


async def _never_read(port: int, until: float) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, _chat(1500, request_id="x" * 256))
        await asyncio.sleep(max(0.0, until - time.monotonic()))


def _bodies() -> list[bytes]:
    lists = b'{"prompt":[' + b",".join([b"[1]"] * (11 * _MIB // 4)) + b"]}"
    numbers = b'{"prompt":[' + b",".join([b"1"] * (11 * _MIB // 2)) + b"]}"
    return [_request("/v1/completions", lists), _request("/v1/completions", numbers),
            _request("/health", b" " * (15 * _MIB), "GET")]  # fmt: skip


async def _measure(
    server: Server, seconds: float, kind: str, num_steady: int
) -> tuple[list[float], float]:
    port, until = server.port, time.monotonic() + seconds
    crowd: list[Awaitable[None]] = []
    if kind == "leavers":
        num_leavers = num_steady // 3
        crowd = [_repeat(until, lambda: _leave(port)) for _ in range(num_leavers)]
        num_steady -= num_leavers
    elif kind == "texts":
        crowd = [_repeat(until, lambda d=data: _send_and_leave(port, d, 1.0))  # type: ignore[misc]
                 for data in _texts() * 2]  # fmt: skip
    elif kind == "schemas":
        crowd = [_repeat(until, lambda: _slow_schema(port)) for _ in range(12)]
    elif kind == "readers":
        crowd = [_never_read(port, until) for _ in range(50)]
    elif kind == "bodies":
        crowd = [_repeat(until, lambda d=data: _send_and_leave(port, d, 5.0))  # type: ignore[misc]
                 for data in _bodies() * 4]  # fmt: skip
    found: list[float] = []
    most = server.rss_mib()

    async def watch() -> None:
        nonlocal most
        while time.monotonic() < until:
            most = max(most, server.rss_mib())
            await asyncio.sleep(0.05)

    tokens = 8 if num_steady == _NUM_STEADY else 32
    steady = [_steady(port, until, found, tokens) for _ in range(num_steady)]
    await asyncio.gather(watch(), *crowd, *steady)
    return found, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--kinds", default="leavers,texts,schemas,readers,bodies")
    parser.add_argument("options", nargs="*", help="of pagespec serve, behind --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), arguments.options)
        try:
            server.wait()
            alone: dict[int, float] = {}
            for kind in arguments.kinds.split(","):
                num_steady = _NUM_MANY if kind == "leavers" else _NUM_STEADY
                if num_steady not in alone:
                    asyncio.run(_measure(server, 2.0, "nothing", num_steady))
                    alone[num_steady] = _report(server, arguments.seconds, "alone", num_steady)
                _report(server, arguments.seconds, kind, num_steady, alone[num_steady])
        finally:
            server.process.kill()
            server.process.wait()


def _report(
    server: Server, seconds: float, kind: str, num_steady: int, alone: float | None = None
) -> float:
    found, most = asyncio.run(_measure(server, seconds, kind, num_steady))
    median = statistics.median(found)
    high = sorted(found)[int(0.9 * len(found))]
    ratio = "" if alone is None else f", {median / alone:.2f} times alone"
    print(
        f"{num_steady} steady clients, {kind}: first token {1000 * median:.0f} ms, 90% below "
        f"{1000 * high:.0f} ms{ratio}; {len(found)} answers, RSS {most:.0f} MiB at most",
        flush=True,
    )
    return median


if __name__ == "__main__":
    main()
