"""Finds delimiters, and possible beginnings of delimiters, in text that arrives in pieces.

Some delimiters are headers: before their end they may name the type of what follows, as
``<|channel|>final <|constrain|>json<|message|>`` of harmony does.
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
        header_end: if ``text`` ends with it, a content type may stand before it. Empty: none may.
    """

    text: str
    header_end: str = ""

    @property
    def pattern(self) -> str:
        """A pattern of the delimiter, without groups. Its flag is ``re.ASCII``."""
        begin, end = self._parts
        return re.escape(begin) + (f"(?:{_TYPE})?{re.escape(end)}" if end else "")

    @property
    def begun(self) -> str:
        """A pattern of the texts that more text may complete to the delimiter, none empty."""
        begin, end = self._parts
        if not end:
            return _beginnings(begin)
        typed = rf"(?:{_BLANKS}{_beginnings(CONSTRAIN)}|(?:{_TYPE})?(?:{_beginnings(end)})?)"
        return f"(?:{_beginnings(begin)}|{re.escape(begin)}{typed})"

    @property
    def max_length(self) -> int:
        """The most characters of a text that is the delimiter."""
        is_header = bool(self._parts[1])
        return len(self.text) + is_header * (3 * _MAX_BLANKS + len(CONSTRAIN) + _MAX_TYPE)

    @property
    def _parts(self) -> tuple[str, str]:
        """The parts before and behind a content type; the second is empty if there is none."""
        end = self.header_end
        if not end or not self.text.endswith(end):
            return self.text, ""
        return self.text.removesuffix(end), end


def _beginnings(text: str) -> str:
    """A pattern of all that ``text`` begins with, neither empty nor whole."""
    pattern = ""
    for char in reversed(text[:-1]):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern or "(?!)"
