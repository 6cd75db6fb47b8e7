"""A coroutine whose first part has already run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")


class Started(Coroutine[Any, Any, _T]):
    """The rest of an operation: to be awaited, or dropped.

    A plain coroutine that is dropped warns, and has done nothing.

    Args:
        rest: the coroutine.
        on_drop: called instead of it, if this object is freed without having been awaited.
    """

    def __init__(self, rest: Coroutine[Any, Any, _T], on_drop: Callable[[], Any]) -> None:
        self._rest, self._on_drop = rest, on_drop
        self._is_awaited = False

    def send(self, value: Any) -> Any:
        self._is_awaited = True
        return self._rest.send(value)

    def throw(self, *error: Any) -> Any:
        self._is_awaited = True
        return self._rest.throw(*error)

    def close(self) -> None:
        self._rest.close()

    def __await__(self) -> Generator[Any, Any, _T]:
        self._is_awaited = True
        return self._rest.__await__()

    def __del__(self) -> None:
        if not self._is_awaited:
            self._rest.close()
            self._on_drop()
