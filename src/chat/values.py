"""Values of arguments: JSON text, and text that is typed by a schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Python's spelling of JSON's literals, which templates with Jinja's `string` filter write.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES = 8  # maximum length of a chain of schema references


def json_text(value: Any) -> str:
    """
    Raises:
        ValueError: JSON cannot represent the value (NaN, an infinite number).
        TypeError: JSON cannot represent the type.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can represent
        return json.dumps(value)
    return text


def parameters_of(tools: Sequence[Mapping[str, Any]] | None, name: str) -> Mapping[str, Any]:
    """The schema of a tool's arguments; empty if there is no such tool."""
    for tool in tools or ():
        function = tool["function"]
        if function["name"] == name:
            return function.get("parameters") or {}
    return {}


def typed(raw: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """The value of an argument that is written without quotes.

    Args:
        raw: the text as written.
        name: name of the argument.
        parameters: the schema of all arguments.

    Returns:
        The first value that the argument's schema allows and that ``raw`` denotes in JSON or
        Python; ``raw`` itself if there is none, or if the schema names no type.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = frozenset(_types(schema, parameters, _MAX_REFERENCES))
    if not types or types == {"string"}:
        return raw
    for value in _spelled(raw.strip()):
        if _type_of(value) & types:
            return value
    return raw


def _types(schema: Any, root: Mapping[str, Any], num_references: int) -> Iterator[str]:
    """The types that a schema allows, as far as its simple keywords show them."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    for name in [declared] if isinstance(declared, str) else declared or ():
        if isinstance(name, str):
            yield name
    for keyword in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(keyword) or ():
            yield from _types(choice, root, num_references)
    values = list(schema.get("enum") or ())
    for value in [*values, schema["const"]] if "const" in schema else values:
        yield from _type_of(value)
    if schema.get("nullable"):
        yield "null"
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and num_references:
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        yield from _types(target, root, num_references - 1)


def _type_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    names = ((str, "string"), (Mapping, "object"), (list, "array"))
    return frozenset(name for kind, name in names if isinstance(value, kind))


def _spelled(text: str) -> Iterator[Any]:
    """The values of a text in JSON or Python syntax that JSON can represent. Quoted text is
    excluded."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(PYTHON_WORDS.get(text, text))
            json_text(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if not isinstance(value, str):
            yield value
