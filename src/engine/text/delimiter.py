"""Finds delimiters, and prefixes of delimiters, in text that arrives in pieces.

Some delimiters are headers: before their end they may name the type of the content, like
``<|channel|>final <|constrain|>json<|message|>`` of harmony.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONSTRAIN = "<|constrain|>"
_MAX_BLANKS, _MAX_TYPE = 8, 64
_BLANKS = rf"\s{{0,{_MAX_BLANKS}}}"
_TYPE = (
    rf"(?:{_BLANKS}{re.escape(CONSTRAIN)}{_BLANKS}|\s{{1,{_MAX_BLANKS}}})"
    rf"[\w.+/-]{{0,{_MAX_TYPE}}}{_BLANKS}"
)


@dataclass(frozen=True)
class Delimiter:
    """
    Attributes:
        text: not empty.
        header_end: if ``text`` ends with it, a content type may precede it. Empty: no type.
    """

    text: str
    header_end: str = ""

    @property
    def pattern(self) -> str:
        """A regex for the delimiter, without groups. Its flag is ``re.ASCII``."""
        begin, end = self._parts
        return re.escape(begin) + (f"(?:{_TYPE})?{re.escape(end)}" if end else "")

    @property
    def begun(self) -> str:
        """A regex for all non-empty texts that can be extended to the delimiter."""
        begin, end = self._parts
        if not end:
            return _beginnings(begin)
        typed = rf"(?:{_BLANKS}{_beginnings(CONSTRAIN)}|(?:{_TYPE})?(?:{_beginnings(end)})?)"
        return f"(?:{_beginnings(begin)}|{re.escape(begin)}{typed})"

    @property
    def max_length(self) -> int:
        """Maximum number of characters of a text that is the delimiter."""
        is_header = bool(self._parts[1])
        return len(self.text) + is_header * (3 * _MAX_BLANKS + len(CONSTRAIN) + _MAX_TYPE)

    @property
    def _parts(self) -> tuple[str, str]:
        """The parts before and after a content type; the second is empty if there is none."""
        end = self.header_end
        if not end or not self.text.endswith(end):
            return self.text, ""
        return self.text.removesuffix(end), end


def _beginnings(text: str) -> str:
    """A regex for all proper, non-empty prefixes of ``text``."""
    pattern = ""
    for char in reversed(text[:-1]):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern or "(?!)"
