"""Segments: the parts of a prompt, which are tokens or, in place of tokens, other content.

A content segment (the embeddings of an image) has placeholder tokens, which are alike for all
contents. So a block key names, beside the tokens of its block, the content in it: for each content
segment that overlaps the block, how many positions from which place on, the content's hash, and the
offset of the first of them. Blocks of tokens alone have the keys of their tokens.

A row, a prefix hit and a copied block may end anywhere inside a content segment: attention is
causal, so the KV of a position depends on nothing behind it, and every row takes the embeddings of
its own positions by their offset.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from ..errors import InvalidInputError


class Segment(NamedTuple):
    """Consecutive positions of a prompt.

    Attributes:
        length: how many.
        content_hash: None of a token segment: its tokens are themselves the content. Of other
            content a hash of all that decides its embeddings, their number included (such as pixels
            and settings of the processor); equal hashes stand for equal embeddings.
        content: input of the runner for these positions. Plans hold it; the engine never reads
            it.
    """

    length: int
    content_hash: bytes | None = None
    content: object = None


class Content(NamedTuple):
    """A content segment in its place: positions ``[begin, end)`` of the prompt."""

    begin: int
    end: int
    content_hash: bytes


def contents_of(segments: Sequence[Segment]) -> tuple[Content, ...]:
    """The content segments, in order; none of a prompt of tokens alone."""
    found, begin = [], 0
    for segment in segments:
        end = begin + segment.length
        if segment.content_hash is not None:
            found.append(Content(begin, end, segment.content_hash))
        begin = end
    return tuple(found)


def check_segments(segments: Sequence[Segment], num_tokens: int) -> None:
    """Raises InvalidInputError unless the segments cover a prompt of ``num_tokens`` positions, each
    with at least one of them (S59), and no content hash is empty."""
    for i, segment in enumerate(segments):
        if segment.length < 1:
            limit = "must be at least 1 position"
            raise InvalidInputError(f"segments[{i}].length", segment.length, limit)
        if segment.content_hash == b"":
            raise InvalidInputError(f"segments[{i}].content_hash", b"", "must not be empty")
    total = sum(segment.length for segment in segments)
    if total != num_tokens:
        limit = f"must have the {num_tokens} positions of the prompt together"
        raise InvalidInputError("segments", f"{total} positions", limit)


def refuse_contents(segments: Sequence[Segment]) -> None:
    """Raises InvalidInputError at the first content segment, for a runner that computes none."""
    for i, segment in enumerate(segments):
        if segment.content_hash is not None:
            limit = "must be tokens: no other content is supported"
            raise InvalidInputError(f"segments[{i}]", segment, limit)


def content_key(contents: Sequence[Content], begin: int, end: int) -> bytes:
    """The content of positions ``[begin, end)`` as bytes; empty for tokens alone. Two ranges of
    equal length and equal tokens have equal content exactly if their keys are equal."""
    parts = []
    for i in range(bisect_right(contents, begin, key=attrgetter("end")), len(contents)):
        content = contents[i]
        if content.begin >= end:
            break
        first = max(begin, content.begin)
        count, offset = min(end, content.end) - first, first - content.begin
        head = struct.pack("<4q", first - begin, count, offset, len(content.content_hash))
        parts.append(head + content.content_hash)
    return b"".join(parts)
