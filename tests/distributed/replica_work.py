"""Work for replicas that needs no model. Every replica imports this module; it imports little."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pagespec.errors import EngineError, InvalidInputError


def make_work(folder: Path) -> Callable[[Sequence[Any]], list[Any]]:
    """Doubles integers; "die" ends the process. Each start and integer adds a line to a file."""
    _tell(folder / "started", os.getpid())
    return partial(_double, folder)


def _double(folder: Path, items: Sequence[Any]) -> list[Any]:
    results = []
    for item in items:
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "fail":
            raise EngineError("a step failed")
        if item == "bug":
            raise ValueError("a bug")
        time.sleep(0.002)
        results.append(item * 2)
        _tell(folder / "done", item)
    return results


def _tell(path: Path, what: object) -> None:
    with path.open("a") as file:
        file.write(f"{what}\n")


def refuse_work(folder: Path) -> Callable[[Sequence[Any]], list[Any]]:
    _tell(folder / "started", os.getpid())
    raise InvalidInputError("model", "x", "must be a model")


def die_at_start(folder: Path) -> Callable[[Sequence[Any]], list[Any]]:
    _tell(folder / "started", os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()
