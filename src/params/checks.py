"""Checks of values: functions of a field's name and value, which return the value to keep."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from ..errors import InvalidInputError, nearest
from .declare import Check

# Block numbers, token indices and context lengths of a step are int32 tensors.
MAX_COUNT = (1 << 31) - 1
# At most the digits of a 32-bit integer: torch keeps only eight bits of a device index.
_DEVICE = r"auto|cpu|cuda(:[0-9]{1,9})?"


def is_int(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer, excluding True and False."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_int(value: object) -> int | None:
    """An integer of any type, such as ``numpy.int64``, as an ``int``; None for other values, and
    for True and False."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def as_float(value: object) -> float | None:
    """A number of any type, such as ``numpy.float32``, as a ``float``, or as an ``int`` of any
    size; None for other values."""
    return (
        float(value)
        if isinstance(value, Real) and not isinstance(value, Integral)
        else as_int(value)
    )


def is_list(value: object) -> bool:
    """True for any sequence except text and bytes."""
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    return isinstance(value, Sequence) and not is_text


def text_or_parts(field: str, value: Any) -> str | list[dict[str, Any]]:
    """A text, or a copy of a list of OpenAI's parts ``{"type": "text", "text": ...}``.

    Raises:
        InvalidInputError: names the part and the limit.
    """
    if isinstance(value, str):
        return value
    if not is_list(value):
        raise InvalidInputError(field, value, "must be text, or a list of parts of text")
    parts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            limit = "only parts of type 'text' are supported"
            raise InvalidInputError(f"{field}[{i}]", kind if kind is not None else part, limit)
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidInputError(f"{field}[{i}].text", text, "must be text")
        parts.append(dict(part))
    return parts


def path_of(value: object) -> str | None:
    """The path as text; None for a bytes path or any other value."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    return path if isinstance(path, str) else None


def count(low: int = 1, high: int = MAX_COUNT) -> Check:
    """Integers from ``low`` to ``high``."""

    def check(name: str, value: Any) -> int:
        kept = as_int(value)
        if kept is None or kept < low:
            raise InvalidInputError(name, value, f"must be an integer of {low} or more")
        if kept > high:
            raise InvalidInputError(name, value, f"must be at most {high}")
        return kept

    return check


def integer(low: float, high: float, limit: str) -> Check:
    """Integers from ``low`` to ``high``; ``limit`` describes the range in an error."""

    def check(name: str, value: Any) -> int:
        kept = as_int(value)
        if kept is None or not low <= kept <= high:
            raise InvalidInputError(name, value, f"must be an integer {limit}")
        return kept

    return check


def number(low: float, high: float, limit: str, *, is_above: bool = False) -> Check:
    """Numbers from ``low`` (excluded with ``is_above``) to ``high``; returned as floats."""

    def check(name: str, value: Any) -> float:
        kept = as_float(value)
        # Exact for integers of any size, even those too large for a float; False for NaN.
        if kept is None or not low <= kept <= high or (is_above and kept == low):
            raise InvalidInputError(name, value, f"must be a number {limit}")
        return float(kept)

    return check


def choice(*choices: str, aliases: Mapping[str, str] | None = None) -> Check:
    """One of several strings. ``aliases``: other engines' values for them."""

    def check(name: str, value: Any) -> str:
        known = (aliases or {}).get(value, value) if isinstance(value, str) else value
        if not isinstance(known, str) or known not in choices:
            raise InvalidInputError(name, value, f"must be one of {', '.join(choices)}")
        return known

    return check


def flag(limit: str = "must be True or False") -> Check:
    """True or False."""

    def check(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise InvalidInputError(name, value, limit)
        return value

    return check


def function(name: str, value: Any) -> Any:
    """A callable."""
    if not callable(value):
        raise InvalidInputError(name, value, "must be a function, or None")
    return value


def device_name(name: str, value: Any) -> str:
    """A device name. The device need not exist."""
    if not isinstance(value, str) or not re.fullmatch(_DEVICE, value):
        raise InvalidInputError(name, value, 'must be "auto", "cpu", "cuda" or "cuda:N"')
    return value


def writable_file(name: str, value: Any) -> Any:
    """A path to which a file can be written. Nothing is created."""
    path = path_of(value)
    if not path:
        raise InvalidInputError(name, value, "must be the path of a file to write, or None")
    try:
        can_write = not stat.S_ISDIR(os.stat(path).st_mode) and os.access(path, os.W_OK)
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        can_write = os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError):  # name too long, folder not accessible, NUL in the name
        can_write = False
    if not can_write:
        raise InvalidInputError(name, value, "must be a file that can be written in a folder")
    return value


def integers(name: str, value: Any) -> tuple[int, ...]:
    """Any sequence of integers."""
    if not is_list(value):
        raise InvalidInputError(name, value, "must be a list of integers")
    for item in value:
        if not is_int(item) or item < 1:
            raise InvalidInputError(name, item, "must be an integer of 1 or more")
    return tuple(value)


def keyed(name: str, value: Any, keys: Sequence[str], example: str) -> Mapping[str, Any]:
    """A dict, or the dict that a JSON text contains, with keys among ``keys``.

    Args:
        example: JSON text for the error of another value.

    Raises:
        InvalidInputError: names the field or the key, the value and the limit.
    """
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except ValueError as error:
            raise InvalidInputError(name, value, f"is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise InvalidInputError(name, value, f"must be a dict or JSON text, such as {example}")
    for key in given:
        if key not in keys:
            near = nearest(str(key), keys) or f": its keys are {', '.join(keys)}"
            raise InvalidInputError(f"{name}.{key}", given[key], f"there is no such key{near}")
    return given
