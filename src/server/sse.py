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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..aio.generation import AnswerDelta, Generation
from .errors import api_error

DONE = b"data: [DONE]\n\n"
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_T = TypeVar("_T")


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {dumps(data)}\n\n".encode()


class EventStream(StreamingResponse):
    """A stream over generations, which are aborted when it ends, also because the client left.

    Args:
        write: the events of what is new of a prompt's answers: (place of the prompt, deltas).
        finish: the events before the last.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generations: Sequence[Generation],
        write: Callable[[int, list[AnswerDelta]], bytes],
        finish: Callable[[], bytes],
    ) -> None:
        self._generations, self._write, self._finish = generations, write, finish
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
                piece = self._write(place, deltas)
                if piece:
                    yield piece
            last = self._finish()
        except Exception as error:
            last = event(api_error(error).body)
        yield last + DONE


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


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, _T]) -> _T | Response:
    """The result of ``work``, which is cancelled when the client goes away: then a response that
    nobody will read."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_left(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await doing if doing.done() else Response(status_code=499)
    finally:
        leaving.cancel()
        doing.cancel()


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def abort_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.abort()
