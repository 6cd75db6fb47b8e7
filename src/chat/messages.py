"""Validates OpenAI's messages and tools, and converts them to the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import is_list, text_or_parts
from .deltas import call_id, is_short_id

# The standard field for reasoning, the field of older templates, and a field that clients send.
_REASONING = ("reasoning_content", "thinking", "reasoning")


Content = str | list[dict[str, Any]] | None


def joined_parts(_role: str, content: Content) -> str:
    """Content as text: parts are joined with line breaks; empty if there is none."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def read_messages(
    messages: Any, field: str = "messages", fitting: Callable[[str, Content], Any] = joined_parts
) -> list[dict[str, Any]]:
    """A conversation for ``apply_chat_template``.

    Content may be text or a list of parts ``{"type": "text", "text": ...}``; ``fitting`` converts a
    role and its content to the form that the template reads. Content may be missing if there are
    tool calls. Role "developer" becomes "system". Arguments of tool calls may be a JSON object or
    its text. Other fields of a message are passed to the template unchanged.

    Raises:
        InvalidInputError: names the message, its part, and the limit.
    """
    if not is_list(messages) or not messages:
        raise InvalidInputError(field, messages, "must be a non-empty list of messages")
    made = [_message(message, f"{field}[{i}]") for i, message in enumerate(messages)]
    for message in made:
        message["content"] = fitting(message["role"], message["content"])
    return made


def _message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidInputError(field, message, "a message needs 'role' and 'content'")
    role, calls = message["role"], message.get("tool_calls")
    if not isinstance(role, str):
        raise InvalidInputError(f"{field}.role", role, "must be text")
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if "content" not in message and not calls and reasoning is None:
        raise InvalidInputError(field, message, "a message needs 'role' and 'content'")
    made = {key: value for key, value in message.items() if key not in (*_REASONING, "tool_calls")}
    made["role"] = "system" if role == "developer" else role
    made["content"] = _content(message.get("content"), role, f"{field}.content")
    if made["content"] is None and not calls:
        made["content"] = ""
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidInputError(f"{field}.reasoning_content", reasoning, "must be text")
        made["reasoning_content"] = made["thinking"] = reasoning
    if calls is not None and not (is_list(calls) and not calls):
        if role != "assistant":
            limit = "only messages of the assistant have tool calls"
            raise InvalidInputError(f"{field}.tool_calls", calls, limit)
        made["tool_calls"] = _tool_calls(calls, f"{field}.tool_calls")
    answered = message.get("tool_call_id")
    if answered is not None and not isinstance(answered, str):
        raise InvalidInputError(f"{field}.tool_call_id", answered, "must be text")
    return made


def _content(content: Any, role: str, field: str) -> Content:
    if content is None and role == "assistant":
        return content
    return text_or_parts(field, content)


def with_short_ids(messages: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Replaces every tool-call id that does not have ``length`` letters and digits; equal ids get
    equal replacements."""

    def short(given: Any) -> Any:
        is_right = not isinstance(given, str) or is_short_id(given, length)
        return given if is_right else call_id(given, 0, 0, length)

    made = []
    for message in messages:
        changes: dict[str, Any] = {}
        if "tool_calls" in message:
            calls = message["tool_calls"]
            changes["tool_calls"] = [{**c, "id": short(c["id"])} if "id" in c else c for c in calls]
        if "tool_call_id" in message:
            changes["tool_call_id"] = short(message["tool_call_id"])
        made.append({**message, **changes})
    return made


def _tool_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if not is_list(calls):
        raise InvalidInputError(field, calls, "must be a list of tool calls")
    made = []
    for i, call in enumerate(calls):
        place = f"{field}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidInputError(place, call, "a tool call needs 'function'")
        if call.get("type", "function") != "function":
            raise InvalidInputError(f"{place}.type", call["type"], "must be 'function'")
        _require_name(function.get("name"), f"{place}.function.name")
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        made.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return made


def _arguments(arguments: Any, field: str) -> dict[str, Any]:
    """The object of arguments; empty text and null, as some clients send, mean an empty object."""
    value = arguments
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else {}
        except (ValueError, RecursionError) as error:
            limit = f"must be the text of a JSON object: {error}"
            raise InvalidInputError(field, arguments, limit) from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInputError(field, arguments, "must be the text of a JSON object")
    return dict(value)


def _require_name(name: Any, field: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidInputError(field, name, "must be a name")


def read_tools(tools: Any, field: str = "tools") -> list[dict[str, Any]] | None:
    """Tools as JSON schemas: dicts ``{"type": "function", "function": {"name", "description",
    "parameters"}}``, or Python functions, whose schema is derived from their type hints and
    docstring (in Google style, by transformers). None if there are none.

    Raises:
        InvalidInputError: names the tool, its part, and the limit.
    """
    if tools is None:
        return None
    if not is_list(tools):
        raise InvalidInputError(field, tools, "must be a list of tools")
    return [_tool(tool, f"{field}[{i}]") for i, tool in enumerate(tools)] or None


def _tool(tool: Any, field: str) -> dict[str, Any]:
    if callable(tool) and not isinstance(tool, type):
        from transformers.utils import get_json_schema

        try:
            return dict(get_json_schema(tool))
        except Exception as error:  # it raises many types for faulty hints and docstrings
            limit = f"no schema can be derived from it: {error}"
            raise InvalidInputError(field, tool, limit) from error
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        limit = "must be a function, or a dict {'type': 'function', 'function': {...}}"
        raise InvalidInputError(field, tool, limit)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidInputError(f"{field}.function", function, "must be a dict")
    _require_name(function.get("name"), f"{field}.function.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidInputError(f"{field}.function.parameters", parameters, "must be a JSON schema")
    return dict(tool)


def names_of(tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The names of checked tools."""
    return [str(tool["function"]["name"]) for tool in tools or ()]
