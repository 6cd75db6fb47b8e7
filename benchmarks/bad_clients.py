"""Crowds of bad clients, in a separate process that ``benchmarks.crowd`` starts.

    python -m benchmarks.bad_clients KIND PORT

Reads lines from standard input: "go" starts a crowd, "stop" aborts its connections. Data that takes
long to create is created before the first "go". The answer to each line is "done".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

CHAT = "/v1/chat/completions"
NUM_LEAVERS, NUM_READERS = 66, 50
_MIB = 1 << 20
_PAUSE_S = 1.0  # between requests of bad clients, so that their bandwidth is not what is measured
_numbers = itertools.count()

Client = Callable[[int], Coroutine[Any, Any, None]]


def request(path: str, body: bytes, method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def chat(max_tokens: int, **more: object) -> bytes:
    text = f"hello {next(_numbers)}"
    messages = [{"role": "user", "content": text}]
    fields = {"messages": messages, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return request(CHAT, json.dumps({**fields, "max_tokens": max_tokens, **more}).encode())


async def send(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def _send_and_leave(port: int, data: bytes, stay_s: float) -> None:
    reader, writer = await send(port, data)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stay_s):
                await writer.drain()
                await reader.read()
    finally:
        writer.transport.abort()
    await asyncio.sleep(_PAUSE_S)


async def _leave(port: int) -> None:
    _, writer = await send(port, chat(64))
    try:
        await asyncio.sleep(random.uniform(0.02, 2.0))
    finally:
        writer.transport.abort()
    await asyncio.sleep(_PAUSE_S)


async def _never_read(port: int) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, chat(1500, request_id="x" * 256))
        await asyncio.sleep(3600.0)


async def _read(port: int) -> None:
    reader, writer = await send(port, chat(1500, request_id="x" * 256))
    try:
        while await reader.read(1 << 16):
            pass
    finally:
        writer.transport.abort()


def _texts() -> list[bytes]:
    texts = ["a b c " * (8 * _MIB // 6), "a" * (8 * _MIB), " \n" * (4 * _MIB)]
    return [request(CHAT, json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
            for text in texts]  # fmt: skip


def _bodies() -> list[bytes]:
    lists = b'{"prompt":[' + b",".join([b"[1]"] * (11 * _MIB // 4)) + b"]}"
    numbers = b'{"prompt":[' + b",".join([b"1"] * (11 * _MIB // 2)) + b"]}"
    return [request("/v1/completions", lists), request("/v1/completions", numbers),
            request("/health", b" " * (15 * _MIB), "GET")]  # fmt: skip


def _schemas(num: int) -> list[bytes]:
    made = []
    for _ in range(num):
        number = next(_numbers)
        names = {f"n{number}_{i}": {"type": "string", "maxLength": 100 + i} for i in range(2000)}
        schema = {"type": "object", "properties": names, "required": list(names)}
        made.append(chat(2, guided_json=schema))
    return made


def _senders(data: Sequence[bytes], num_clients: int, stay_s: float) -> list[Client]:
    """Clients that send the next of ``data`` in turn, wait for the answer, and leave."""
    turns = itertools.cycle(data)
    return [lambda port: _send_and_leave(port, next(turns), stay_s)] * num_clients


KINDS: dict[str, Callable[[], list[Client]]] = {
    "nothing": list,
    "leavers": lambda: [_leave] * NUM_LEAVERS,
    "texts": lambda: _senders(_texts(), 6, 1.0),
    # As many as the clients of a long run send, each of them new.
    "schemas": lambda: _senders(_schemas(200), 12, 10.0),
    "readers": lambda: [_never_read] * NUM_READERS,
    "reading": lambda: [_read] * NUM_READERS,
    "bodies": lambda: _senders(_bodies(), 12, 5.0),
}


async def _repeat(client: Client, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            await client(port)


async def _run(kind: str, port: int) -> None:
    clients = KINDS[kind]()
    tasks: list[asyncio.Task[None]] = []
    print("done", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "go":
            tasks = [asyncio.create_task(_repeat(client, port)) for client in clients]
        else:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        print("done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    asyncio.run(_run(arguments.kind, arguments.port))


if __name__ == "__main__":
    main()
