"""Answers of generating endpoints: one JSON body, or server-sent events ending in ``[DONE]``.

An error after the first byte is sent as an event with the body of an error response, and ends the
stream. There are no SSE comments and no heartbeats: some clients read every line as data. The base
class is Starlette's ``StreamingResponse``: SSE libraries end streams at a signal, before they are
complete.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from ..serving.generation import AnswerDelta, Generation
from ..serving.lanes import SHORT
from .call import Call
from .errors import api_error
from .logprob_fields import TokenTexts
from .metrics import load_report
from .protocol.fields import EngineFields

DONE = b"data: [DONE]\n\n"
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

Body = TypeVar("Body", bound=EngineFields)


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {dumps(data)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a stream.

    Attributes:
        choice: its choice.
        extra: its fields beside the choices.
        has_tokens: whether the tokens of the delta are in this chunk or an earlier one.
    """

    choice: dict[str, Any]
    extra: Mapping[str, Any] | None = None
    has_tokens: bool = True


class Choices(ABC, Generic[Body]):
    """Converts answers to choices, whole or in pieces; joined pieces equal the whole answer.

    Args:
        generations: the generations of the call, one per prompt.

    Attributes:
        head: the first fields of the body and of each chunk.
        is_long: a whole answer is serialised on another thread.
        ends_with_usage: the last chunk of a stream has the usage.
        has_usages: each chunk of a stream has the usage so far.
    """

    head_names: ClassVar[Mapping[str, str]]
    """The first fields of the head; the value "" is replaced by the id."""

    def __init__(
        self, call: Call[Body], params: SamplingParams, generations: Sequence[Generation]
    ) -> None:
        self.call, self.generations = call, generations
        names = {name: value or call.id for name, value in self.head_names.items()}
        self.head: Mapping[str, Any] = {**names, "created": call.created, "model": call.model}
        self._body, self._params = call.body, params
        self._llm = call.context.engine.llm
        self.is_long = params.prompt_logprobs is not None
        options, is_forced = (
            call.body.stream_options,
            call.context.config.enable_force_include_usage,
        )
        self.ends_with_usage = is_forced or (options is not None and bool(options.include_usage))
        self.has_usages = self.ends_with_usage and (
            is_forced or (options is not None and bool(options.continuous_usage_stats))
        )

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all answers so far; None if the reasoning format is unknown."""
        return None

    @property
    def prediction_counts(self) -> tuple[int, int] | None:
        """Accepted and rejected draft tokens from the prediction; None without a prediction."""
        return None

    @cached_property
    def texts(self) -> TokenTexts:
        """Converts single tokens to text, for log-probabilities."""
        as_ids = getattr(self._body, "return_tokens_as_token_ids", None)
        if as_ids is None:
            as_ids = self.call.context.config.return_tokens_as_token_ids
        return TokenTexts(
            self._llm.factory,
            as_ids=as_ids,
            skips_special=self._params.skip_special_tokens,
        )

    @abstractmethod
    def content(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of a whole answer, from the outputs per prompt."""

    @abstractmethod
    def pieces(self, place: int, delta: AnswerDelta) -> Iterable[Piece]:
        """The chunks of a delta.

        Args:
            place: index of the prompt.
        """

    def usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        """OpenAI's ``usage``.

        Args:
            num_output_tokens: None: the number in the whole answers.
        """
        num_prompt = sum(g.num_prompt_tokens for g in self.generations)
        if num_output_tokens is None:
            num_output_tokens = sum(g.num_output_tokens for g in self.generations)
        num_cached = sum(g.num_cached_tokens for g in self.generations)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        details = {}
        num_reasoning, counts = self.num_reasoning_tokens, self.prediction_counts
        if num_reasoning is not None:
            details["reasoning_tokens"] = num_reasoning
        if counts is not None:
            details["accepted_prediction_tokens"] = counts[0]
            details["rejected_prediction_tokens"] = counts[1]
        if details:
            usage["completion_tokens_details"] = details
        return usage


async def respond(choices: Choices[Any]) -> Response:
    """Respond to a call: with a stream of events if its body requests one, else with JSON."""
    if choices.call.body.stream:
        return EventStream(choices)
    try:
        results = [await generation.result() for generation in choices.generations]
    finally:
        abort_all(choices.generations)

    def write() -> bytes:
        return dumps(choices.content(results)).encode()

    written = await SHORT.run(write) if choices.is_long else write()
    call = choices.call
    headers = load_report(call.load_format, call.context.engine.snapshot())
    return Response(written, media_type="application/json", headers=headers)


class EventStream(StreamingResponse):
    """A stream of chunks. When the stream ends, also by a disconnect, the requests are aborted."""

    media_type = "text/event-stream"

    def __init__(self, choices: Choices[Any]) -> None:
        self._choices, self._generations = choices, choices.generations
        # The start of every chunk, up to the choice.
        self._begin = "data: " + dumps(choices.head)[:-1] + ',"choices":['
        self._end = ',"usage":null}\n\n' if choices.ends_with_usage else "}\n\n"
        self._num_tokens = 0  # in the chunks so far
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
            last = self._usage_chunk() if self._choices.ends_with_usage else b""
        except Exception as error:
            last = event(api_error(error).body)
        yield last + DONE

    def _write(self, place: int, deltas: list[AnswerDelta]) -> bytes:
        chunks = []
        for delta in deltas:
            num_before = self._num_tokens
            self._num_tokens += len(delta.token_ids)
            for piece in self._choices.pieces(place, delta):
                more = "" if piece.extra is None else "," + dumps(piece.extra)[1:-1]
                end = self._chunk_end(self._num_tokens if piece.has_tokens else num_before)
                chunks.append(f"{self._begin}{dumps(piece.choice)}]{more}{end}")
        return "".join(chunks).encode()

    def _chunk_end(self, num_tokens: int) -> str:
        if not self._choices.has_usages:
            return self._end
        return f',"usage":{dumps(self._choices.usage(num_tokens))}}}\n\n'

    def _usage_chunk(self) -> bytes:
        return event({**self._choices.head, "choices": [], "usage": self._choices.usage()})


async def joined_deltas(
    generations: Sequence[Generation],
) -> AsyncIterator[tuple[int, list[AnswerDelta]]]:
    """New deltas of several prompts' answers, with the index of the prompt. A slow reader gets
    fewer, longer deltas."""
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
