"""Kernels whose launches are skipped."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Skip = Callable[..., list[tuple[str, tuple[int, ...]]]]


class _Skipped:
    def __init__(self, name: str, launched: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self.launched.append((self.name, grid))


@pytest.fixture
def skip_launches(monkeypatch: pytest.MonkeyPatch) -> Skip:
    """Leaves out the launches of a module's kernels, as while they are built; returns their names
    and grids."""

    def skip(module: ModuleType, *names: str) -> list[tuple[str, tuple[int, ...]]]:
        launched: list[Any] = []
        for name in names:
            monkeypatch.setattr(module, name, _Skipped(name, launched))
        return launched

    return skip
