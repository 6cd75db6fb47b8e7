"""Answers to a call: whole, as one JSON body, or as server-sent events: ``data: {json}``, each
followed by an empty line, and ``data: [DONE]`` at the end.

An error after the first byte is an event with the body that an answer of that status has, and ends
the stream. There are no comments and no heartbeats: some clients take every line for data.

This is Starlette's ``StreamingResponse``. (An SSE library ends its streams when the process is told
to stop; here they are finished first.)
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..aio.generation import AnswerDelta, Generation
from ..aio.lanes import SHORT
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from .call import Call
from .errors import api_error
from .usage import usage_of

DONE = b"data: [DONE]\n\n"
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

Extra = dict[str, Any] | None


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {dumps(data)}\n\n".encode()


class Choices(ABC):
    """Forms choices from answers, which may come in pieces: what is joined is the same.

    Args:
        generations: of the call, per prompt.
        names: the first fields of the head.

    Attributes:
        head: what the body and each chunk begin with.
    """

    def __init__(
        self, call: Call, params: SamplingParams, generations: Sequence[Generation], **names: str
    ) -> None:
        self.call, self.generations = call, generations
        self.head: Mapping[str, Any] = {**names, "created": call.created, "model": call.model}
        self._llm = call.context.engine.llm
        self._params = params

    @abstractmethod
    def content(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of a whole answer, from the outputs per prompt."""

    @abstractmethod
    def pieces(self, place: int, delta: AnswerDelta) -> Iterable[tuple[dict[str, Any], Extra]]:
        """The choices of the chunks that a delta makes, none or more, and what else is in them.

        Args:
            place: of the prompt whose answer it is of.
        """

    def usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        """
        Args:
            num_output_tokens: None: of the whole answers.
        """
        return usage_of(self.generations, num_output_tokens=num_output_tokens)


async def respond(choices: Choices, *, is_stream: bool, is_long: bool) -> Response:
    """The answers as a stream of events, or whole.

    Args:
        is_long: a whole answer takes long to write, so it is written on another thread.
    """
    if is_stream:
        return EventStream(choices)
    try:
        results = [await generation.result() for generation in choices.generations]
    finally:
        abort_all(choices.generations)

    def write() -> bytes:
        return dumps(choices.content(results)).encode()

    written = await SHORT.run(write) if is_long else write()
    return Response(written, media_type="application/json")


class EventStream(StreamingResponse):
    """The chunks of the answers to a call, which is aborted when the stream ends, also because the
    client left."""

    media_type = "text/event-stream"

    def __init__(self, choices: Choices) -> None:
        self._choices, self._call, self._generations = choices, choices.call, choices.generations
        # What all chunks begin with, up to the choice.
        self._begin = "data: " + dumps(choices.head)[:-1] + ',"choices":['
        self._end = ',"usage":null}\n\n' if self._call.with_usage else "}\n\n"
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
