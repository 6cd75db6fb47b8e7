"""A timeline in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

Process 1 is the engine: its host thread, its device, and counters of tokens, requests, blocks,
hits and evictions. Process 2 has a thread per request; decodes that follow one another are one
slice. Flows lead from the dispatch of a step to its computation, and from the row that a request
was preempted for to the request's new wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .page import Verdict
from .timeline import KINDS, NEVER, PREEMPTED, PREFILL, Segment, Timeline

_ENGINE, _REQUESTS = 1, 2
_HOST, _DEVICE = 1, 2

Event = dict[str, Any]


class Place(NamedTuple):
    """A moment inside a slice of a thread."""

    pid: int
    tid: int
    ts: int


def chrome_trace(timeline: Timeline, title: str, verdict: Verdict | None) -> dict[str, Any]:
    """The whole file, as an object for ``json.dump``."""
    events = [
        *_names(timeline),
        *_steps(timeline),
        *_counters(timeline),
        *_lanes(timeline),
        *_preemptions(timeline),
        *_marks(timeline, verdict),
    ]
    other = {"trace": title, **{name: str(value) for name, value in timeline.settings.items()}}
    if verdict is not None:
        other["verdict"] = verdict.text
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def device_times(timeline: Timeline) -> list[tuple[int, int]]:
    """When the device computed each step: from its planning, or from the end of the step before,
    to the arrival of its tokens on the host."""
    found, last = [], 0
    planned, collected = timeline.times["planned"], timeline.times["collected"]
    for begin, end in zip(planned, collected, strict=True):
        begin = max(begin, last)
        last = max(begin, timeline.end if end == NEVER else end)
        found.append((begin, last))
    return found


def _event(kind: str, name: str, pid: int, tid: int, ts: int, **rest: Any) -> Event:
    return {"name": name, "cat": "pagespec", "ph": kind, "ts": ts, "pid": pid, "tid": tid, **rest}


def _slice(name: str, pid: int, tid: int, begin: int, end: int, **args: Any) -> Event:
    return _event("X", name, pid, tid, begin, dur=max(end - begin, 0), args=args)


def _flow(name: str, number: int, begin: Place, end: Place) -> Iterator[Event]:
    """An arrow from a slice to another."""
    shared = {"name": name, "cat": "pagespec", "id": number}
    yield {**shared, "ph": "s", **begin._asdict()}
    yield {**shared, "ph": "f", "bp": "e", **end._asdict()}


def _names(timeline: Timeline) -> Iterator[Event]:
    def meta(what: str, pid: int, tid: int, **args: Any) -> Event:
        return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}

    for pid, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
        yield meta("process_name", pid, 0, name=name)
        yield meta("process_sort_index", pid, 0, sort_index=pid)
    for tid, name in ((_HOST, "host"), (_DEVICE, "device")):
        yield meta("thread_name", _ENGINE, tid, name=name)
    for number, lane in enumerate(timeline.lanes, 1):
        yield meta("thread_name", _REQUESTS, number, name=lane.name)
        yield meta("thread_sort_index", _REQUESTS, number, sort_index=number)


def _steps(timeline: Timeline) -> Iterator[Event]:
    times, counts = timeline.times, timeline.counts
    for i, (begin, end) in enumerate(device_times(timeline)):
        step = timeline.numbers[i]
        began, planned, dispatched, asked, collected, committed = (c[i] for c in times.values())
        yield _slice("schedule", _ENGINE, _HOST, began, planned, step=step)
        yield _slice("dispatch", _ENGINE, _HOST, planned, dispatched, step=step)
        if collected != NEVER:
            yield _slice("wait", _ENGINE, _HOST, asked, collected, step=step)
            yield _slice("commit", _ENGINE, _HOST, collected, committed, step=step)
        counted = {name: column[i] for name, column in counts.items()}
        yield _slice(f"step {step}", _ENGINE, _DEVICE, begin, end, step=step, **counted)
        dispatch = Place(_ENGINE, _HOST, planned)
        yield from _flow("dispatched", i + 1, dispatch, Place(_ENGINE, _DEVICE, begin))


def _counters(timeline: Timeline) -> Iterator[Event]:
    groups = {
        "tokens": ("prefill", "decode"),
        "requests": ("running", "waiting"),
        "blocks": ("owned", "cached", "free"),
        "hit tokens": ("hit",),
        "evicted blocks": ("evicted",),
    }
    for i, planned in enumerate(timeline.times["planned"]):
        for name, columns in groups.items():
            args = {column: timeline.counts[column][i] for column in columns}
            yield {"name": name, "ph": "C", "ts": planned, "pid": _ENGINE, "tid": 0, "args": args}


def _times_of(segment: Segment, device: list[tuple[int, int]]) -> tuple[int, int]:
    if segment.kind < PREFILL:
        return segment.begin, segment.end
    return device[segment.step][0], device[segment.step + segment.num_steps - 1][1]


def _lanes(timeline: Timeline) -> Iterator[Event]:
    device = device_times(timeline)
    drafts = {(step, lane): counts for step, lane, *counts in timeline.drafts}
    for tid, lane in enumerate(timeline.lanes, 1):
        last = 0
        for segment in lane.segments:
            begin, end = _times_of(segment, device)
            begin = max(begin, last)  # a pause begins while the last row is computed
            last = max(begin, end)
            args: dict[str, Any] = {}
            if segment.kind >= PREFILL:
                args = {"step": timeline.numbers[segment.step], "start": segment.start}
                args["tokens"] = segment.num_steps * segment.num_tokens
                contents = lane.contents_in(segment.start, segment.start + args["tokens"])
                if contents:
                    args["contents"] = [f"{name}: {a} to {b}" for name, a, b in contents]
                if (segment.step, tid - 1) in drafts:
                    args["drafted"], args["accepted"] = drafts[segment.step, tid - 1]
            yield _slice(KINDS[segment.kind], _REQUESTS, tid, begin, last, **args)
        if lane.ended != NEVER:
            yield _event("i", f"finished: {lane.reason}", _REQUESTS, tid, lane.ended, s="t")


def _preemptions(timeline: Timeline) -> Iterator[Event]:
    device = device_times(timeline)
    first_number = len(timeline.numbers) + 1
    for number, (step, victim, asker) in enumerate(timeline.preemptions, first_number):
        waits = [
            s
            for s in timeline.lanes[victim].segments
            if s.kind == PREEMPTED and s.step == step and s.begin < s.end
        ]
        if asker != NEVER and waits:
            begin = Place(_REQUESTS, asker + 1, device[step][0])
            end = Place(_REQUESTS, victim + 1, max(waits[0].begin, device[step][0]))
            yield from _flow("preempted", number, begin, end)


def _marks(timeline: Timeline, verdict: Verdict | None) -> Iterator[Event]:
    for when, _, text, _ in timeline.marks:
        yield _event("i", text, _ENGINE, _HOST, when, s="g")
    if verdict is not None and verdict.line:
        when, _ = timeline.lines.get(verdict.line, (timeline.end, 0))
        yield _event("i", f"violated: {verdict.text}", _ENGINE, _HOST, when, s="g")
