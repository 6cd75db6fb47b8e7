"""Counterexamples as text."""

from __future__ import annotations

from collections.abc import Iterator

from . import model
from .state import (
    STOP,
    Abort,
    Add,
    Fail,
    Label,
    Pause,
    Plan,
    ResetCache,
    Schedule,
    Scope,
    Segments,
    Settle,
    State,
    spell,
)

PLACES = ("running", "waiting", "paused", "pending", "queued")


def tokens_text(tokens: tuple[int, ...]) -> str:
    return " ".join("stop" if token == STOP else str(token) for token in tokens)


def label_text(label: Label, plan: Plan | None) -> str:
    if isinstance(label, Add):
        t = label.template
        extra = f", salt {t.salt}" * bool(t.salt) + f", priority {t.priority}" * bool(t.priority)
        extra += f", {t.n} continuations" * (t.n > 1)
        extra += ", computes all" * (not t.reads_cache) + ", tells all" * t.needs_history
        extra += ", settled only" * t.settled_only + f", owner {t.owner}" * bool(t.owner)
        prompt = tokens_text(t.prompt)
        if t.segments:
            prompt += f" = {segments_text(t.segments)}"
        return f"Add r{label.request}: prompt [{prompt}], max_tokens {t.max_tokens}{extra}"
    if isinstance(label, Settle):
        return f"Settle the oldest step; sampled [{tokens_text(label.tokens)}]"
    if isinstance(label, Schedule):
        return f"Schedule {plan_text(plan)}" + f", budget {label.budget}" * bool(label.budget)
    if isinstance(label, ResetCache):
        return "ResetCache: nothing computed before is to be read"
    if isinstance(label, Fail):
        return "Fail: an operation raised or was interrupted"
    verb = {Abort: "Abort", Pause: "Pause"}.get(type(label), "Resume")
    return f"{verb} r{label.request}"


def segments_text(segments: Segments) -> str:
    """'1 token, 3 of content 2'"""
    return ", ".join(
        f"{length} token{'s' * (length > 1)}"
        if content is None
        else f"{length} of content {content}"
        for length, content in segments
    )


def plan_text(plan: Plan | None) -> str:
    if plan is None:
        return "(nothing)"
    parts = [
        f"r{row.request}[{row.start}:{row.start + row.n}]{drafts_text(row.drafts)}"
        + "*" * row.num_samples
        + f" + draft {row.wanted}" * bool(row.wanted)
        for row in plan.rows
    ]
    parts += [f"admit r{r} with {len(hits)} hits" for r, hits in plan.admitted]
    parts += [
        f"preempt r{victim} for r{preemptor}"
        for victim, preemptor in zip(plan.preempted, plan.preempted_for, strict=True)
    ]
    parts += [f"fork r{r} from r{source}" for r, source in plan.forked]
    parts += [f"copy b{a} to b{b}" for a, b in plan.copies]
    parts += [f"hold r{r}" for r in plan.held]
    return ", ".join(parts)


def drafts_text(drafts: tuple[int, ...]) -> str:
    return f" + drafts [{tokens_text(drafts)}]" * bool(drafts)


def state_lines(state: State) -> Iterator[str]:
    for r, request in enumerate(state.requests):
        place = request.reason or next((n for n in PLACES if r in getattr(state, n)), "nowhere")
        yield (
            f"r{r} {place:8} [{tokens_text(request.tokens)}] "
            f"computed {request.computed} dispatched {request.dispatched} total {request.total} "
            f"blocks {list(request.table)}"
            + f" states {list(request.states)}"
            * bool(state.slots.refs)
        )
    if state.shares:
        shares = ", ".join(f"owner {o} at {a}, last {s}" for o, (a, s) in state.shares)
        yield f"clock {state.clock}; {shares}; ranks {[q.rank[0] for q in state.requests]}"
    cells = []
    for block, (ref, key) in enumerate(zip(state.refs, state.keys, strict=True)):
        written = ",".join(map(spell, state.contents[block]))
        cells.append(f"b{block} ref {ref} ({written})" + f" key {spell(key or 0)}" * bool(key))
    yield "; ".join(cells)
    slots = state.slots
    for slot, (ref, key) in enumerate(zip(slots.refs, slots.keys, strict=True)):
        content = spell(slots.contents[slot])
        yield f"state slot {slot} ref {ref} ({content})" + f" key {spell(key or 0)}" * bool(key)
    yield f"free {list(state.free)} lru {list(state.lru)} steps in flight {len(state.flight)}"
    for step in state.flight:
        rows = [
            f"r{w.request}[{w.start}:{w.start + w.n}]{drafts_text(w.drafts)}"
            + f" will sample {tokens_text(w.samples)}" * bool(w.samples)
            + f" and draft {w.wanted}" * bool(w.wanted)
            for w in step
        ]
        yield f"  in flight: {', '.join(rows)}"


def render(trace: list[Label], scope: Scope, cycle: int = 0) -> str:
    """Each action, and the states around the last one (a '*' per sample)."""
    state, lines = model.initial(scope), []
    for number, label in enumerate(trace, 1):
        if cycle and number == len(trace) - cycle + 1:
            lines.append("  -- these actions repeat forever:")
        made = None
        if isinstance(label, Schedule):
            made = model.plan(state, scope, *label[1:])[0]
        if number == len(trace) - cycle:
            lines += [f"       | {line}" for line in state_lines(state)]
        lines.append(f"  {number:3}. {label_text(label, made)}")
        state = model.step(state, label, scope)
        if number == len(trace):
            lines += [f"       | {line}" for line in state_lines(state)]
    return "\n".join(lines)
