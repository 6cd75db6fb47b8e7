"""`pagespec trace`: its verdicts, and the files that `trace view` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_fakes import call
from tests.support.traces import write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"


def break_pool(trace: Path) -> None:
    lines = trace.read_text().splitlines()
    event = json.loads(lines[-1])
    event["pool"] = [0, 0, 0]
    trace.write_text("\n".join([*lines[:-1], json.dumps(event)]))


def test_a_page_is_written_beside_its_trace(trace: Path) -> None:
    result = call("trace", "view", str(trace))
    assert (result.exit_code, result.stdout) == (0, f"{trace.with_suffix('.html')}\n")
    assert result.stderr.startswith("accepted: ")
    page = trace.with_suffix(".html").read_text()
    assert page.startswith("<!doctype html>")
    for place in ("/* styles */", "/* scripts */", ">packed-trace<"):
        assert place not in page
    for word in ("http://", "https://", "src=", "@import"):
        assert word not in page, word


def test_a_refused_trace_is_drawn_as_well(trace: Path, tmp_path: Path) -> None:
    break_pool(trace)
    assert call("trace", "check", str(trace)).exit_code == 1
    result = call("trace", "view", str(trace), "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 0
    assert "S2: " in result.stderr
    assert (tmp_path / "page.html").exists()


def test_a_trace_for_perfetto(trace: Path) -> None:
    result = call("trace", "view", str(trace), "--perfetto", "--no-check")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(trace.with_suffix(".perfetto.json").read_text())
    assert found["traceEvents"]
    assert "verdict" not in found["otherData"]


@pytest.mark.parametrize("command", ["check", "view"])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "t.jsonl").write_text("{}\n")
    result = call("trace", command, str(tmp_path / "t.jsonl"))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "not a step trace" in result.stderr
