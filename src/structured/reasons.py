"""Rewrites llguidance's error messages without its internal names."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import shortened

_MAX_REASON = 500
_NO_TEXT, _NO_REGEX = "no text can satisfy it", "invalid regex: "
_TOO_COMPLEX = "too complex: it has too many states"
# A quoted line of the grammar, and the marker below a position in it.
_QUOTED = re.compile(r"\s*\d+ \| .*|\s*\^+\s*")
# The regex crate quotes a regex over several lines; the last line contains the error.
_REGEX_ERROR = re.compile(r"regex parse error:.*?error: ", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_NUMBER = r"(?:Some\(([^()]*)\)|None)"
_Words = str | Callable[[re.Match[str]], str]
_WORDS: tuple[tuple[re.Pattern[str], _Words], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\s*<non-verbose/>", ""),
        (r"^NoExtension(Bias)?\b.*", _NO_TEXT),
        (
            r"^(lexer|Parser) [eE]rror: (too many (expressions|states)|Current row has).*",
            _TOO_COMPLEX,
        ),
        (r"^(Lexer|Parser)TooComplex\b.*", _TOO_COMPLEX),
        (rf"invalid regex .* \(in regex\): ({_NO_REGEX})?", _NO_REGEX),
        (
            r"lookarounds not supported yet.*",
            "look-around, including word boundaries, is not supported",
        ),
        (r"; following .*are available: .*", ""),
        (
            r"^Failed to convert the grammar from GBNF to Lark: ",
            "Failed to convert the grammar from GBNF to Lark (Lark has a rule 'start'): ",
        ),
        (r"(at line \d+), .*", r"\1"),
        (
            r"^Unimplemented keys: \[(.*)\]",
            lambda found: "is not supported: " + found[1].replace('"', ""),
        ),
        (
            r"^Resource ('.*') is not present in a registry.*",
            r"other documents are not fetched: \1",
        ),
        (
            r"^oneOf constraints are not supported\b.*",
            "oneOf is supported where its schemas exclude one another; write anyOf",
        ),
        (r"^Expected f64 for ('.*'),", r"\1 must be a number,"),
        (
            rf"^Failed to generate regex for \w+ range: min={_NUMBER}, max={_NUMBER}",
            r"numbers from \1 to \2 are not supported",
        ),
        (r"^Expecting object schema to apply options", "must be an object"),
        (r"^invalid multiple of$", "multipleOf must be above 0"),
    )
)


def readable(reason: str, num_lines_before: int = 0, *, has_place: bool = True) -> str:
    """A reason as one line of at most 500 characters.

    Args:
        num_lines_before: number of lines that were added before the caller's own.
        has_place: the caller's text has line numbers.
    """
    reason = _REGEX_ERROR.sub(_NO_REGEX, reason)
    lines = [line for line in reason.splitlines() if not _QUOTED.fullmatch(line)]
    text = " ".join(" ".join(lines).split())
    place = _PLACE.match(text)
    if place is not None:
        text = text[place.end() :]
        if has_place:
            text = f"line {int(place[1]) - num_lines_before}: {text}"
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return shortened(text, _MAX_REASON)
