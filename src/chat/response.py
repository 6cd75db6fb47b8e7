"""The reader of one answer: token ids to content, reasoning and tool calls, streamed or at once."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .answer_text import AnswerText, Kind, Piece
from .deltas import ContentDelta, Delta, joined, message_of


class Answer(Protocol):
    """What makes deltas of the text of one answer."""

    def push(self, piece: Piece) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


@dataclass(frozen=True)
class AnswerContext:
    """What the reader of an answer is given besides its text.

    Attributes:
        prompt: its text, whose end may belong to the answer.
        tools: their schemas say which type an argument has where the format does not.
        reads_tools: whether there can be tool calls; if not, they are content.
        request_id, answer: for the ids of tool calls.
    """

    prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    reads_tools: bool = True
    request_id: str = ""
    answer: int = 0


class PlainAnswer:
    """Of a model whose format is not known: the content is the text that ``generate`` gives."""

    def push(self, piece: Piece) -> list[Delta]:
        return [ContentDelta(piece.text)] if piece.kind is Kind.TEXT else []

    def finish(self) -> list[Delta]:
        return []


class ResponseReader:
    """Reads one answer as its tokens come. Its deltas, put together, do not depend on how the
    tokens were cut: a whole answer is read by the same code (:func:`read_response`).

    What is kept back until more is known: the beginning of what may be a delimiter or a stop
    string, white space at the end, bytes of an incomplete character, and a tool call until it is
    closed. Nothing that a model writes raises, and no text is lost but delimiters and white space
    at the ends of content and of reasoning: a tool call that cannot be read, or is not closed, is
    content, with its delimiters.

    Made by :meth:`.reader.ChatReader.reader`. For one thread at a time.
    """

    def __init__(self, text: AnswerText, answer: Answer) -> None:
        self._text, self._answer = text, answer

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """What these tokens add; all of them are fed, also the stop token that ends the answer."""
        return self._read(self._text.feed(token_ids))

    def finish(self) -> list[Delta]:
        """What was kept back. To be called once, at the end, however the answer ended."""
        return joined([*self._read(self._text.finish()), *self._answer.finish()])

    def _read(self, pieces: Sequence[Piece]) -> list[Delta]:
        return joined(delta for piece in pieces for delta in self._answer.push(piece))


def stream_deltas(reader: ResponseReader, token_ids: Generator[list[int]]) -> Generator[Delta]:
    """What each part of an answer adds. Closing it closes the iterator of its tokens."""
    with contextlib.closing(token_ids):
        for part in token_ids:
            yield from reader.feed(part)
    yield from reader.finish()


def read_response(reader: ResponseReader, token_ids: Sequence[int]) -> dict[str, Any]:
    """A whole answer as an assistant message, see :func:`.deltas.message_of`."""
    return message_of([*reader.feed(token_ids), *reader.finish()])
