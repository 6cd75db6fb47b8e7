"""The server's cost of a streamed chunk: many clients of one process, and no model.

A runner that samples at once, every ``--step-ms``, replaces the model. So only the host's work
remains: the engine's thread, and the event loop that writes the streams. Clients are in another
process and only count. The script prints CPU microseconds per chunk of the event loop's thread and
of the engine's, and chunks and tokens per second.

    python -m benchmarks.serve_streams --endpoint chat --streams 256
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from pagespec import AsyncLLM
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig
from pagespec.server.connection import HttpConnection
from pagespec.server.run import SWITCH_INTERVAL_S
from tests.support.scripted_llm import ScriptRunner, scripted_llm

_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "logprobs": ("/v1/completions", {"prompt": "hello", "return_token_ids": True}),
    "generate": ("/inference/v1/generate", {"token_ids": [5, 6, 7]}),
}
_ANSWER = "Plain words of an answer, and again. " * 40


async def _read_stream(port: int, path: str, body: bytes, found: list[tuple[int, float]]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    began = time.perf_counter()
    writer.write(head.encode() + body)
    num_chunks, first = 0, 0.0
    while data := await reader.read(1 << 16):
        num_chunks += data.count(b"data: {")
        if num_chunks and not first:
            first = time.perf_counter() - began
    writer.close()
    found.append((num_chunks, first))


def _clients(port: int, endpoint: str, num_streams: int, num_tokens: int, results: Any) -> None:
    path, fields = _BODIES[endpoint]
    body = {**fields, "stream": True}
    if endpoint == "generate":
        body["sampling_params"] = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 0}
    else:
        body |= {"max_tokens": num_tokens, "ignore_eos": True, "seed": 0}
    found: list[tuple[int, float]] = []

    async def run() -> None:
        sent = json.dumps(body).encode()
        await asyncio.gather(*(_read_stream(port, path, sent, found) for _ in range(num_streams)))

    began = time.perf_counter()
    asyncio.run(run())
    results.put((time.perf_counter() - began, found))


def _cpu_s(thread_id: int) -> float:
    fields = Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _PacedRunner(ScriptRunner):
    step_s = 0.0

    def collect(self, handle: object) -> Any:
        time.sleep(self.step_s)
        return super().collect(handle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", choices=list(_BODIES), default="chat")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--switch-interval", type=float, default=SWITCH_INTERVAL_S)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    _PacedRunner.step_s = options.step_ms / 1000
    sys.setswitchinterval(options.switch_interval)
    num_blocks = options.streams * (options.tokens // 4 + 16)
    llm = scripted_llm(
        "qwen3",
        [_ANSWER],
        num_blocks=num_blocks,
        make_runner=_PacedRunner,
        max_num_seqs=options.streams,
        enable_prefix_caching=False,
    )
    engine = AsyncLLM(llm)
    app = create_app(engine, ServerConfig(access_log=False))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, http=HttpConnection, log_level="warning"))
    gc.collect()
    gc.freeze()  # as ``pagespec serve`` does
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = listener.getsockname()[1], options.endpoint, options.streams, options.tokens
    clients = context.Process(target=_clients, args=(*arguments, results))
    engine_tid = next(t.native_id for t in threading.enumerate() if t.name == "pagespec-engine")
    profile = cProfile.Profile()
    cpu_s: list[float] = []

    async def serve() -> None:
        serving = asyncio.create_task(server.serve([listener]))
        clients.start()
        while results.empty():
            await asyncio.sleep(0.05)
        cpu_s.append(_cpu_s(engine_tid) - before[1])
        server.should_exit = True
        await serving

    before = _cpu_s(threading.get_native_id()), _cpu_s(engine_tid)
    if options.profile:
        profile.enable()
    asyncio.run(serve())
    profile.disable()
    wall_s, found = results.get()
    num_chunks = sum(count for count, _ in found)
    num_tokens = options.streams * options.tokens
    loop_s = _cpu_s(threading.get_native_id()) - before[0]
    first_ms = sorted(first * 1000 for _, first in found)
    print(
        f"{options.endpoint}: {num_chunks} chunks for {num_tokens} tokens in {wall_s:.2f} s, "
        f"{num_chunks / wall_s:.0f} chunks/s, {num_tokens / wall_s:.0f} tokens/s; event loop "
        f"{1e6 * loop_s / num_chunks:.1f} us per chunk, "
        f"{1e6 * loop_s / num_tokens:.1f} us per token, "
        f"engine's thread {1e6 * cpu_s[0] / num_tokens:.1f} us per token; "
        f"first chunk after {statistics.median(first_ms):.0f} ms, {first_ms[-1]:.0f} at most"
    )
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
