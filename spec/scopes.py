"""The finite configurations that are explored, and the purpose of each."""

from __future__ import annotations

from .state import Scope, Segment, Template

T = Template

# Base of the seeded defects: so small that a counterexample is short and found at once.
SEEDED = Scope(
    "seeded", (T((0, 0), 2), T((0, 1, 0), 2)), num_requests=2, num_blocks=3, block_size=2, budget=3
)

# Base of the defects of state slots: intervals of two tokens, and one spare slot.
SEEDED_STATES = SEEDED._replace(num_blocks=5, block_size=1, num_states=3, interval=2)

# Prompts share a first token, so that hits of every length occur; LONG is computed in chunks.
LONG, PAIR, SHORT = T((0, 0, 0), 2), T((0, 1), 2), T((0,), 3)
_TIGHT = Scope("", (LONG, PAIR), num_blocks=4, cap=2, budget=2)

_SIBLINGS = _TIGHT._replace(
    templates=(T((0, 0, 0, 0), 2, n=2), T((0, 0), 2)), num_requests=3, block_size=2, budget=4, cap=3
)

# Recurrent layers: a checkpoint at each token, at each second token, or, without a cache, none.
_STATES = _TIGHT._replace(num_states=3, interval=2)

_WITH_STATES = (
    _STATES._replace(name="ci-states", interval=1, depth=1, abort=False),
    _STATES._replace(name="ci-states-sync", templates=(LONG, PAIR), fail=True, reset=True),
    _STATES._replace(
        name="ci-states-overlap",
        templates=(T((0, 0, 0, 0), 2), PAIR),
        num_blocks=5,
        budget=5,
        depth=1,
    ),
    _STATES._replace(
        name="ci-states-depth-2",
        templates=(LONG, SHORT),
        budget=3,
        depth=2,
        num_states=4,
        pause=False,
    ),
    _STATES._replace(
        name="ci-states-siblings",
        templates=(T((0, 0, 0), 2, n=2), PAIR),
        num_requests=3,
        num_blocks=5,
        depth=1,
        pause=False,
        abort=False,
    ),
    _STATES._replace(name="ci-states-uncached", depth=1, caching=False),
)

# Two owners: one sends short requests, the other more expensive ones.
FEW, MUCH = T((0,), 2, owner=1), T((0, 1), 3, owner=2)
_OWNERS = _TIGHT._replace(
    templates=(FEW, MUCH),
    num_requests=3,
    policy="fair",
    credit=3,
    reply=2,
    num_blocks=6,
    pause=False,
)
_FAIR = (
    _OWNERS._replace(name="ci-fair", budget=3, fail=True),
    _OWNERS._replace(name="ci-fair-overlap", budget=3, depth=1, abort=False),
    _OWNERS._replace(name="ci-fair-tight", num_blocks=4, depth=1, abort=False, reset=True),
    _OWNERS._replace(name="ci-fair-pause", num_requests=2, cap=1, depth=1, pause=True),
    _OWNERS._replace(
        name="ci-fair-siblings", templates=(FEW._replace(n=2), MUCH), num_requests=4, cap=1
    ),
)

# Steps with smaller budgets, chosen anew for each step.
_PACED = _TIGHT._replace(budget=4, budgets=(1, 2))

# Rows with draft tokens: any tokens may be offered, and any of them may be accepted.
DRAFTING = T((0,), 3)
_DRAFTS = _TIGHT._replace(max_drafts=1, pause=False)
_WITH_DRAFTS = (
    _DRAFTS._replace(
        name="ci-drafts-sync", templates=(DRAFTING, T((0, 0), 2)), max_drafts=2, budget=4, fail=True
    ),
    _DRAFTS._replace(
        name="ci-drafts-overlap",
        templates=(DRAFTING, T((0,), 2, settled_only=True)),
        num_blocks=3,
        budget=3,
        depth=1,
        abort=False,
        reset=True,
    ),
    _DRAFTS._replace(
        name="ci-drafts-history",
        templates=(DRAFTING._replace(needs_history=True),),
        num_blocks=3,
        block_size=2,
        budget=4,
        depth=1,
    ),
    _DRAFTS._replace(
        name="ci-drafts-siblings",
        templates=(T((0, 0), 3, n=2),),
        block_size=2,
        budget=4,
    ),
    _DRAFTS._replace(
        name="ci-drafts-paced",
        templates=(DRAFTING,),
        max_drafts=2,
        budget=4,
        budgets=(1, 2),
        abort=False,
    ),
    # too few samples for the drafts of both rows
    _DRAFTS._replace(
        name="ci-drafts-limited",
        templates=(DRAFTING,),
        num_blocks=6,
        max_drafts=2,
        max_samples=4,
        budget=6,
        abort=False,
    ),
)

# Tokens drafted behind a row by a second model: they need slots, whatever they are.
_WITH_WISHES = (
    _DRAFTS._replace(
        name="ci-wishes-sync",
        templates=(DRAFTING, T((0, 0), 3)),
        num_blocks=5,
        max_wanted=1,
        budget=4,
        fail=True,
    ),
    _DRAFTS._replace(
        name="ci-wishes-overlap",
        templates=(T((0,), 4),),
        max_drafts=0,
        max_wanted=2,
        budget=3,
        depth=1,
        reset=True,
    ),
    _DRAFTS._replace(
        name="ci-wishes-siblings",
        templates=(T((0, 0), 4, n=2, settled_only=True),),
        block_size=2,
        max_wanted=1,
        budget=4,
    ),
)

# Drafts with recurrent states: states are kept at the end of a row's own part, and accepted drafts
# are computed again.
_DRAFTS_STATES = _DRAFTS._replace(num_states=3, interval=2)
_WITH_DRAFTS_AND_STATES = (
    _DRAFTS_STATES._replace(
        name="ci-drafts-states",
        templates=(DRAFTING, T((0, 0), 2)),
        max_drafts=2,
        num_blocks=5,
        budget=4,
        fail=True,
    ),
    _DRAFTS_STATES._replace(
        name="ci-drafts-states-overlap",
        templates=(DRAFTING, T((0,), 2)),
        num_blocks=3,
        budget=3,
        depth=1,
        abort=False,
        reset=True,
        max_wanted=1,
    ),
    _DRAFTS_STATES._replace(
        name="ci-drafts-states-paced",
        templates=(DRAFTING._replace(max_tokens=4, needs_history=True), LONG),
        interval=1,
        max_drafts=2,
        num_blocks=5,
        budget=5,
        budgets=(2,),
        abort=False,
    ),
)

# Two contents behind one token, with equal placeholders: chunks and hits end inside them.
_WITH_ONE = T((0, 0, 0), 2, segments=(Segment(1), Segment(2, 1)))
_WITH_OTHER = _WITH_ONE._replace(segments=(Segment(1), Segment(2, 2)))
_WITH_SEGMENTS = (
    _TIGHT._replace(name="ci-segments", templates=(_WITH_ONE, _WITH_OTHER), depth=1, abort=False),
    # siblings for which a block is copied inside a segment; the same content twice in a prompt
    _SIBLINGS._replace(
        name="ci-segments-siblings",
        templates=(
            T((0, 0, 0, 0), 2, n=2, segments=(Segment(4, 1),)),
            T((0, 0, 0), 2, segments=(Segment(2, 1), Segment(1, 1))),
        ),
        pause=False,
        reset=True,
    ),
    _STATES._replace(
        name="ci-segments-states",
        templates=(_WITH_ONE, _WITH_OTHER),
        interval=1,
        abort=False,
        depth=1,
    ),
)

CI = (
    _TIGHT._replace(name="ci-sync", fail=True),
    _TIGHT._replace(name="ci-overlap", depth=1, templates=(LONG, SHORT), reset=True),
    _TIGHT._replace(name="ci-depth-2", depth=2, templates=(PAIR, SHORT)),
    _TIGHT._replace(
        name="ci-blocks-of-2", depth=1, block_size=2, num_blocks=3, budget=3, fail=True
    ),
    # a request that can never fit; equal prompts with different salts
    _TIGHT._replace(name="ci-door-and-salt", templates=(T((0, 0, 0), 3), T((0, 0), 2, salt=1))),
    _TIGHT._replace(name="ci-uncached", depth=1, templates=(LONG, SHORT), caching=False),
    # one request that computes its whole prompt, and one that needs its history
    _TIGHT._replace(
        name="ci-history",
        templates=(T((0, 0), 2, reads_cache=False), T((0, 0), 3, needs_history=True)),
        depth=1,
        abort=False,
        reset=True,
    ),
    # one settled-only request, and one that is not
    _TIGHT._replace(
        name="ci-settled-only",
        templates=(T((0, 0), 3, settled_only=True), T((0,), 3)),
        depth=1,
        abort=False,
    ),
    # siblings that share a block and copy the next one; siblings that only copy, without a cache
    _SIBLINGS._replace(name="ci-siblings", depth=1, pause=False, reset=True),
    _SIBLINGS._replace(
        name="ci-siblings-uncached",
        templates=(T((0, 1), 4, n=2), T((0, 0, 0), 2)),
        num_blocks=3,
        budget=3,
        depth=1,
        caching=False,
        abort=False,
        pause=False,
        fail=True,
    ),
    # three requests, so that an older one has a row while a victim drains for another
    _TIGHT._replace(
        name="ci-hold",
        templates=(T((0,), 4), T((0, 1), 3)),
        num_requests=3,
        num_blocks=3,
        block_size=2,
        budget=3,
        cap=3,
        depth=1,
        abort=False,
        pause=False,
    ),
    _TIGHT._replace(
        name="ci-shortest-first",
        templates=(T((0,), 2), PAIR),
        num_requests=3,
        num_blocks=3,
        policy="shortest_first",
        overtaking=2,
        cost_unit=2,
        pause=False,
    ),
    _TIGHT._replace(
        name="ci-priority",
        templates=(PAIR, PAIR._replace(priority=2)),
        num_requests=3,
        policy="priority",
        overtaking=1,
        depth=1,
        pause=False,
        abort=False,
    ),
    *_FAIR,
    _PACED._replace(name="ci-paced", templates=(LONG, SHORT)),
    _PACED._replace(name="ci-paced-overlap", depth=1, abort=False),
    *_WITH_STATES,
    *_WITH_DRAFTS,
    *_WITH_WISHES,
    *_WITH_DRAFTS_AND_STATES,
    *_WITH_SEGMENTS,
)

# Three requests: an older one, its victim, and one between or next to them.
_THREE = _TIGHT._replace(num_requests=3, num_blocks=5, cap=3, budget=3)
_LONGER = _THREE._replace(templates=(LONG, T((0, 1), 3)), num_blocks=4, block_size=2, depth=2)

FULL = (
    _THREE._replace(name="three-roomy", depth=2, num_blocks=6),
    _THREE._replace(name="three-depth-2", depth=2),
    _THREE._replace(name="three-overlap", depth=1),
    _OWNERS._replace(name="fair-pause", cap=1, pause=True),
    _LONGER._replace(name="three-blocks-of-2", pause=False),
    _SIBLINGS._replace(name="siblings", depth=2),
    _SIBLINGS._replace(name="siblings-sync", budget=3, cap=2, fail=True),
    _SIBLINGS._replace(
        name="three-siblings", templates=(T((0, 1), 3, n=3),), budget=3, depth=1, caching=False
    ),
    _DRAFTS._replace(
        name="drafts-history",
        templates=(DRAFTING._replace(max_tokens=4, needs_history=True),),
        num_blocks=3,
        block_size=2,
        budget=4,
        depth=1,
        abort=False,
        pause=True,
    ),
    _DRAFTS._replace(
        name="drafts-of-two",
        templates=(T((0, 0), 4), T((0, 1), 2, settled_only=True)),
        max_drafts=2,
        num_blocks=5,
        block_size=2,
        budget=5,
        pause=True,
    ),
)

SCOPES = {scope.name: scope for scope in (*CI, *FULL)}
GROUPS = {"ci": CI, "full": (*FULL, *CI)}
