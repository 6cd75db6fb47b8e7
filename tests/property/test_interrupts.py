"""S37 on the real engine: whatever is raised at whatever line, nothing is left of it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings

from tests.interrupts import campaign

NUM_INJECTIONS = 1500


def test_an_exception_at_any_line_leaves_an_engine_that_serves_the_next_call(
    tmp_path: Path,
) -> None:
    assert settings.default is not None
    num_injections = max(NUM_INJECTIONS, settings.default.max_examples)
    files = campaign(num_injections, 0, tmp_path)
    needed = {"core.py", "lock.py", "generation.py", "scheduler.py", "queues.py"}
    needed |= {"block_manager.py", "trace.py"}
    assert needed <= files.keys(), files
