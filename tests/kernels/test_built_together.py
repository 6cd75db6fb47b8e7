"""Runs ``built_together_cases.py`` in a process of its own: here, Triton interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("built_together_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_are_built_together() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # Without the settings of this run, and the conftest, which would let Triton interpret.
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "no:xdist", "-c", os.devnull, str(CASES)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout, done.stdout
