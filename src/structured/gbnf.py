"""Prepares GBNF grammars for llguidance's converter to Lark.

The converter writes escapes such as ``\\u00e9`` in a form that the compiler refuses, excludes line
breaks from ``.``, and takes no alternative on a line of its own, which XGrammar allows.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
    (?P<quoted>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])
    | (?P<bar>\s*[\r\n]\s*\|)
    | (?P<dot>\.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|#[^\r\n]*""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|.)", re.DOTALL)


def prepared_gbnf(text: str) -> str:
    """An equivalent grammar that the converter implements."""
    return _TOKEN.sub(_token, _COMMENT.sub(lambda found: found[1] or "", text))


def _token(found: re.Match[str]) -> str:
    if found["bar"]:
        return " |"
    if found["dot"]:
        return r'(. | "\n")'
    return _ESCAPE.sub(_character, found[0])


def _character(found: re.Match[str]) -> str:
    digits = found[1] or found[2] or found[3]
    code = int(digits, 16) if digits else -1
    is_plain = 0x80 <= code <= 0x10FFFF and not 0xD800 <= code < 0xE000
    is_plain |= 0 <= code < 0x80 and chr(code).isalnum()
    return chr(code) if is_plain else found[0]
