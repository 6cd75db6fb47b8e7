"""``tool_choice``: an answer that must be a tool call, by structured output. Meanings as in vLLM.

* "auto": the model writes tool calls in its own format, or none.
* "none": nothing in the answer is a tool call. (Whether the template shows the tools is for the
  caller: give it none of them.)
* "required": the answer is a JSON list, at least one item long, of ``{"name": ..., "parameters":
  {...}}``: the name of a tool, and arguments that meet its schema.
* ``{"type": "function", "function": {"name": ...}}``: the answer is a JSON object, the arguments of
  that function, which meet its schema.

A forced answer is JSON from its first character: the model's own format, with its reasoning, has no
place in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.structured_outputs import StructuredOutputs
from ..errors import InvalidInputError
from .answer_text import Kind, Piece
from .deltas import ContentDelta, Delta, ToolCallDelta, call_id
from .messages import names_of
from .regions import json_text

ToolChoice = str | Mapping[str, Any] | None
_PLAIN = (None, "auto", "none")


def forced_name(tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice) -> str | None:
    """The function that a choice names; None if it names none.

    Raises:
        InvalidInputError: it is no choice, or there is no such tool.
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
    """What the text of the answer must be; None where the choice forces nothing.

    Args:
        tools: as :func:`.messages.read_tools` gives them.

    Raises:
        InvalidInputError: it is no choice, there is no such tool, or a schema is refused.
    """
    name = forced_name(tools, choice)
    if choice in _PLAIN:
        return None
    functions = [tool["function"] for tool in tools or ()]
    if name is not None:
        function = next(function for function in functions if function["name"] == name)
        return StructuredOutputs(json=_parameters(function))
    definitions: dict[str, Any] = {}
    calls = [_call_schema(function, definitions) for function in functions]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return StructuredOutputs(json=schema | ({"$defs": definitions} if definitions else {}))


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without one it has none."""
    given = function.get("parameters")
    return dict(given) if given else {"type": "object", "additionalProperties": False}


def _call_schema(function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Of one item of the list. References count from the root, so definitions move there."""
    parameters = _parameters(function)
    for name, schema in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, schema) != schema:
            raise InvalidInputError("tools", name, "two tools have other $defs of this name")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


class ForcedAnswer:
    """Reads an answer that structured output made a tool call, or several. It is known to be one
    when it is complete; one that is cut off is content.

    Args:
        name: the function that was named; None for "required".
        request_id, answer: for the ids of tool calls.
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
