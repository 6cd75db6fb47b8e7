"""What a state is. Everything here is an immutable value; nothing here decides anything."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

STOP = 2  # the token that ends a request with "stop"
EMPTY = 0  # a slot that nothing was written to since its block was last taken
NEVER = 1 << 62  # the first part of a rank that was not given yet
NO_SLOT = -1  # an entry of a state table whose slot was given up

# --------------------------------------------------------------------------- exact prefixes
# A prefix (salt, t0, t1, ...) is named by one integer, digit by digit: exact, not a hash. The
# digits are never 0, so two prefixes have the same name only if they are the same prefix.
BASE = 8


def root(salt: int) -> int:
    return salt + 1


def extend(prefix: int, token: int) -> int:
    return prefix * BASE + token + 1


@cache
def prefixes(salt: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Entry p names the prefix of p + 1 tokens: what the KV of position p stands for."""
    names, prefix = [], root(salt)
    for token in tokens:
        prefix = extend(prefix, token)
        names.append(prefix)
    return tuple(names)


def spell(prefix: int) -> str:
    """A prefix in words, for traces: '0|011' is salt 0, tokens 0 1 1."""
    digits = []
    while prefix:
        prefix, digit = divmod(prefix, BASE)
        digits.append(str(digit - 1))
    return "".join([*digits[-1:], "|", *reversed(digits[:-1])]) if digits else "-"


# --------------------------------------------------------------------------- the world
class Template(NamedTuple):
    """A request the environment may send. ``reads_cache``: takes prefix hits; all publish.
    ``needs_history``: the runner has to know all its tokens, as penalties and grammars do.
    ``settled_only``: its rows compute settled tokens only, as the mask of a grammar needs them.
    ``n``: so many continuations, each a request: a leader and n - 1 siblings.
    ``owner``: on whose share it is served under the policy "fair"."""

    prompt: tuple[int, ...]
    max_tokens: int
    salt: int = 0
    priority: int = 0
    reads_cache: bool = True
    needs_history: bool = False
    settled_only: bool = False
    n: int = 1
    owner: int = 0


class Scope(NamedTuple):
    """One finite world to explore."""

    name: str
    templates: tuple[Template, ...]
    num_requests: int = 2
    num_blocks: int = 3
    block_size: int = 1
    budget: int = 4  # max_num_batched_tokens
    budgets: tuple[int, ...] = ()  # smaller ones that the engine may choose for a step
    cap: int = 2  # max_num_seqs
    max_model_len: int = 8
    depth: int = 0  # steps that may be unsettled when the next one is scheduled
    outputs: tuple[int, ...] = (0, STOP)
    policy: str = "fcfs"
    overtaking: int = 0  # K: the policy's bound on overtaking
    ageing: int = 1  # arrivals that one level of priority is worth
    cost_unit: int = 1  # tokens that one arrival is worth under shortest_first
    credit: int = 0  # ticks that a turn may start before the clock, under fair
    ticks: int = 1  # ticks of a token
    reply: int = 1  # tokens of an answer that a turn is charged for at most
    caching: bool = True
    abort: bool = True
    pause: bool = True
    fail: bool = False  # engine operations may fail or be interrupted
    reset: bool = False  # the user may reset the prefix cache
    max_drafts: int = 0  # draft tokens that a row may carry at most
    num_states: int = 0  # state slots; 0: the model has no recurrent layers
    interval: int = 0  # tokens of an entry of a state table, a multiple of block_size
    defects: frozenset[str] = frozenset()

    def limit(self, template: Template) -> int:
        return min(len(template.prompt) + template.max_tokens, self.max_model_len)


class Request(NamedTuple):
    """``computed <= dispatched <= total``: settled; settled or in flight; known or being sampled.

    ``rank`` orders requests, smaller is elder, and never changes once it is given: at arrival, or
    under "fair" with the request's turn, before which it is ``(NEVER, number)``. ``charge`` is what
    its owner was charged, in ticks, and ``turn`` the clock at its turn (-1: none yet). ``limit`` is
    the length at which it ends. ``published`` counts leading blocks that are hits or were offered
    to the index.
    ``leader`` is -1 of a request that is no sibling. ``states`` is the state table: a slot, or
    NO_SLOT, for each interval that it has begun.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    limit: int
    salt: int
    rank: tuple[int, int]
    reason: str = ""
    computed: int = 0
    dispatched: int = 0
    total: int = 0
    table: tuple[int, ...] = ()
    published: int = 0
    reads_cache: bool = True
    needs_history: bool = False
    settled_only: bool = False
    leader: int = -1
    states: tuple[int, ...] = ()
    owner: int = 0
    charge: int = 0
    turn: int = -1

    @property
    def in_flight(self) -> int:
        return self.dispatched - self.computed


class Row(NamedTuple):
    """One request in a dispatched step: its own positions [start, start + n), and one more for each
    of its ``drafts``.

    ``samples`` are the tokens that will be sampled: none, or one behind the row's own positions and
    one behind each draft. Nature has chosen them; no rule may read them before the settle (S31
    checks that the plan does not). ``blocks`` and ``states`` are the tables the step was given,
    ``stale`` tells that the request was finished or preempted meanwhile: memory for S28, S29 and
    S47, not for deciding.
    """

    request: int
    start: int
    n: int
    samples: tuple[int, ...]
    blocks: tuple[int, ...]
    stale: bool = False
    states: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Behind the last position that the row writes."""
        return self.start + self.n + len(self.drafts)


class Slots(NamedTuple):
    """The state slots, all by slot. A slot holds the state after some tokens, named by their
    prefix, or EMPTY."""

    refs: tuple[int, ...]  # requests whose state table has it
    keys: tuple[int | None, ...]  # of the checkpoints
    index: tuple[tuple[int, int], ...]  # (key, slot), sorted
    free: tuple[int, ...]  # a stack, top last
    lru: tuple[int, ...]  # checkpoints that nobody holds, oldest first
    contents: tuple[int, ...]


class State(NamedTuple):
    """Requests are named by their number of arrival, blocks by their index."""

    requests: tuple[Request, ...]
    waiting: tuple[int, ...]  # in rank order
    running: tuple[int, ...]  # in rank order
    paused: tuple[int, ...]  # in order of arrival
    flight: tuple[tuple[Row, ...], ...]  # dispatched, unsettled steps, oldest first
    refs: tuple[int, ...]
    keys: tuple[int | None, ...]  # by block
    index: tuple[tuple[int, int], ...]  # (key, block), sorted
    free: tuple[int, ...]  # a stack, top last
    lru: tuple[int, ...]  # unowned and published, oldest first
    contents: tuple[tuple[int, ...], ...]  # by block and slot: the prefix written there, or EMPTY
    view: tuple[tuple[int, tuple[int, ...]], ...]  # the runner's block tables, from plans alone
    left: tuple[int, ...]  # no longer running, which the next plan has to tell the runner
    # What the runner makes of the plans: all tokens of the rows that need their history.
    histories: tuple[tuple[int, tuple[int, ...]], ...]
    pending: tuple[int, ...]  # siblings whose leader has still to compute the prompt
    slots: Slots
    state_view: tuple[tuple[int, tuple[int, ...]], ...]  # the runner's state tables, as ``view``
    queued: tuple[int, ...]  # without a turn yet, in order of arrival; under "fair" alone
    clock: int  # virtual time, in ticks
    shares: tuple[tuple[int, tuple[int, int]], ...]  # (owner, (its account, its latest start))


# --------------------------------------------------------------------------- plans and labels
# Why a request has no row in a plan. The first six of running requests; all but "ending",
# "unsettled" and "held" of waiting ones. Of several the first in the order of the walk is named.
REFUSALS = (
    "ending",  # its last token is being sampled: nothing is left to compute
    "unsettled",  # its next token is being sampled, and has to be settled before it is computed
    "held",  # a victim: it drains, so that its blocks can be taken
    "budget",  # the tokens of the step are used, or kept for decodes
    "blocks",  # it wants blocks, and there are none even with those of the younger: it closes
    "closed",  # an elder wanted more blocks than it got: nobody younger takes any
    "preempting",  # somebody was preempted in this step: nobody new is admitted
    "full",  # the running ones are max_num_seqs
    "draining",  # resumed, while steps in flight still write its blocks
    "state slots",  # there is none for it, until steps in flight give some back
    "behind",  # an elder waiting one was refused
)


Drafts = tuple[tuple[int, tuple[int, ...]], ...]
"""(request, draft tokens)"""


class PlanRow(NamedTuple):
    """Own positions [start, start + n) of a request, then its draft tokens. It samples
    ``num_samples`` tokens: none, or one behind its own positions and one behind each draft."""

    request: int
    start: int
    n: int
    num_samples: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Behind the last position that the row computes."""
        return self.start + self.n + len(self.drafts)


class Plan(NamedTuple):
    """What one schedule decided. ``rows``, ``preempted``, ``tables``, ``added``, ``released``,
    ``prefixes``, ``copies``, ``state_tables`` and ``added_states`` leave the scheduler and are all
    that a runner ever learns; the rest is the account of why, which the properties examine."""

    rows: tuple[PlanRow, ...]
    preempted: tuple[int, ...] = ()
    askers: tuple[int, ...] = ()  # for whom, parallel to preempted
    admitted: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (request, its hit blocks)
    held: tuple[int, ...] = ()  # victims that must drain first, not scheduled
    closed_by: int | None = None  # the first request that wanted more blocks than it could get
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (admitted request, its whole table)
    added: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (other row, blocks its table grew by)
    released: tuple[int, ...] = ()  # no longer running: their tables may be forgotten
    # (admitted request that needs its history, its tokens before the row)
    prefixes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # (source, destination) block: copied before the step reads or writes anything
    copies: tuple[tuple[int, int], ...] = ()
    forked: tuple[tuple[int, int], ...] = ()  # (admitted sibling, whose blocks it shares)
    # (running or waiting request without a row, one of REFUSALS); the preempted are not among them
    refused: tuple[tuple[int, str], ...] = ()
    state_tables: tuple[tuple[int, tuple[int, ...]], ...] = ()  # as ``tables``
    added_states: tuple[tuple[int, tuple[int, ...]], ...] = ()  # as ``added``
    budget: int = 0  # tokens that it might have computed
    displaced: tuple[int, ...] = ()  # those of the preempted whose places were taken


class Add(NamedTuple):
    request: int
    template: Template


class Schedule(NamedTuple):
    """Plan and dispatch a step. ``tokens``: its samples, row after row. ``budget``: tokens that it
    may compute; 0: as many as the scope says. ``offer``: draft tokens for some requests, of which
    the plan carries as many as have room."""

    tokens: tuple[int, ...]
    budget: int = 0
    offer: Drafts = ()


class Settle(NamedTuple):
    """Settle the oldest step. ``tokens``: its samples, row after row."""

    tokens: tuple[int, ...]


class Abort(NamedTuple):
    request: int


class Pause(NamedTuple):
    request: int


class Resume(NamedTuple):
    request: int


class ResetCache(NamedTuple):
    """The user has changed the weights, or is about to: nothing computed before is to be read."""


class Fail(NamedTuple):
    """An engine operation raised, or was interrupted, at any point of it."""


Label = Add | Schedule | Settle | Abort | Pause | Resume | ResetCache | Fail
