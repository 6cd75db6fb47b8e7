"""Property S37 on the real engine: an exception at any line leaves no trace of the interrupted
call.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.interrupts import campaign


@pytest.mark.parametrize("number", [300, pytest.param(1500, marks=pytest.mark.nightly)])
def test_an_exception_at_any_line_leaves_an_engine_that_serves_the_next_call(
    tmp_path: Path, number: int
) -> None:
    assert settings.default is not None
    num_injections = max(number, settings.default.max_examples)
    files = campaign(num_injections, 0, tmp_path)
    needed = {"core.py", "generation.py", "scheduler.py", "block_manager.py"}
    needed |= {"queues.py", "trace.py", "llm.py"}
    assert needed <= files.keys(), files
