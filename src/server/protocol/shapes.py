"""Types of fields that may be long, or that accept several types.

Pydantic checks every item of a list against each member of a union, and reports all errors: one
wrong element in a list of a million token ids blocked the event loop for seconds. Here validation
stops at the first wrong item, and only the union member that matches the value's JSON type is
tried, so that an error refers to that type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, WrapValidator
from pydantic_core import PydanticCustomError

from ...engine.edit_checks import MAX_LOGIT_BIAS

Handler = Callable[[Any], Any]

# Items checked in one go; longer lists are checked in parts, between which other threads run.
_NUM_AT_ONCE = 1 << 14


def _in_parts(is_right: Callable[[list[Any]], bool]) -> WrapValidator:
    """Accepts a long list whose parts are all valid; otherwise pydantic creates the error."""

    def check(value: Any, handler: Handler) -> Any:
        if type(value) is list and len(value) > _NUM_AT_ONCE:
            parts = (value[i : i + _NUM_AT_ONCE] for i in range(0, len(value), _NUM_AT_ONCE))
            if all(is_right(part) for part in parts):
                return value
        return handler(value)

    return WrapValidator(check)


def _are_integers(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


def _are_texts(values: list[Any]) -> bool:
    if set(map(type, values)) != {str}:
        return False
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True


Integers = Annotated[list[int], Field(fail_fast=True), _in_parts(_are_integers)]
Texts = Annotated[list[str], Field(fail_fast=True), _in_parts(_are_texts)]

_STRICT = ConfigDict(strict=True)
_INTEGERS: TypeAdapter[Any] = TypeAdapter(Integers, config=_STRICT)
_TEXTS: TypeAdapter[Any] = TypeAdapter(Texts, config=_STRICT)
_LISTS: TypeAdapter[Any] = TypeAdapter(
    Annotated[list[Integers], Field(fail_fast=True)], config=_STRICT
)


def wrong(limit: str) -> PydanticCustomError:
    """The error for a value of a type that the field does not accept."""
    # Pydantic formats a template, in which braces of the text would be placeholders.
    return PydanticCustomError("wrong_form", "{limit}", {"limit": limit})


def _object(value: Any, handler: Handler) -> Any:
    # JSON's keys are strings; checking each would report each one that has a lone surrogate.
    return value if isinstance(value, dict) else handler(value)


Object = Annotated[dict[str, Any], WrapValidator(_object)]
Objects = Annotated[list[Object], Field(fail_fast=True)]


def _biases(value: Any, handler: Handler) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise wrong(f"must have at most {MAX_LOGIT_BIAS} token ids; it has {len(value)}")
    return handler(value)


Biases = Annotated[dict[str, float], WrapValidator(_biases)]


def _prompt(value: Any, _handler: Handler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be text, a list of token ids, or a list of texts or of such lists")
    first = value[0] if value else None
    if isinstance(first, str):
        return _TEXTS.validate_python(value)
    if isinstance(first, list):
        return _LISTS.validate_python(value)
    return _INTEGERS.validate_python(value)


Prompt = Annotated[str | list[int] | list[str] | list[list[int]], WrapValidator(_prompt)]


def _text_or_texts(value: Any, _handler: Handler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be text or a list of texts")
    return _TEXTS.validate_python(value)


TextOrTexts = Annotated[str | list[str], WrapValidator(_text_or_texts)]


def _text_or_object(value: Any, _handler: Handler) -> Any:
    if isinstance(value, (str, dict)):
        return value
    raise wrong("must be a JSON schema, as an object or as text")


TextOrObject = Annotated[str | dict[str, Any], WrapValidator(_text_or_object)]
