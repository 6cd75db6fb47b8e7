"""``python -m spec.walk``: random walks with all checks, in scopes too large to explore.

This is not a proof. It tests configurations that the exhaustive scopes cannot reach: more
concurrent requests, longer prompts, all features together."""

from __future__ import annotations

import argparse
import random
import sys
import time

from . import model
from .checker import successors, unfinished
from .move import Move
from .properties import STATE_PROPERTIES
from .state import (
    Abort,
    Fail,
    Label,
    Pause,
    ResetCache,
    Schedule,
    Scope,
    Segment,
    Settle,
    Template,
    contents_by_position,
)
from .trace import render
from .transitions import TRANSITION_PROPERTIES

PROMPTS = ((0,), (0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 1, 0, 1, 0))


def with_contents(template: Template, rng: random.Random) -> Template:
    """The template; in half of the cases with segments of tokens and of three contents, whose
    placeholders are all equal."""
    if rng.random() < 0.5:
        return template
    segments, rest = [], len(template.prompt)
    while rest:
        segments.append(Segment(rng.randint(1, rest), rng.choice([None, 1, 1, 2, 3])))
        rest -= segments[-1].length
    contents = contents_by_position(tuple(segments))
    prompt = tuple(0 if p in contents else token for p, token in enumerate(template.prompt))
    return template._replace(prompt=prompt, segments=tuple(segments))


def random_scope(rng: random.Random) -> Scope:
    policy = rng.choice(["fcfs", "shortest_first", "priority", "fair", "fair"])
    cap = rng.randint(2, 4)
    templates = tuple(
        Template(
            prompt,
            rng.randint(1, 4),
            salt=rng.randint(0, 1),
            priority=rng.randint(0, 2),
            reads_cache=rng.random() < 0.8,
            needs_history=rng.random() < 0.4,
            settled_only=rng.random() < 0.3,
            n=rng.choice([1, 1, 2, 3]),
            owner=rng.randint(0, 2),
        )
        for prompt in rng.sample(PROMPTS, 3)
    )
    block_size = rng.randint(1, 3)
    drafts = random.Random(rng.random())  # separate generators, so that other draws are unchanged
    contents = random.Random(f"segments of {templates}")
    templates = tuple(with_contents(template, contents) for template in templates)
    return Scope(
        "walk",
        templates,
        num_requests=rng.randint(3, 7),
        num_blocks=rng.randint(4, 8),
        block_size=block_size,
        budget=cap + rng.randint(0, 4),
        budgets=rng.choice([(), (1, 2, cap)]),
        cap=cap,
        max_model_len=9,
        depth=rng.randint(0, 2),
        policy=policy,
        overtaking=0 if policy in ("fcfs", "fair") else rng.randint(1, 4),
        credit=rng.randint(0, 12) if policy == "fair" else 0,
        ticks=rng.randint(1, 3),
        reply=rng.randint(1, 3),
        caching=rng.random() < 0.85,
        pause=rng.random() < 0.5,
        fail=rng.random() < 0.3,
        reset=rng.random() < 0.3,
        num_states=rng.choice([0, cap + 1, cap + 1, cap + 3]),
        interval=block_size * rng.randint(1, 2),
        # All offers are enumerated; with several drafting rows there are too many.
        max_drafts=drafts.choice([0, 1]) if cap == 2 else 0,
        max_wanted=drafts.choice([0, 0, 1]) if cap == 2 else 0,
    )


def weight(label: Label) -> float:
    """Weights of random actions: mostly the engine's, since user actions undo progress."""
    if isinstance(label, Abort | Fail):
        return 0.02
    if isinstance(label, Pause | ResetCache):
        return 0.1
    return 3.0 if isinstance(label, Schedule) else 1.5 if isinstance(label, Settle) else 1.0


def walk(scope: Scope, rng: random.Random, length: int) -> tuple[list[str], list[Label]]:
    """The violated properties, and the path to the violation."""
    state, trace = model.initial(scope), []
    for _ in range(length):
        options = list(successors(state, scope))
        engine = [o for o in options if isinstance(o[0], Schedule | Settle)]
        if unfinished(state) and not engine:
            return ["L2"], trace
        if not options:
            break
        label, after, plan = rng.choices(options, [weight(o[0]) for o in options])[0]
        trace.append(label)
        move = Move(state, label, plan, after, scope)
        bad = [
            name
            for name, (kinds, holds) in TRANSITION_PROPERTIES.items()
            if type(label) in kinds and not holds(move)
        ]
        bad += [name for name, holds in STATE_PROPERTIES.items() if not holds(after, scope)]
        if bad:
            return bad, trace
        state = after
    return [], trace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m spec.walk", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    rng, began, walks, steps = random.Random(args.seed), time.perf_counter(), 0, 0
    while time.perf_counter() - began < args.seconds:
        scope = random_scope(rng)
        bad, trace = walk(scope, rng, 120)
        walks, steps = walks + 1, steps + len(trace)
        if bad:
            print(f"{', '.join(bad)} violated in {scope}")
            print(render(trace, scope))
            return 1
    print(f"{walks:,} walks, {steps:,} actions, {args.seconds:.0f} s: no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
