"""The compiled form of the kernels around experts of few tokens on Hopper, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.support.apart import run_apart


def test_what_waits_for_what_and_how_rows_lie() -> None:
    built = json.loads(run_apart(str(Path(__file__).with_name("compile_experts.py"))))
    # Each kernel first lets the next one start. It reads and stores only after its wait.
    for each in (*built["routed"].values(), *built["routed by logits"].values()):
        assert each.startswith("dw")
        assert "l" in each
    # Few rows: the next kernel starts when offs has been read. Many rows: at once.
    assert built["gated"]["2"].startswith("wdl")
    assert built["gated"]["16"].startswith("dwl")
    # So the second matmul reads offs and prefetches weights before it waits.
    assert built["down"]["2"].lstrip("l").startswith("pwd")
    assert built["down"]["2"][0] == "l"
    assert built["down"]["16"].startswith("dwl")
    for each in (*built["gated"].values(), *built["down"].values()):
        before, behind = each.split("w")
        assert not set(before) & set("tms")
        assert {"t", "m", "s"} <= set(behind)
    # A mean's order of additions is that of the norm alone.
    for *joined, alone in built["layouts"]:
        assert joined == [alone] * 3
