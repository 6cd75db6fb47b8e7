"""A timeline contains every row, hit, preemption and refusal of its trace; all are counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pagespec.viewer.perfetto import chrome_trace
from pagespec.viewer.timeline import DECODE, NEVER, PREEMPTED, PREFILL, Timeline, read_timeline
from spec.events import read_events
from tests.property.test_trace import drafting_trace, trace_of
from tests.support.traces import in_full, write_trace


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_a_timeline_has_every_row_of_its_trace(tmp_path: Path, pipeline_depth: int) -> None:
    lines = write_trace(tmp_path / "t.jsonl", pipeline_depth=pipeline_depth)
    plans = [e for e in map(json.loads, in_full(lines)) if e["event"] == "plan"]
    timeline = read_timeline(lines)
    assert timeline.num_rows == sum(len(plan["rows"]) for plan in plans)
    assert timeline.numbers == [plan["step"] for plan in plans]
    told = {
        (timeline.numbers[segment.step + i], lane.name, segment.start + i, segment.num_tokens)
        for lane in timeline.lanes
        for segment in lane.segments
        if segment.kind in (PREFILL, DECODE)
        for i in range(segment.num_steps)
    }
    assert told == {(p["step"], name, start, n) for p in plans for name, start, n, _ in p["rows"]}
    assert len(timeline.preemptions) == sum(len(plan["preempted"]) for plan in plans) > 0
    assert len(timeline.hits) == sum(len(plan["hits"]) for plan in plans) > 0
    assert sum(timeline.counts["evicted"]) == sum(plan["evicted"] for plan in plans) > 0
    assert sum(r[3] for r in timeline.refusals) == sum(len(plan["refused"]) for plan in plans) > 0
    totals = zip(timeline.counts["prefill"], timeline.counts["decode"], strict=True)
    assert list(map(sum, totals)) == [sum(row[2] for row in plan["rows"]) for plan in plans]


def test_a_lane_is_in_one_state_at_a_time(tmp_path: Path) -> None:
    """A preempted request waits from its preemption to its next row."""
    timeline = read_timeline(write_trace(tmp_path / "t.jsonl"))
    for lane in timeline.lanes:
        ends = 0
        for segment in lane.segments:
            assert segment.step >= ends
            ends = segment.step + segment.num_steps
        assert lane.ended != NEVER
    again = [(s, lane) for lane in timeline.lanes for s in lane.segments if s.kind == PREEMPTED]
    assert len(again) == len(timeline.preemptions)
    assert {s.step for s, _ in again} == {step for step, _, _ in timeline.preemptions}


def test_a_reset_of_the_cache_preempts_running_requests(tmp_path: Path) -> None:
    lines = write_trace(tmp_path / "t.jsonl")
    place = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "result")
    after = json.loads(lines[place])
    reset = json.dumps({"event": "reset", "t": after["t"], "pool": [1, 0, 0]})
    before = Timeline(read_events(lines[: place + 1]))
    changed = Timeline(read_events([*lines[: place + 1], reset]))
    assert changed.marks == [(before.end, 0, "prefix cache reset", "preempted")]
    assert before._num_running > changed._num_running == 0
    assert changed._num_waiting == before._num_waiting + before._num_running


def test_waiting_and_running_are_counted(tmp_path: Path) -> None:
    lines = write_trace(tmp_path / "t.jsonl")
    timeline = read_timeline(lines)
    assert timeline.counts["waiting"][0] == 9 - timeline.counts["running"][0]
    assert (timeline._num_waiting, timeline._num_running) == (0, 0)
    assert max(timeline.counts["running"]) <= 5
    assert min(timeline.counts["waiting"]) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_any_run_has_a_timeline(seed: int) -> None:
    """With pauses, aborts, failures, siblings and steps that never settle."""
    lines = trace_of(seed)
    plans = [e for e in map(json.loads, in_full(lines)) if e["event"] == "plan"]
    for end in (len(lines), len(lines) // 2):
        timeline = read_timeline(lines[:end])
        if end == len(lines):
            assert timeline.num_rows == sum(len(plan["rows"]) for plan in plans)
            assert all(lane.ended != NEVER for lane in timeline.lanes)


@pytest.mark.parametrize("seed", range(12))
def test_a_timeline_has_the_draft_tokens_of_each_row(seed: int) -> None:
    """Also the number of accepted draft tokens, which is unknown while the step is in flight."""
    lines = drafting_trace(seed)
    events = [json.loads(line) for line in lines]
    drafted = {
        (event["step"], name): len(ids)
        for event in events
        if event["event"] == "plan"
        for name, ids in event["drafts"]
    }
    accepted = {
        (event["step"], name): n
        for event in events
        if event["event"] == "result"
        for name, n in event["accepted"]
    }
    timeline = read_timeline(lines)
    told = {
        (timeline.numbers[step], timeline.lanes[lane].name): (num_drafted, num_accepted)
        for step, lane, num_drafted, num_accepted in timeline.drafts
    }
    assert told == {key: (n, accepted.get(key, NEVER)) for key, n in drafted.items()}
    assert timeline.num_rows == sum(
        len(e["rows"]) for e in map(json.loads, in_full(lines)) if e["event"] == "plan"
    )
    slices = [e.get("args", {}) for e in chrome_trace(timeline, "t", None)["traceEvents"]]
    shown = [(args["drafted"], args["accepted"]) for args in slices if "drafted" in args]
    assert sorted(shown) == sorted(told.values())
    first = next((i for i, event in enumerate(events) if event.get("drafts")), None)
    if first is not None:
        assert {entry[3] for entry in read_timeline(lines[: first + 1]).drafts} == {NEVER}


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_a_timeline_has_the_content_of_each_row(tmp_path: Path, pipeline_depth: int) -> None:
    """The content of each position that is not a token, once per computation."""
    lines = write_trace(tmp_path / "t.jsonl", pipeline_depth=pipeline_depth, has_contents=True)
    events = [json.loads(line) for line in in_full(lines)]
    held = {
        event["id"]: [
            None if content_hash is None else (content_hash, offset)
            for length, content_hash in event["segments"]
            for offset in range(length)
        ]
        for event in events
        if event["event"] == "add"
    }
    rows = [row for event in events if event["event"] == "plan" for row in event["rows"]]
    expected = Counter(
        part
        for name, start, num_tokens, _ in rows
        for part in held[name][start : start + num_tokens]
        if part
    )
    assert len({content_hash for content_hash, _ in expected}) == 2
    timeline = read_timeline(lines)
    told = [
        part
        for lane in timeline.lanes
        for s in lane.segments
        if s.kind in (PREFILL, DECODE)
        for part in lane.contents_in(s.start, s.start + s.num_steps * s.num_tokens)
    ]
    assert expected == Counter((h, i) for h, first, last in told for i in range(first, last + 1))
    assert any(first for _, first, _ in told), "no row starts inside a content segment"
    slices = [e.get("args", {}) for e in chrome_trace(timeline, "t", None)["traceEvents"]]
    shown = [text for args in slices for text in args.get("contents", ())]
    assert sorted(shown) == sorted(f"{h}: {first} to {last}" for h, first, last in told)


def test_a_prompt_of_tokens_has_no_content(tmp_path: Path) -> None:
    timeline = read_timeline(write_trace(tmp_path / "t.jsonl"))
    assert [lane.contents for lane in timeline.lanes] == [[]] * len(timeline.lanes)
    slices = [e.get("args", {}) for e in chrome_trace(timeline, "t", None)["traceEvents"]]
    assert not any("contents" in args for args in slices)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_an_old_trace_has_a_timeline(tmp_path: Path, version: int) -> None:
    removed = ["settled_only", "num_state_slots", "state_interval", "segments"]
    removed += ["credit", "ticks_per_token", "reply_tokens", "owner"]
    removed += ["max_draft_tokens", "drafts", "accepted", "max_wanted_drafts", "wanted"]
    removed += ["askers", "hits", "evicted", "refused", "times"] * (version < 4)
    removed += ["prefixes", "reads_cache", "needs_history", "siblings", "copies"] * (version < 3)
    removed += ["tables", "new_blocks", "released"] * (version < 2)
    lines = write_trace(tmp_path / "t.jsonl")
    events = [json.loads(line) for line in in_full(lines)]
    events[0]["version"] = version
    old = [json.dumps({k: v for k, v in event.items() if k not in removed}) for event in events]
    timeline, new = read_timeline(old), read_timeline(lines)
    assert timeline.num_rows == new.num_rows
    assert timeline.hits == (new.hits if version > 1 else [])
    assert timeline.times["collected"] == sorted(timeline.times["collected"])
