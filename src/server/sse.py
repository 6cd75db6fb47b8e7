"""Answers as server-sent events: ``data: {json}``, each followed by an empty line, and
``data: [DONE]`` at the end.

An error after the first byte is an event with the body that an answer of that status has, and ends
the stream. There are no comments and no heartbeats: some clients take every line for data.

This is Starlette's ``StreamingResponse``. (An SSE library ends its streams when the process is told
to stop; here they are finished first.)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..aio.generation import AnswerDelta, Generation
from .call import Call
from .errors import api_error

DONE = b"data: [DONE]\n\n"
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

Extra = dict[str, Any] | None


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {dumps(data)}\n\n".encode()


class Choices(Protocol):
    """Forms what clients see from answers, which may come in pieces.

    Attributes:
        head: what each chunk begins with.
    """

    head: Mapping[str, Any]

    def pieces(self, place: int, delta: AnswerDelta) -> Iterable[tuple[dict[str, Any], Extra]]:
        """The choices of the chunks that a delta makes, none or more, and what else is in them.

        Args:
            place: of the prompt whose answer it is of.
        """
        ...

    def usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        """
        Args:
            num_output_tokens: None: of the whole answers.
        """
        ...


class EventStream(StreamingResponse):
    """The chunks of the answers to a call, which is aborted when the stream ends, also because the
    client left."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, generations: Sequence[Generation], choices: Choices) -> None:
        self._generations, self._choices, self._call = generations, choices, call
        # What all chunks begin with, up to the choice.
        self._begin = "data: " + dumps(choices.head)[:-1] + ',"choices":['
        self._end = ',"usage":null}\n\n' if call.with_usage else "}\n\n"
        self._num_tokens = 0  # in what was written
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            abort_all(self._generations)

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for place, deltas in joined_deltas(self._generations):
                written = self._write(place, deltas)
                if written:
                    yield written
            last = self._usage_chunk() if self._call.with_usage else b""
        except Exception as error:
            last = event(api_error(error).body)
        yield last + DONE

    def _write(self, place: int, deltas: list[AnswerDelta]) -> bytes:
        chunks = []
        for delta in deltas:
            self._num_tokens += len(delta.token_ids)
            for choice, extra in self._choices.pieces(place, delta):
                more = "" if extra is None else "," + dumps(extra)[1:-1]
                chunks.append(f"{self._begin}{dumps(choice)}]{more}{self._chunk_end()}")
        return "".join(chunks).encode()

    def _chunk_end(self) -> str:
        if not self._call.with_usages:
            return self._end
        return f',"usage":{dumps(self._choices.usage(self._num_tokens))}}}\n\n'

    def _usage_chunk(self) -> bytes:
        return event({**self._choices.head, "choices": [], "usage": self._choices.usage()})


async def joined_deltas(
    generations: Sequence[Generation],
) -> AsyncIterator[tuple[int, list[AnswerDelta]]]:
    """What is new of any of several prompts' answers, with the place of the prompt. A slow reader
    gets fewer and longer deltas of each."""
    if len(generations) == 1:
        async for deltas in generations[0].deltas():
            yield 0, deltas
        return
    found: asyncio.Queue[tuple[int, list[AnswerDelta]] | Exception | None] = asyncio.Queue(1)

    async def pump(place: int, generation: Generation) -> None:
        try:
            async for deltas in generation.deltas():
                await found.put((place, deltas))
            await found.put(None)
        except Exception as error:
            await found.put(error)

    pumps = [asyncio.create_task(pump(i, g)) for i, g in enumerate(generations)]
    try:
        num_live = len(pumps)
        while num_live:
            item = await found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_live -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()


def abort_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.abort()
