"""The Chrome trace: required fields per phase, slices that nest, flows that join."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pagespec.viewer.page import Verdict
from pagespec.viewer.perfetto import chrome_trace
from pagespec.viewer.timeline import read_timeline
from tests.support.traces import write_trace

# By phase, as the format's description requires (besides "ph", "pid", "ts").
REQUIRED = {
    "X": {"name", "tid", "dur"},
    "C": {"name", "args"},
    "M": {"name", "args"},
    "i": {"name", "tid", "s"},
    "s": {"name", "cat", "tid", "id"},
    "f": {"name", "cat", "tid", "id", "bp"},
}


@pytest.fixture(params=[0, 1])
def events(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    lines = write_trace(tmp_path / "t.jsonl", pipeline_depth=request.param)
    verdict = Verdict(len(lines) - 1, "S31", "REFUSED")
    made = chrome_trace(read_timeline(lines), "t.jsonl", verdict)
    found = json.loads(json.dumps(made))["traceEvents"]
    assert isinstance(found, list)
    return found


def test_every_event_has_the_fields_of_its_phase(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert REQUIRED[event["ph"]] | {"ph", "pid", "ts"} <= event.keys(), event
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    assert {event["ph"] for event in events} == REQUIRED.keys()


def test_slices_of_a_thread_do_not_overlap(events: list[dict[str, Any]]) -> None:
    ends: dict[tuple[int, int], int] = defaultdict(int)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])):
        thread = (event["pid"], event["tid"])
        assert event["ts"] >= ends[thread], event
        ends[thread] = event["ts"] + event["dur"]


def test_flows_join_two_slices(events: list[dict[str, Any]]) -> None:
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    ends: dict[int, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event["ph"])
            place = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in place), event
    assert ends
    assert all(sorted(phases) == ["f", "s"] for phases in ends.values())
    assert {e["name"] for e in events if e["ph"] == "s"} == {"dispatched", "preempted"}


def test_a_violation_is_an_instant_for_all(events: list[dict[str, Any]]) -> None:
    marks = [e for e in events if e["ph"] == "i" and e["s"] == "g"]
    assert [mark["name"] for mark in marks] == ["violated: REFUSED"]
