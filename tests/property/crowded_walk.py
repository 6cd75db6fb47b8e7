"""Random walks of the real objects beside the specification, in pools that run out of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from spec import model
from spec.state import Abort, Add, Pause, ResetCache, Schedule, Scope, Template
from spec.walk import with_contents
from tests.support.refinement import Packer, Pair

NUM_ACTIONS = 50

MakePackers = Callable[[Scope], Sequence[Packer]]


def walk(
    seed: int,
    make_packers: MakePackers | None = None,
    max_depth: int = 2,
    max_drafts: int = 3,
) -> Pair:
    """A random walk in a small pool: the real objects beside the specification.

    Raises:
        RefinementError: they differ.
    """
    rng = random.Random(seed)
    block_size = rng.randint(1, 2)
    num_blocks = rng.randint(4, 8)
    cap = rng.randint(3, 6)
    policy = rng.choice(["fcfs", "fair", "priority"])
    templates = tuple(
        Template(
            (0, 0, 1, 0, 1, 1, 0)[: rng.choice([1, 1, 2, 2, 3, 5, 7])],
            rng.randint(1, 8),
            0,
            rng.randrange(2),
            reads_cache=rng.random() < 0.8,
            needs_history=rng.random() < 0.3,
            settled_only=rng.random() < 0.3,
            n=rng.choice([1, 1, 1, 2, 3]),
        )
        for _ in range(3)
    )
    contents = random.Random(f"segments of {seed}")  # its own, so that the rest stays as it is
    templates = tuple(with_contents(template, contents) for template in templates)
    drawn = random.Random(f"states of {seed}")  # its own, so that the rest stays as it is
    has_states = drawn.random() < 0.4
    scope = Scope(
        "walk",
        templates,
        num_requests=8,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=cap + rng.randint(0, 6),
        cap=cap,
        max_model_len=num_blocks * block_size + 1,
        depth=min(rng.choice([0, 0, 1, 2]), max_depth),
        outputs=(0, 1),
        policy=policy,
        overtaking=3 if policy == "priority" else 0,
        reset=seed % 3 == 0,
        num_states=has_states * (cap + drawn.choice([1, 1, 2, 4])),
        interval=block_size * drawn.choice([1, 1, 2, 3]),
    )
    if max_drafts and drawn.random() < 0.6:
        scope = scope._replace(max_drafts=drawn.randint(1, max_drafts))
    plain = scope._replace(max_drafts=0)  # of their offers there are too many
    pair = Pair(scope, make_packers(scope) if make_packers is not None else ())
    for _ in range(NUM_ACTIONS):
        labels = [label for label, _ in model.actions(pair.state, plain)]
        if not labels:
            break
        weights = [
            0.1
            if isinstance(label, Abort | ResetCache)
            else 0.3
            if isinstance(label, Pause)
            else 2.0
            if isinstance(label, Add)
            else 6.0 / sum(isinstance(other, Schedule) for other in labels)
            if isinstance(label, Schedule)
            else 3.0
            for label in labels
        ]
        label = rng.choices(labels, weights)[0]
        if isinstance(label, Schedule) and scope.max_drafts:
            label = with_drafts(label, pair, drawn)
        pair.apply(label)
    return pair


def with_drafts(label: Schedule, pair: Pair, rng: random.Random) -> Schedule:
    """The action with some draft tokens offered, more than there is room for among them, or those
    of a real drafter."""
    most = pair.scope.max_drafts + 1
    offer = tuple(
        (r, tuple(rng.randrange(2) for _ in range(rng.randint(1, most))))
        for r in pair.state.running + pair.state.waiting
        if rng.random() < 0.7
    )
    drafter = pair.scheduler.drafter
    if drafter is not None and pair.state.requests and len(pair.requests[-1].token_ids) % 2:
        offer = tuple(drafter.proposals(pair.scheduler.requests.values()))
    made, _ = model.plan(pair.state, pair.scope, label.budget, offer)
    count = sum(row.num_samples for row in made.rows)
    tokens = tuple(rng.choice(pair.scope.outputs) for _ in range(count))
    return label._replace(tokens=tokens, offer=offer)
