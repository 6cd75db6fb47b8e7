"""Breadth-first exploration: checks every property in every state; counterexamples are shortest."""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from . import model
from .canonical import digest
from .move import Move
from .properties import STATE_PROPERTIES
from .state import (
    NO_SLOT,
    Label,
    Plan,
    Resume,
    Schedule,
    Scope,
    Settle,
    State,
    is_inside,
)
from .transitions import ANY, TRANSITION_PROPERTIES

LIVENESS = ("L1", "L2", "L8")  # checked on the graph, below
ALL_PROPERTIES = tuple(
    sorted(
        {*STATE_PROPERTIES, *TRANSITION_PROPERTIES, *LIVENESS},
        key=lambda name: (name[0] == "L", int(name[1:])),
    )
)


@dataclass
class Report:
    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # the time on an idle machine
    complete: bool = True
    violated: tuple[str, ...] = ()  # the properties that the first violating action violates
    trace: list[Label] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)  # events, to show that no rule is unused
    cycle: int = 0  # how many last actions of the trace repeat forever


class Graph:
    """Kept for each state: a digest, the first path to it, and its engine successors."""

    def __init__(self) -> None:
        self.number: dict[bytes, int] = {}
        self.parent = array("l")
        self.label: list[Label | None] = []
        self.source = array("l")
        self.target = array("l")

    def add(self, key: bytes, parent: int, label: Label | None) -> int:
        number = self.number[key] = len(self.parent)
        self.parent.append(parent)
        self.label.append(label)
        return number

    def trace(self, number: int) -> list[Label]:
        labels: list[Label] = []
        while self.parent[number] >= 0:
            label = self.label[number]
            assert label is not None
            labels.append(label)
            number = self.parent[number]
        return labels[::-1]

    def find_cycle(self) -> list[int]:
        """A cycle of engine actions, or []. States without successors are removed repeatedly; the
        remaining states are on cycles or lead to one."""
        count = len(self.parent)
        out = array("l", bytes(8 * count))
        into: list[list[int] | None] = [None] * count
        for a, b in zip(self.source, self.target, strict=True):
            out[a] += 1
            sources = into[b]
            if sources is None:
                into[b] = [a]
            else:
                sources.append(a)
        peel = [n for n in range(count) if out[n] == 0]
        while peel:
            for a in into[peel.pop()] or ():
                out[a] -= 1
                if out[a] == 0:
                    peel.append(a)
        first = next((n for n in range(count) if out[n] > 0), None)
        if first is None:
            return []
        successor: dict[int, int] = {}
        for a, b in zip(self.source, self.target, strict=True):
            if out[a] > 0 and out[b] > 0:
                successor.setdefault(a, b)
        path, seen = [first], {first: 0}
        while successor[path[-1]] not in seen:
            path.append(successor[path[-1]])
            seen[path[-1]] = len(path) - 1
        return path[seen[successor[path[-1]]] :]


def is_engine(label: Label) -> bool:
    return isinstance(label, Schedule | Settle)


def events(before: State, plan: Plan, after: State) -> Iterator[str]:
    yield f"flight {len(after.flight)}"
    if plan.preempted:
        yield "preempt"
    if plan.held:
        yield "hold"
    if any(hits for _, hits in plan.admitted):
        yield "hit"
    if plan.forked:
        yield "fork"
    if plan.copies:
        yield "copy"
    if any(not row.num_samples for row in plan.rows):
        yield "chunk"
    if any(row.drafts for row in plan.rows):
        yield "draft"
    if any(row.wanted for row in plan.rows):
        yield "wish"
    if len({row.n > 1 for row in plan.rows}) == 2:
        yield "mixed"
    if any(key is not None and after.keys[b] is None for b, key in enumerate(before.keys)):
        yield "evict"
    yield from segment_events(plan, after)
    if before.slots.refs:
        yield from slot_events(before, plan, after)


def segment_events(plan: Plan, after: State) -> Iterator[str]:
    """Rows and hits that end inside a content segment."""
    for row in plan.rows:
        if is_inside(after.requests[row.request].segments, row.start + row.n):
            yield "chunk in segment"
    for r, _ in plan.admitted:
        if is_inside(after.requests[r].segments, after.requests[r].computed):
            yield "hit in segment"


def slot_events(before: State, plan: Plan, after: State) -> Iterator[str]:
    if any(reason == "state slots" for _, reason in plan.refused):
        yield "no slot"
    if any(
        key is not None and after.slots.keys[s] is None for s, key in enumerate(before.slots.keys)
    ):
        yield "evict state"
    for row in plan.rows:
        table = after.requests[row.request].states
        if any(slot in table[:i] for i, slot in enumerate(table) if slot != NO_SLOT):
            yield "in place"


def unfinished(state: State) -> list[int]:
    """Requests that the engine alone should finish."""
    return [*state.running, *state.waiting, *state.pending, *state.queued]


def resumed(trace: list[Label], requests: list[int]) -> bool:
    return any(isinstance(label, Resume) and label.request in requests for label in trace)


class Explorer:
    """One breadth-first search."""

    def __init__(self, scope: Scope, only: Iterable[str] | None) -> None:
        self.scope, self.graph = scope, Graph()
        self.wanted = set(ALL_PROPERTIES) if only is None else set(only)
        self.on_state = [(k, p) for k, p in STATE_PROPERTIES.items() if k in self.wanted]
        self.on_action = {
            kind: [
                (name, holds)
                for name, (kinds, holds) in TRANSITION_PROPERTIES.items()
                if name in self.wanted and kind in kinds
            ]
            for kind in ANY
        }
        self.report = Report(scope)

    def run(self, max_states: int) -> Report:
        began, cpu_began = time.perf_counter(), time.process_time()
        gc.disable()  # there is no cyclic garbage; scanning millions of tuples is half the time
        self.search(max_states)
        gc.enable()
        if not self.report.violated and self.wanted.intersection(LIVENESS):
            self.look_for_livelock()
        self.report.states = len(self.graph.parent)
        self.report.seconds = time.perf_counter() - began
        self.report.cpu_seconds = time.process_time() - cpu_began
        return self.report

    def fail(self, names: Iterable[str], trace: list[Label]) -> None:
        self.report.violated, self.report.trace = tuple(dict.fromkeys(names)), trace

    def search(self, max_states: int) -> None:
        start = model.initial(self.scope)
        frontier = [(self.graph.add(digest(start, self.scope), -1, None), start)]
        while frontier:
            following: list[tuple[int, State]] = []
            for number, state in frontier:
                self.expand(number, state, following)
                if self.report.violated:
                    return
            if following:
                self.report.depth += 1
            if len(self.graph.parent) > max_states:
                self.report.complete = False
                return
            frontier = following

    def expand(self, number: int, state: State, following: list[tuple[int, State]]) -> None:
        graph, engine_moves = self.graph, 0
        for label, successor, plan in successors(state, self.scope):
            self.report.transitions += 1
            move = Move(state, label, plan, successor, self.scope)
            if plan is not None:
                self.report.seen.update(events(state, plan, successor))
            violated = [name for name, holds in self.on_action[type(label)] if not holds(move)]
            if violated:
                violated += [n for n, holds in self.on_state if not holds(successor, self.scope)]
                return self.fail(violated, [*graph.trace(number), label])
            if successor == state:  # a refused request, or a second abort
                target = number
            else:
                key = digest(successor, self.scope)
                target = graph.number.get(key, -1)
                if target < 0:
                    target = graph.add(key, number, label)
                    violated = [n for n, holds in self.on_state if not holds(successor, self.scope)]
                    if violated:
                        return self.fail(violated, graph.trace(target))
                    following.append((target, successor))
            if is_engine(label):
                engine_moves += 1
                graph.source.append(number)
                graph.target.append(target)
        if not engine_moves and unfinished(state):
            # Nothing to settle and no plan: only a user action could help, and none is required.
            trace = graph.trace(number)
            names = ["L2", "L8"] if resumed(trace, unfinished(state)) else ["L2"]
            names = [name for name in names if name in self.wanted]
            if names:
                self.fail(names, trace)
        return None

    def look_for_livelock(self) -> None:
        cycle = self.graph.find_cycle()
        if not cycle:
            return
        trace = self.graph.trace(cycle[0])
        state = model.initial(self.scope)
        for label in trace:
            state = model.step(state, label, self.scope)
        names = ["L1", "L8"] if resumed(trace, unfinished(state)) else ["L1"]
        self.report.cycle = len(cycle)
        for number in [*cycle[1:], cycle[0]]:
            for label, successor, _ in model.engine_actions(state, self.scope):
                if self.graph.number.get(digest(successor, self.scope)) == number:
                    trace.append(label)
                    state = successor
                    break
        names = [name for name in names if name in self.wanted]
        if names:
            self.fail(names, trace)


def successors(state: State, scope: Scope) -> Iterator[tuple[Label, State, Plan | None]]:
    yield from model.engine_actions(state, scope)
    yield from model.user_actions(state, scope)


def explore(scope: Scope, only: Iterable[str] | None = None, max_states: int = 10**9) -> Report:
    """Explore a whole scope, or up to the first violation of the properties in ``only``."""
    return Explorer(scope, only).run(max_states)
