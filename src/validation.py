"""Checks of the types of values that callers give."""

from __future__ import annotations

import os
from collections.abc import Sequence


def is_list(value: object) -> bool:
    """Whether it is a list, or like one: text and bytes are sequences, too, but of another kind."""
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    return isinstance(value, Sequence) and not is_text


def path_of(value: object) -> str | None:
    """The text of a path; None for what is no path, or one of bytes."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    return path if isinstance(path, str) else None
