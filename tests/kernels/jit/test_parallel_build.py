"""Run ``parallel_build_cases.py`` in a process without Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.support.apart import run_apart

CASES = Path(__file__).with_name("parallel_build_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_are_built_together() -> None:
    # Without the settings of this run, and the conftest, which would let Triton interpret.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    printed = run_apart("-m", "pytest", *options, str(CASES))
    assert " passed" in printed, printed
