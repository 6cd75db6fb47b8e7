"""Segments: the parts of a prompt, either tokens or other content such as image embeddings.

A content segment has placeholder tokens, which are the same for all contents. A block key therefore
covers the block's tokens and, for each content segment that overlaps the block, three values: the
positions it covers, the content's hash, and the offset of its first position in the content. The
key of a block without content segments covers its tokens only.

A row, a prefix hit and a copied block may end anywhere inside a content segment: attention is
causal, so the KV of a position depends on no later position, and every row reads the embeddings of
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
        length: number of positions.
        content_hash: None for a token segment. For other content, a hash of everything that
            determines its embeddings and their number (such as pixels and settings of the
            processor); equal hashes mean equal embeddings.
        content: the runner's input for these positions. Plans carry it; the engine never reads
            it.
    """

    length: int
    content_hash: bytes | None = None
    content: object = None


class Content(NamedTuple):
    """A content segment with its position: ``[begin, end)`` in the prompt."""

    begin: int
    end: int
    content_hash: bytes


def contents_of(segments: Sequence[Segment]) -> tuple[Content, ...]:
    """The content segments, in order; empty for a prompt of tokens only."""
    found, begin = [], 0
    for segment in segments:
        end = begin + segment.length
        if segment.content_hash is not None:
            found.append(Content(begin, end, segment.content_hash))
        begin = end
    return tuple(found)


def check_segments(segments: Sequence[Segment], num_tokens: int) -> None:
    """Raises InvalidInputError unless the segments cover a prompt of ``num_tokens`` positions, each
    segment has at least one position (S59), and no content hash is empty."""
    for i, segment in enumerate(segments):
        if segment.length < 1:
            limit = "must be at least 1 position"
            raise InvalidInputError(f"segments[{i}].length", segment.length, limit)
        if segment.content_hash == b"":
            raise InvalidInputError(f"segments[{i}].content_hash", b"", "must not be empty")
    total = sum(segment.length for segment in segments)
    if total != num_tokens:
        limit = f"must have the {num_tokens} positions of the prompt in total"
        raise InvalidInputError("segments", f"{total} positions", limit)


def refuse_contents(segments: Sequence[Segment]) -> None:
    """Raises InvalidInputError for the first content segment, for runners that support none."""
    for i, segment in enumerate(segments):
        if segment.content_hash is not None:
            limit = "must be tokens: no other content is supported"
            raise InvalidInputError(f"segments[{i}]", segment, limit)


def content_key(contents: Sequence[Content], begin: int, end: int) -> bytes:
    """The content of positions ``[begin, end)`` as bytes; empty for tokens only. For two ranges of
    equal length and equal tokens, keys are equal if and only if contents are."""
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
