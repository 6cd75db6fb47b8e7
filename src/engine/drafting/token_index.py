"""An index of the n-grams of a growing text, and the lengths of matches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_PLACES = 16
"""Earlier places of an n-gram that are compared."""
_MAX_INDEXED = 8192  # tokens per call: a long prompt must not delay a step


class TokenIndex:
    """The places of n-grams in a growing list of tokens.

    The n-grams of one length are chained: each place refers to the previous one. An appended token
    takes constant time, and about 120 bytes.

    Args:
        key_length: the number of tokens of an n-gram.
    """

    __slots__ = ("_latest", "_previous", "key_length")

    def __init__(self, key_length: int) -> None:
        self.key_length = key_length
        self._latest: dict[int, int] = {}  # by hash: places are compared, so equal hashes are fine
        self._previous = array("i")  # per place; a place is the index behind an n-gram

    def extend(self, tokens: Sequence[int]) -> bool:
        """Index the tokens that were appended since the last call, at most a bounded number of
        them. Returns whether all are indexed."""
        n, latest, previous = self.key_length, self._latest, self._previous
        begin = n + len(previous)
        for end in range(begin, min(len(tokens), begin + _MAX_INDEXED) + 1):
            key = hash(tuple(tokens[end - n : end]))
            previous.append(latest.get(key, 0))
            latest[key] = end
        return n + len(previous) > len(tokens)

    def places(self, context: Sequence[int], before: int) -> list[int]:
        """The latest places of the n-gram at the end of ``context``, newest first.

        Args:
            before: places from this one on are left out.
        """
        n = self.key_length
        if len(context) < n:
            return []
        place = self._latest.get(hash(tuple(context[-n:])), 0)
        found: list[int] = []
        while place and len(found) < MAX_PLACES:
            if place < before:
                found.append(place)
            place = self._previous[place - n]
        return found


def match_length(tokens: Sequence[int], place: int, context: Sequence[int], most: int) -> int:
    """How many tokens before ``place`` equal those at the end of ``context``, up to ``most``."""
    length, end = 0, len(context)
    most = min(most, place, end)
    while length < most and tokens[place - length - 1] == context[end - length - 1]:
        length += 1
    return length


def longest(
    tokens: Sequence[int], places: Sequence[int], context: Sequence[int], least: int, most: int
) -> tuple[int, list[int]]:
    """The length of the longest match at some places, and all places that have it."""
    best = least
    found: list[int] = []
    for place in places:
        length = match_length(tokens, place, context, most)
        if length > best:
            best, found = length, [place]
        elif length == best:
            found.append(place)
    return best, found


def continued(tokens: Sequence[int], place: int, most: int) -> list[int]:
    """The tokens from ``place`` on. At the end of ``tokens`` they repeat: a text that equals its
    earlier part repeats with their distance."""
    found = list(tokens[place : place + most])
    while len(found) < most:
        found += found[: most - len(found)]
    return found
