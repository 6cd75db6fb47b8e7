"""Run a Python program in a subprocess without Triton's interpreter.

Where there is no GPU, the test process sets ``TRITON_INTERPRET``, so kernels cannot be compiled in
it. Tests that compile kernels therefore run a program in a subprocess.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest


def by_day_and_night(cases: Sequence[Any], *by_day: int) -> list[Any]:
    """Parameters for a test with slow cases: the cases at the indices ``by_day`` in the fast suite,
    and all of them nightly."""
    return [
        pytest.param([cases[i] for i in by_day], id="some"),
        pytest.param(cases, id="all", marks=pytest.mark.nightly),
    ]


def run_apart(*arguments: str) -> str:
    """The output of Python, run with these arguments and this process's module path. Fails if the
    exit status is not 0."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
