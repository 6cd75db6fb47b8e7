"""A step trace as columns, the data of the page: compact enough for 10,000 steps of 1,000 requests.

A request's life is a lane of *segments*. A segment of waiting has a begin and an end; a segment of
rows covers consecutive steps: a chunk is one row, and decodes that follow one another are one
segment of many rows. Times are whole microseconds since the trace began.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..spec.events import read_events

# Kinds of segments. The first four are waits, the others rows of plans.
KINDS = ("waiting", "preempted", "paused", "pending", "prefill", "decode")
WAITING, PREEMPTED, PAUSED, PENDING, PREFILL, DECODE = range(len(KINDS))
_RUNNING = len(KINDS)
# Times of a step, in the order in which they come.
TIMES = ("began", "planned", "dispatched", "asked", "collected", "committed")
COUNTS = (
    *("prefill", "decode", "hit", "evicted", "running", "waiting"),
    *("free", "cached", "owned"),
)
NEVER = -1


class Segment(NamedTuple):
    """``num_steps`` steps from ``step``, both places in the list of steps. Rows begin at position
    ``start``, a row has ``num_tokens``, draft tokens among them; of a segment of waiting ``begin``
    and ``end`` are set."""

    kind: int
    step: int
    num_steps: int
    start: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    begin: int = 0
    end: int = 0


def _contents(segments: Iterable[list[Any]]) -> list[tuple[int, int, str]]:
    found, begin = [], 0
    for length, content_hash in segments:
        if content_hash is not None:
            found.append((begin, begin + length, content_hash))
        begin += length
    return found


class Lane:
    """One request."""

    def __init__(self, name: str, event: dict[str, Any], added: int) -> None:
        self.name = name
        self.num_prompt = len(event.get("prompt", ()))
        # (begin, end, content hash) of each content segment of the prompt.
        self.contents = _contents(event.get("segments", ()))
        self.priority, self.owner = event.get("priority", 0), event.get("owner", 0)
        self.added, self.ended, self.reason = added, NEVER, ""
        self.segments: list[Segment] = []
        self.state, self.since, self.since_step = WAITING, added, 0
        self.siblings: list[Lane] = []

    def contents_in(self, begin: int, end: int) -> list[tuple[str, int, int]]:
        """(content hash, first and last offset in it) of the content segments at positions
        [begin, end)."""
        return [
            (content_hash, max(begin, first) - first, min(end, last) - 1 - first)
            for first, last, content_hash in self.contents
            if max(begin, first) < min(end, last)
        ]

    def add_row(self, step: int, start: int, num_tokens: int, num_samples: int) -> int:
        """Put a row into the last segment if it goes on there; returns its kind. A row with draft
        tokens is a segment of its own."""
        is_decode = num_samples > 0 and num_tokens == num_samples and start >= self.num_prompt
        if is_decode and num_tokens == 1 and self.segments:
            last = self.segments[-1]
            goes_on = last.step + last.num_steps == step and last.start + last.num_steps == start
            if last.kind == DECODE and last.num_tokens == 1 and goes_on:
                self.segments[-1] = last._replace(num_steps=last.num_steps + 1)
                return DECODE
        kind = DECODE if is_decode else PREFILL
        self.segments.append(Segment(kind, step, 1, start, num_tokens, num_samples))
        return kind


class Timeline:
    """Takes the events of a trace one by one."""

    def __init__(self, events: Iterable[tuple[int, dict[str, Any]]]) -> None:
        self.settings: dict[str, Any] = {}
        self.lanes: list[Lane] = []
        self.numbers: list[int] = []  # of the steps
        self.times: dict[str, list[int]] = {name: [] for name in TIMES}
        self.counts: dict[str, list[int]] = {name: [] for name in COUNTS}
        self.hits: list[tuple[int, int, int]] = []  # (step, lane, tokens)
        # (step, lane, draft tokens of the row, how many were accepted or -1 of a step in flight)
        self.drafts: list[list[int]] = []
        self.preemptions: list[tuple[int, int, int]] = []  # (step, victim's lane, asker's or -1)
        # (lane, reason, first step, number of steps): a reason that stays is one entry.
        self.refusals: list[list[Any]] = []
        self.marks: list[tuple[int, int, str, str]] = []  # (time, step, text, colour)
        self.end = 0
        self.lines: dict[int, tuple[int, int]] = {}  # time and step of events, by line
        self._live: dict[str, int] = {}
        self._in_flight: dict[int, int] = {}
        self._leaders: dict[int, list[Lane]] = {}
        self._open_drafts: dict[tuple[int, str], list[int]] = {}  # by step and request
        self._num_waiting = self._num_running = 0
        self._open_refusals: dict[tuple[int, str], list[Any]] = {}
        for line, event in events:
            self._line = line
            self.end = max(self.end, _microseconds(event["t"]) if "t" in event else 0)
            take = getattr(self, f"_on_{event['event']}", None)
            if take is not None:
                take(event)
            self.lines[line] = (self.end, len(self.numbers) - 1)

    # Requests ---------------------------------------------------------------------------------

    def _on_start(self, event: dict[str, Any]) -> None:
        self.settings = {k: v for k, v in event.items() if k not in ("event", "t")}

    def _on_add(self, event: dict[str, Any]) -> None:
        leader = self._new_lane(event["id"], event)
        for name in event.get("siblings", ()):
            sibling = self._new_lane(name, event)
            self._enter(sibling, PENDING, self.end)
            leader.siblings.append(sibling)

    def _new_lane(self, name: str, event: dict[str, Any]) -> Lane:
        lane = Lane(name, event, self.end)
        self._live[name] = len(self.lanes)
        self.lanes.append(lane)
        lane.since_step = len(self.numbers)
        self._num_waiting += 1
        return lane

    def _lane(self, name: str) -> tuple[int, Lane]:
        """The lane of a live request; an invalid trace may name another."""
        if name not in self._live:
            self._new_lane(name, {})
        number = self._live[name]
        return number, self.lanes[number]

    def _enter(self, lane: Lane, state: int, now: int) -> None:
        """The lane's request is in that state from now on, before the step that is planned next."""
        step = len(self.numbers)
        if lane.state < _RUNNING and (now > lane.since or step > lane.since_step):
            num_steps = step - lane.since_step
            lane.segments.append(
                Segment(lane.state, lane.since_step, num_steps, begin=lane.since, end=now)
            )
        self._num_waiting += (state in (WAITING, PREEMPTED)) - (lane.state in (WAITING, PREEMPTED))
        self._num_running += (state == _RUNNING) - (lane.state == _RUNNING)
        lane.state, lane.since, lane.since_step = state, now, step

    def _end(self, name: str, reason: str) -> None:
        _, lane = self._lane(name)
        self._enter(lane, _RUNNING, self.end)  # closes its wait
        self._num_running -= 1
        lane.ended, lane.reason = self.end, reason
        self._release_siblings(lane)
        del self._live[name]

    def _release_siblings(self, leader: Lane) -> None:
        for sibling in leader.siblings:
            if sibling.state == PENDING:
                self._enter(sibling, WAITING, self.end)
        leader.siblings = []

    def _on_abort(self, event: dict[str, Any]) -> None:
        if event["id"] in self._live:
            self._end(event["id"], event.get("reason", "abort"))

    def _on_pause(self, event: dict[str, Any]) -> None:
        _, lane = self._lane(event["id"])
        self._enter(lane, PAUSED, self.end)
        self._release_siblings(lane)

    def _on_resume(self, event: dict[str, Any]) -> None:
        _, lane = self._lane(event["id"])
        if lane.state == PAUSED:
            self._enter(lane, WAITING, self.end)

    def _on_fail(self, _event: dict[str, Any]) -> None:
        self._mark("an operation failed", "violation")
        for name in list(self._live):
            self._end(name, "error")
        self._in_flight.clear()
        self._open_drafts.clear()
        self._num_waiting = self._num_running = 0

    def _on_reset(self, _event: dict[str, Any]) -> None:
        self._mark("prefix cache reset", "preempted")
        for number in self._live.values():
            if self.lanes[number].state == _RUNNING:
                self._enter(self.lanes[number], PREEMPTED, self.end)

    def _mark(self, text: str, colour: str) -> None:
        self.marks.append((self.end, len(self.numbers) - 1, text, colour))

    # Steps ------------------------------------------------------------------------------------

    def _on_plan(self, event: dict[str, Any]) -> None:
        step = len(self.numbers)
        written = event["t"]  # all that versions before 4 tell of times
        began, planned, dispatched = map(_microseconds, event.get("times", [written] * 3))
        askers = event.get("askers", [])
        for i, name in enumerate(event["preempted"]):
            number, lane = self._lane(name)
            self._enter(lane, PREEMPTED, planned)
            asker = self._lane(askers[i])[0] if i < len(askers) else NEVER
            self.preemptions.append((step, number, asker))
        totals = {PREFILL: 0, DECODE: 0}
        leaders = []
        for name, start, num_tokens, num_samples in event["rows"]:
            _, lane = self._lane(name)
            if lane.state != _RUNNING:
                self._enter(lane, _RUNNING, planned)
            totals[lane.add_row(step, start, num_tokens, num_samples)] += num_tokens
            if lane.siblings and num_samples:
                leaders.append(lane)
        for name, ids in event.get("drafts", ()):
            entry = [step, self._lane(name)[0], len(ids), NEVER]
            self.drafts.append(entry)
            self._open_drafts[event["step"], name] = entry
        self._leaders[event["step"]] = leaders
        starts = {row[0]: row[1] for row in event["rows"]}
        tables = [name for name, _ in event.get("tables", ())]
        hits = event.get("hits") or [[n, starts[n]] for n in tables if starts.get(n)]
        self.hits += [(step, self._lane(name)[0], tokens) for name, tokens in hits]
        self._take_refusals(step, event.get("refused", ()))
        times = (began, planned, dispatched, NEVER, NEVER, NEVER)
        for column, value in zip(self.times.values(), times, strict=True):
            column.append(value)
        counts = (
            *(totals[PREFILL], totals[DECODE], sum(n for _, n in hits), event.get("evicted", 0)),
            *(self._num_running, self._num_waiting, *event["pool"]),
        )
        for column, value in zip(self.counts.values(), counts, strict=True):
            column.append(value)
        self._in_flight[event["step"]] = step
        self.numbers.append(event["step"])

    def _take_refusals(self, step: int, refused: Iterable[list[Any]]) -> None:
        still: dict[tuple[int, str], list[Any]] = {}
        for name, reason in refused:
            number = self._lane(name)[0]
            entry = self._open_refusals.get((number, reason))
            if entry is None:
                entry = [number, reason, step, 0]
                self.refusals.append(entry)
            entry[3] += 1
            still[number, reason] = entry
        self._open_refusals = still

    def _on_result(self, event: dict[str, Any]) -> None:
        step = self._in_flight.pop(event["step"], None)
        times = list(map(_microseconds, event.get("times", [event["t"]] * 3)))
        if step is not None:
            for name, value in zip(TIMES[3:], times, strict=True):
                self.times[name][step] = value
        self.end = max(self.end, times[2])
        for name, num_accepted in event.get("accepted", ()):
            entry = self._open_drafts.pop((event["step"], name), None)
            if entry is not None:  # a trace that breaks the specification may name another
                entry[3] = num_accepted
        for lane in self._leaders.pop(event["step"], ()):
            self._release_siblings(lane)
        for name, reason in event["finished"]:
            if name in self._live:
                self._end(name, reason)

    # ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Extend waits without an end to the end of the trace."""
        for number in self._live.values():
            self._enter(self.lanes[number], _RUNNING, self.end)

    @property
    def num_rows(self) -> int:
        rows = (PREFILL, DECODE)
        return sum(s.num_steps for lane in self.lanes for s in lane.segments if s.kind in rows)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def read_timeline(lines: Iterable[str]) -> Timeline:
    """The timeline of a trace of any version.

    Raises:
        TraceError: a line is no event of a step trace.
    """
    timeline = Timeline(read_events(lines))
    timeline.close()
    return timeline
