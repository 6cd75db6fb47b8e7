"""Checks of the types of values that callers give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is an integer, and not True or False, which Python counts among them."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is an integer or a float."""
    return is_int(value) or isinstance(value, float)


def is_list(value: object) -> bool:
    """True for any sequence except text and bytes."""
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    return isinstance(value, Sequence) and not is_text


def path_of(value: object) -> str | None:
    """The text of a path; None for what is no path, or one of bytes."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    return path if isinstance(path, str) else None
