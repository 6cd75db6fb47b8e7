"""JSON schemas of constraints: refused keywords, and rewrites to what the compiler implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import is_int

MAX_SCHEMA_DEPTH = 64
FIELD = "structured_outputs.json"
# Keywords whose values are not schemas, or are schemas under arbitrary names.
PLAIN_VALUES = frozenset(("const", "default", "enum", "examples"))
NAMED_SCHEMAS = frozenset(("$defs", "definitions", "properties", "patternProperties"))
# The compiler ignores these, or implements only a part of them.
_UNSUPPORTED = {
    "disallow": "is of a draft that is not supported",
    "divisibleBy": "is of a draft that is not supported; write multipleOf",
    "extends": "is of a draft that is not supported; write allOf",
    "x-guidance": "is not supported; see disable_any_whitespace and whitespace_pattern",
}

Schema = dict[str, Any]


def map_schemas(
    schema: Any, change: Callable[[Schema], Schema], field: str = FIELD, depth: int = 0
) -> Any:
    """A copy of a schema in which ``change`` has replaced every nested schema, innermost first.

    Args:
        schema: as ``json.loads`` returns it.
        field: name of the schema in errors.

    Raises:
        InvalidInputError: the schema is nested more than ``MAX_SCHEMA_DEPTH`` deep.
    """
    if depth > MAX_SCHEMA_DEPTH:
        limit = f"must be nested at most {MAX_SCHEMA_DEPTH} deep"
        raise InvalidInputError(field, "a schema", limit)
    if isinstance(schema, list):
        return [map_schemas(item, change, field, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: Schema = {}
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            named = value.items()
            found[keyword] = {k: map_schemas(v, change, field, depth + 2) for k, v in named}
        elif keyword in PLAIN_VALUES:
            found[keyword] = value
        else:
            found[keyword] = map_schemas(value, change, field, depth + 1)
    return change(found)


def check_keywords(schema: Any, field: str = FIELD) -> None:
    """Refuse keywords that would be ignored.

    Raises:
        InvalidInputError: the schema has such a keyword, or is nested too deep.
    """

    def check(one: Schema) -> Schema:
        for keyword in one:
            if keyword in _UNSUPPORTED:
                raise InvalidInputError(field, keyword, _UNSUPPORTED[keyword])
        return one

    map_schemas(schema, check, field)


def implemented(schema: Any, field: str = FIELD, *, closes_objects: bool) -> Any:
    """An equivalent schema with keywords that the compiler implements exactly.

    Args:
        closes_objects: every object with named properties gets ``additionalProperties: false``
            unless it has that keyword; then the schema is not equivalent.

    Raises:
        InvalidInputError: no equivalent schema is known.
    """

    def change(one: Schema) -> Schema:
        return _rewritten(_closed(one) if closes_objects else one, field)

    return map_schemas(schema, change, field)


def _closed(schema: Schema) -> Schema:
    if "additionalProperties" not in schema and schema.keys() & {"properties", "patternProperties"}:
        return {**schema, "additionalProperties": False}
    return schema


def _rewritten(schema: Schema, field: str) -> Schema:
    least, required = schema.get("minProperties"), schema.get("required")
    if is_int(least):
        listed = required if isinstance(required, list) else []
        names = {name for name in listed if isinstance(name, str)}
        if 0 <= least <= len(names):
            schema = {k: value for k, value in schema.items() if k != "minProperties"}
        elif least > 1:
            # The compiler counts keys as they are written, also a key that is written twice.
            limit = f"must be at most 1, or the number of required names ({len(names)})"
            raise InvalidInputError(f"{field}.minProperties", least, limit)
    patterns = schema.get("patternProperties")
    is_open = schema.get("additionalProperties") is not False
    if isinstance(patterns, Mapping) and patterns and is_open:
        # A name that an open object writes with escapes matches no pattern of the compiler.
        limit = "needs additionalProperties = false beside it"
        raise InvalidInputError(f"{field}.patternProperties", dict(patterns), limit)
    if schema.get("uniqueItems") is False:
        schema = {k: value for k, value in schema.items() if k != "uniqueItems"}
    return schema
