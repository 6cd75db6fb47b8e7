"""The reader of one answer: token ids to content, reasoning and tool calls, streamed or whole."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .answer_text import AnswerText, Kind, Piece
from .deltas import ContentDelta, Delta, joined, message_of


class Answer(Protocol):
    """Converts the text of one answer to deltas."""

    def push(self, piece: Piece) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


@dataclass(frozen=True)
class AnswerContext:
    """The context of an answer's text.

    Attributes:
        prompt: its text, whose end may belong to the answer.
        tools: their schemas determine types of arguments if the format does not.
        reads_tools: if False, tool calls are content.
        request_id, answer: used to make the ids of tool calls.
    """

    prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    reads_tools: bool = True
    request_id: str = ""
    answer: int = 0


class PlainAnswer:
    """Reader for an unknown format: the content is the text of ``generate``."""

    def push(self, piece: Piece) -> list[Delta]:
        return [ContentDelta(piece.text)] if piece.kind is Kind.TEXT else []

    def finish(self) -> list[Delta]:
        return []


class ResponseReader:
    """Reads one answer as its tokens arrive. The joined deltas do not depend on how the tokens are
    split: the same code reads a whole answer (:func:`read_response`).

    Held back are: a possible prefix of a delimiter or stop string, white space at the end, bytes of
    an incomplete character, and a tool call until it is closed. No text of a model raises. Only
    delimiters, and white space around content and reasoning, are removed. A tool call that is
    invalid or not closed becomes content, with its delimiters.

    Created by :meth:`.reader.ChatReader.reader`. Not thread-safe.
    """

    def __init__(self, text: AnswerText, answer: Answer) -> None:
        self._text, self._answer = text, answer

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The deltas for these tokens. All tokens must be fed, including the stop token."""
        return self._read(self._text.feed(token_ids))

    def finish(self) -> list[Delta]:
        """The held-back deltas. Called once, at the end of the answer."""
        return joined([*self._read(self._text.finish()), *self._answer.finish()])

    def _read(self, pieces: Sequence[Piece]) -> list[Delta]:
        return joined(delta for piece in pieces for delta in self._answer.push(piece))


def stream_deltas(reader: ResponseReader, token_ids: Generator[list[int]]) -> Generator[Delta]:
    """The deltas of each part of an answer. Closing it also closes the token iterator."""
    with contextlib.closing(token_ids):
        for part in token_ids:
            yield from reader.feed(part)
    yield from reader.finish()


def read_response(reader: ResponseReader, token_ids: Sequence[int]) -> dict[str, Any]:
    """A whole answer as an assistant message, see :func:`.deltas.message_of`."""
    return message_of([*reader.feed(token_ids), *reader.finish()])
