"""Load for an OpenAI-compatible server: streams of ``/v1/completions`` requests, from separate
processes that read only what they count.

Prompts are token ids. Each answer must have exactly the requested number of tokens. A chunk's time
is that of the read that returned it, as soon as the event loop has it.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.workload import LARGEST_TOKEN_ID, Workload

HOST = "127.0.0.1"
_EVENT_END, _TEXT, _DATA, _DONE = b"\n\n", b'"text":', b"data: ", b"data: [DONE]"
# Between the time when the processes are ready and the first request.
_START_S = 0.2
# The most seconds that a load may take beyond the time in which requests start.
_REST_S = 120.0
Request = tuple[list[int], int]  # the prompt, and the requested number of tokens


class LoadError(RuntimeError):
    """A request failed, or its answer is not the requested one."""


class Load(Protocol):
    """The requests of the streams. Each stream sends its next request when the last is answered.

    Attributes:
        seconds: time in which requests start; running requests are then waited for.
    """

    @property
    def num_streams(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def requests(self, stream: int) -> Iterator[Request]: ...


@dataclass(frozen=True)
class AtOnce:
    """A workload's requests, all at the same time."""

    workload: Workload
    seconds: float = math.inf

    @property
    def num_streams(self) -> int:
        return len(self.workload.prompts)

    def requests(self, stream: int) -> Iterator[Request]:
        yield self.workload.prompts[stream], self.workload.num_outputs[stream]


@dataclass(frozen=True)
class ClosedLoop:
    """Clients without pauses. Lengths are uniform in the given (low, high), ends included."""

    num_streams: int
    seconds: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    seed: int = 0

    def requests(self, stream: int) -> Iterator[Request]:
        rng = random.Random(self.seed * self.num_streams + stream)
        while True:
            num_prompt = rng.randint(*self.prompt)
            prompt = [rng.randint(0, LARGEST_TOKEN_ID) for _ in range(num_prompt)]
            yield prompt, rng.randint(*self.output)


@dataclass
class Answer:
    """Times in seconds after the load's start.

    Attributes:
        began: when its connection was opened.
        ended: when all of it had arrived.
        arrivals: of each chunk with text; empty if it was not streamed.
    """

    num_prompt_tokens: int
    num_tokens: int
    began: float
    ended: float
    arrivals: array[float]


@dataclass
class Loaded:
    """The answers to a load.

    Attributes:
        client_share: fraction of a core that the busiest client process used.
    """

    answers: list[Answer] = field(default_factory=list)
    client_share: float = 0.0

    @property
    def seconds(self) -> float:
        """From the start to the end of the last answer."""
        return max(answer.ended for answer in self.answers)


class _Reply(asyncio.Protocol):
    """One request and its answer, on its own connection."""

    def __init__(self, request: bytes, start: float) -> None:
        self._request, self._start = request, start
        self.ended = asyncio.get_running_loop().create_future()
        self.arrivals = array("d")
        self.rest, self._last = b"", [b""]

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic() - self._start
        *events, self.rest = (self.rest + data).split(_EVENT_END)
        for event in events:
            if _TEXT in event:
                self.arrivals.append(now)
        if events:
            self._last = [*self._last, *events][-2:]

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(time.monotonic() - self._start)

    def usage(self, is_streamed: bool) -> dict[str, Any]:
        """Raises: LoadError, ValueError, KeyError: the answer is an error, or was truncated."""
        if is_streamed:
            before_last, last = self._last if len(self._last) == 2 else (b"", b"")
            if not last.rpartition(b"\n")[2].startswith(_DONE):
                raise LoadError(f"no end of the stream: {(last + self.rest)[-500:]!r}")
            content = before_last.partition(_DATA)[2]
        else:
            head, _, content = self.rest.partition(b"\r\n\r\n")
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise LoadError(f"{self.rest[-500:]!r}")
        return json.loads(content)["usage"]


def _http(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def _answer(port: int, request: Request, body: dict[str, Any], start: float) -> Answer:
    prompt, num_tokens = request
    sent = _http({**body, "prompt": prompt, "max_tokens": num_tokens})
    began = time.monotonic() - start
    loop = asyncio.get_running_loop()
    _, reply = await loop.create_connection(lambda: _Reply(sent, start), HOST, port)
    ended = await reply.ended
    usage = reply.usage(body["stream"])
    got = usage["prompt_tokens"], usage["completion_tokens"]
    if got != (len(prompt), num_tokens):
        raise LoadError(f"{got} tokens in and out instead of {(len(prompt), num_tokens)}")
    if body["stream"] and not reply.arrivals:
        raise LoadError("a stream without text")
    return Answer(len(prompt), num_tokens, began, ended, reply.arrivals)


async def _streams(
    port: int, load: Load, streams: range, body: dict[str, Any], start: float
) -> list[Answer]:
    answers: list[Answer] = []

    async def run(first: Request, more: Iterator[Request]) -> None:
        answers.append(await _answer(port, first, body, start))
        for request in more:
            if time.monotonic() - start >= load.seconds:
                return
            answers.append(await _answer(port, request, body, start))

    # Drawing before the start does not delay the first requests.
    drawn = [load.requests(stream) for stream in streams]
    firsts = [(next(requests), requests) for requests in drawn]
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    async with asyncio.TaskGroup() as group:
        for first, more in firsts:
            group.create_task(run(first, more))
    return answers


def _client(
    connection: Connection, port: int, load: Load, streams: range, body: dict[str, Any]
) -> None:
    """A process of clients; sends its answers, or a description of the failure."""
    try:
        connection.send("ready")
        start = connection.recv()
        used = time.process_time()
        answers = asyncio.run(_streams(port, load, streams, body, start))
        share = (time.process_time() - used) / (time.monotonic() - start)
        connection.send((answers, share))
    except ExceptionGroup as group:
        connection.send(repr(group.exceptions[0]))
    except Exception as error:
        connection.send(repr(error))


def run_load(port: int, model: str, load: Load, num_processes: int, *, is_streamed: bool) -> Loaded:
    """Raises: LoadError: see that class."""
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0.6,
        "ignore_eos": True,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    context = multiprocessing.get_context("spawn")
    clients = []
    num_processes = min(num_processes, load.num_streams)
    for number in range(num_processes):
        ours, theirs = context.Pipe()
        streams = range(number, load.num_streams, num_processes)
        process = context.Process(target=_client, args=(theirs, port, load, streams, body))
        process.start()
        theirs.close()
        clients.append((process, ours))
    loaded = Loaded()
    try:
        for _, connection in clients:
            _receive(connection, _REST_S)
        start = time.monotonic() + _START_S
        for _, connection in clients:
            connection.send(start)
        limit = _REST_S + (load.seconds if math.isfinite(load.seconds) else 0.0)
        for _, connection in clients:
            answers, share = _receive(connection, limit)
            loaded.answers += answers
            loaded.client_share = max(loaded.client_share, share)
    finally:
        for process, _ in clients:
            process.kill()
            process.join()
    return loaded


def _receive(connection: Connection, seconds: float) -> Any:
    try:
        found = connection.recv() if connection.poll(seconds) else f"no answers in {seconds} s"
    except EOFError:
        found = "a client process ended"
    if isinstance(found, str) and found != "ready":
        raise LoadError(found)
    return found
