"""How a model writes reasoning and tool calls: the response template of its tokenizer, or the one
that transformers has for models of its type."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_SINK = "pagespec: between the fields"
_END = "pagespec: end of the message"
_DELIMITERS = ("open", "open_pattern", "close", "close_pattern")


@dataclass(frozen=True)
class AnswerFormat:
    """A response template, made ready for :mod:`.regions`.

    Attributes:
        whole: the template, with no field that must be there: to read one tool call.
        plain: the same delimiters, but every field is bare text, and no delimiter passes without
            an event. So reading never fails, and positions in the text can be told.
        implicit: the field of ``plain`` that text is in which is in no other.
        strips_content, strips_reasoning: whether white space at the ends is no part of it.
        call_field: all texts and patterns of the field of tool calls.
        reasoning_tags: the literal texts that open and close the reasoning, as
            ``("<think>", "</think>")``; None if there is no reasoning, or a pattern delimits it.
    """

    whole: Any
    plain: Any
    implicit: str
    strips_content: bool
    strips_reasoning: bool
    call_field: str
    reasoning_tags: tuple[str, str] | None

    def writes_calls_with(self, token: str) -> bool:
        """Whether tool calls are written with this token, as a delimiter or in their text."""
        return token in self.call_field or re.escape(token) in self.call_field

    @staticmethod
    def role(field: str) -> str | None:
        """ "content", "reasoning" or "tools": what becomes of a field; None if nothing does."""
        if field in _REASONING_FIELDS:
            return "reasoning"
        return {"content": "content", "tool_calls": "tools"}.get(field)

    def prefix_of(self, prompt: str) -> str:
        """The part of a prompt that belongs to the answer already, such as an opened ``<think>``;
        none if the prompt has no beginning of an answer that the template knows."""
        if self.whole.start_anchor_re.search(prompt) is None:
            return ""
        text: str = self.whole.truncate_past_last_anchor(prompt)
        return text


def make_format(template: dict[str, Any]) -> AnswerFormat:
    """
    Raises:
        ValueError: it is no response template of transformers.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    load_response_template(template)
    fields = template["fields"]
    whole = {
        name: {key: value for key, value in field.items() if key != "optional"}
        for name, field in fields.items()
    }
    reasoning = next((name for name in _REASONING_FIELDS if name in fields), "")
    loaded = load_response_template({**template, "fields": _plain_fields(fields)})
    return AnswerFormat(
        load_response_template({**template, "fields": whole}),
        loaded,
        str(loaded.implicit),
        _strips(fields.get("content", {})),
        _strips(fields.get(reasoning, {})),
        "\n".join(_texts(fields.get("tool_calls", {}))),
        _tags(fields.get(reasoning, {})),
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text in lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _tags(field: dict[str, Any]) -> tuple[str, str] | None:
    """The first literal that opens a field, and the first that closes it."""
    first = [next(_texts(field.get(key)), None) for key in ("open", "close")]
    opening, closing = first
    return None if opening is None or closing is None else (opening, closing)


def _strips(field: dict[str, Any]) -> bool:
    return bool(field.get("content_args", {}).get("strip", True))


def _plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    text = {
        "content": "text",
        "content_args": {"strip": False},
        "repeats": True,
        "transform": "{content}",  # without one, a delimiter may not have named groups
    }
    made: dict[str, Any] = {}
    has_implicit = False
    for name, field in fields.items():
        delimiters = {key: field[key] for key in _DELIMITERS if key in field}
        if "open" not in field and "open_pattern" not in field:
            has_implicit = True
            made |= _end_field(delimiters, text)
            delimiters = {}
        made[name] = text | delimiters
    if not has_implicit:
        made[_SINK] = text
    return made


def _end_field(close: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The end of the implicit field as an empty field of its own: where that field is empty, its
    end would pass without an event."""
    if "close" in close:
        return {_END: text | {"open": close["close"], "close_pattern": ""}}
    pattern = close.get("close_pattern")
    if pattern is None:
        return {}
    import regex  # the library of which the templates' patterns are

    if regex.search(pattern, "") is not None:
        return {}  # the end of the text, which ends the field anyway
    return {_END: text | {"open_pattern": pattern, "close_pattern": ""}}


def template_of(tokenizer: Any, model_type: str | None) -> dict[str, Any] | None:
    """The response template of a model, or None."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return dict(own)
    if model_type is None:
        return None
    names = {model_type, model_type.removesuffix("_text")}  # of a text model in a larger one
    found = (t for types, t in fallback_templates().items() if names & set(types))
    return next(found, None)


@cache
def fallback_templates() -> dict[tuple[str, ...], dict[str, Any]]:
    """transformers' templates by model types, for tokenizers that come without one.

    They stand in a private table of its server. That file is read by itself: its package needs
    FastAPI, and half a second. A version that has no such table has no fallbacks.
    """
    import transformers

    path = Path(transformers.__file__).parent / "cli" / "serving" / "utils.py"
    name = "_pagespec_transformers_serving_utils"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return {}
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        return dict(module._RESPONSE_TEMPLATE_FALLBACKS)
    except Exception:  # a private file of another version may need anything
        return {}
    finally:
        del sys.modules[name]
