"""What was made of the requests of a plan, kept for the two batches that steps may alternate."""

from __future__ import annotations

from typing import Generic, TypeVar

from .request import RequestInfo

_T = TypeVar("_T")
_Requests = tuple[RequestInfo, ...]


class LastTwoBatches(Generic[_T]):
    """Values by ``StepPlan.requests``, whose tuples are the same objects while a batch comes again.
    With overlap, settled-only requests have a row in every second step (S42)."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[tuple[_Requests, _T], ...] = ()

    def get(self, requests: _Requests) -> _T | None:
        """What was put for these requests, unless two others came since."""
        for kept, value in self._kept:
            if kept is requests:
                return value
        return None

    def put(self, requests: _Requests, value: _T) -> _T:
        """Keep a value, and return it."""
        self._kept = ((requests, value), *self._kept[:1])
        return value

    def clear(self) -> None:
        self._kept = ()
