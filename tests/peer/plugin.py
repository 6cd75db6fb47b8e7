"""pytest's side: installs the stand-in, and records the outcome of each test.

The record is the file named by ``PEER_RECORD``: one JSON object per line, with ``id``, ``outcome``
("passed", "failed" or "skipped"), ``reason`` and ``seconds``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import models, stand_in

_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_MAX_CHARACTERS = 300


class Recorder:
    """Writes the worst outcome of a test's setup, call and teardown when the test has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._current: dict[str, Any] = {}

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        stand_in.is_running_test, stand_in.current_test = True, item.nodeid
        self._current = {"id": item.nodeid, "outcome": "passed", "reason": "", "seconds": 0.0}
        try:
            return (yield)
        finally:
            stand_in.is_running_test = False
            self._write(self._current)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        current = self._current
        current["seconds"] = round(current["seconds"] + report.duration, 2)
        if _RANK[report.outcome] > _RANK[current["outcome"]]:
            current |= {"outcome": report.outcome, "reason": _reason(report)}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write(
                {
                    "id": report.nodeid,
                    "outcome": report.outcome,
                    "reason": _reason(report),
                    "seconds": 0.0,
                }
            )


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        text = str(report.longrepr[2]).removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2]
        if report.when == "collect" and crash is None:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            text = lines[-1][1:] if lines else text
    return " ".join(text.split())[:_MAX_CHARACTERS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out a test whose parameters equal those of another after models are replaced."""
    seen: set[tuple[str, ...]] = set()
    kept, left_out = [], []
    for item in items:
        call = getattr(item, "callspec", None)
        given = call.params.items() if call else ()
        values = {name: _replaced(name, value) for name, value in given}
        key = (item.nodeid.partition("[")[0], *(f"{name}={values[name]}" for name in values))
        is_replaced = any(not each.startswith("=") for each in values.values())
        (left_out if is_replaced and key in seen else kept).append(item)
        seen.add(key)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _replaced(name: str, value: object) -> str:
    """What stands for the value of a parameter; "=" and its text if it is not replaced."""
    if name == "dtype":
        return "float32"
    if isinstance(value, str) and re.fullmatch("(FLASH|FLASHINFER|FLEX|TRITON)(_[A-Z]+)*", value):
        return "kernels"  # see models._OF_ITS_STEPS
    if isinstance(value, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        return models.feature_of(value) or models.kind_of(value)
    return f"={value!r}"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before the first ``conftest.py``, which may import vllm."""
    stand_in.install()


def pytest_configure(config: pytest.Config) -> None:
    models.replace_models()
    config.pluginmanager.register(Recorder(Path(os.environ["PEER_RECORD"])), "peer-recorder")
