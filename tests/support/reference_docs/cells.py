"""Rows of Markdown tables, and the texts in their cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pagespec.errors import InvalidInputError
from pagespec.params.declare import Param


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"


def code(*texts: str) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def prose(text: str) -> str:
    """A help text or docstring as Markdown."""
    text = " ".join(text.replace("\\[", "[").replace("``", "`").split())
    # Options become code, and names of pages links.
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", part) for part in parts[::2]]
    return re.sub(r"\bdocs/(\w+)\.md\b", r"[\1.md](\1.md)", "`".join(parts))


def limit_of(name: str, declaration: Param) -> str:
    """The limit of a parameter, as the error about another value states it; empty for a switch."""
    if declaration.check is None:
        return ""
    try:
        declaration.check(name, object())
    except InvalidInputError as error:
        limit = re.sub(
            r"^must be (an? (integer|number|list of|dict of) )?(that )?", "", error.limit
        )
        # Such a limit only repeats the type.
        is_type = limit == "token ids" or limit.startswith(("True", "a StructuredOutputs"))
        return "" if is_type else limit.removesuffix(", or None")
    return ""


def json_type(schema: Mapping[str, Any]) -> str:
    """The type of a JSON schema as text, without null."""
    if "anyOf" in schema:
        members = [one for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(json_type(one) for one in members)
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema["enum"])
    if "const" in schema:
        return f'"{schema["const"]}"' if isinstance(schema["const"], str) else "false"
    if schema.get("type") == "array":
        return f"array of {_PLURALS.get(json_type(schema['items']), json_type(schema['items']))}"
    return str(schema.get("type", "any"))


_PLURALS = {"integer": "integers", "string": "strings", "object": "objects"}
_PLURALS["array of integers"] = "arrays of integers"
