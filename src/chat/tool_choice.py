"""``tool_choice``: forces an answer to be a tool call, by structured output. Semantics as in vLLM.

* "auto": the model writes tool calls in its own format, or none.
* "none": nothing in the answer is a tool call. (The template still shows tools that are passed.)
* "required": the answer is a non-empty JSON list of ``{"name": ..., "parameters": {...}}``: the
  name of a tool, and arguments that match its schema.
* ``{"type": "function", "function": {"name": ...}}``: the answer is a JSON object, the arguments of
  that function, which match its schema.

The content of a forced answer is JSON from its first character; the model's own format of tool
calls is not used. Reasoning may precede it (:mod:`.reasoning`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.json_schemas import map_schemas
from ..engine.structured_outputs import MAX_CONSTRAINT_BYTES, StructuredOutputs
from ..errors import InvalidInputError
from .answer_text import Kind, Piece
from .deltas import ContentDelta, Delta, ToolCallDelta, call_id
from .messages import names_of
from .values import json_text

ToolChoice = str | Mapping[str, Any] | None
_PLAIN = (None, "auto", "none")


def forced_name(tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice) -> str | None:
    """The function that a choice names; None if it names none.

    Raises:
        InvalidInputError: the choice is invalid, or there is no such tool.
    """
    if choice in _PLAIN:
        return None
    names = names_of(tools)
    if choice == "required":
        if not names:
            raise InvalidInputError("tool_choice", choice, "needs tools")
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        limit = "must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name'}}"
        raise InvalidInputError("tool_choice", choice, limit)
    if name not in names:
        raise InvalidInputError("tool_choice", name, f"is none of the tools: {', '.join(names)}")
    return name


def forced_output(
    tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice
) -> StructuredOutputs | None:
    """The constraint for the answer; None if the choice forces nothing.

    Args:
        tools: as returned by :func:`.messages.read_tools`.

    Raises:
        InvalidInputError: the choice is invalid, there is no such tool, or a schema is refused.
    """
    name = forced_name(tools, choice)
    if choice in _PLAIN:
        return None
    functions = [tool["function"] for tool in tools or ()]
    if name is not None:
        function = next(function for function in functions if function["name"] == name)
        return StructuredOutputs(json=_parameters(function))
    size = len(json.dumps(functions))
    if size > MAX_CONSTRAINT_BYTES:
        limit = f"must be at most {MAX_CONSTRAINT_BYTES} bytes of JSON for this tool_choice"
        raise InvalidInputError("tools", f"{size} bytes", limit)
    schemas, calls = {}, []
    for i, function in enumerate(functions):
        # References are relative to the root, so each schema has its own root there.
        root = f"#/$defs/tool{i}"
        schemas[f"tool{i}"] = _moved(_parameters(function), root)
        calls.append(_call_schema(function["name"], root))
    return StructuredOutputs(
        json={"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": schemas}
    )


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; a function without one has no arguments."""
    given = function.get("parameters")
    return dict(given) if given else {"type": "object", "additionalProperties": False}


def _call_schema(name: str, parameters: str) -> dict[str, Any]:
    """The schema of one list item; ``parameters`` refers to the schema of its arguments."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": parameters}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references are relative to ``root`` instead of ``#``."""

    def move(one: dict[str, Any]) -> dict[str, Any]:
        reference = one.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            return {**one, "$ref": root + reference[1:]}
        return one

    return map_schemas(schema, move, "tools")


class ForcedAnswer:
    """Reads an answer that a constraint forces to be one or several tool calls. A truncated answer
    is content.

    Args:
        name: the forced function; None for "required".
        request_id, answer: used to make the ids of tool calls.
    """

    def __init__(self, name: str | None, request_id: str, answer: int) -> None:
        self._name = name
        self._key = (request_id, answer)
        self._texts: list[str] = []

    def push(self, piece: Piece) -> list[Delta]:
        if piece.kind is Kind.TEXT:
            self._texts.append(piece.text)
        return []

    def finish(self) -> list[Delta]:
        text = "".join(self._texts)
        try:
            value = json.loads(text)
            if self._name is not None:
                calls = [(self._name, _object_text(value))]
            else:
                calls = [(str(c["name"]), _object_text(c["parameters"])) for c in value]
        except (ValueError, TypeError, LookupError, RecursionError):
            calls = []
        if not calls:
            return [ContentDelta(text)]
        return [
            ToolCallDelta(i, call_id(*self._key, i), name, arguments)
            for i, (name, arguments) in enumerate(calls)
        ]


def _object_text(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return json_text(value)
