"""Every benchmark can be imported.

Most run on a GPU alone, where no CI sees that a helper was renamed.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in _FOLDER.glob("*.py")))
def test_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
