"""What a state is. Everything here is an immutable value; nothing here decides anything."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

STOP = 2  # the token that ends a request with "stop"
EMPTY = 0  # a slot that nothing was written to since its block was last taken
NEVER = 1 << 62  # the first part of a rank that was not given yet
NO_SLOT = -1  # an entry of a state table whose slot was given up

# --------------------------------------------------------------------------- exact prefixes
# A prefix (salt, p0, p1, ...) is named by one integer, digit by digit: exact, not a hash. A token
# is one digit, never 0. A position of other content has five: its placeholder token, three of
# content hash and offset, and CONTENT. Read from the last digit on, a name has one meaning.
BASE = 8
CONTENT = 7  # no token has this digit
MAX_LENGTH = 64  # of a segment with content, so that hash and offset fit three digits


class Segment(NamedTuple):
    """``length`` consecutive positions of a prompt. Of a token segment ``content_hash`` is None:
    the tokens are themselves the content. A content segment (the embeddings of an image) has
    placeholder tokens; its hash (1 to 7, where prefixes are named) stands for one content."""

    length: int
    content_hash: int | None = None


Segments = tuple[Segment, ...]


class Piece(NamedTuple):
    """What a range of positions has of a content segment: ``length`` positions, from ``place`` in
    the range on, the first of which is position ``offset`` of the segment."""

    place: int
    length: int
    content_hash: int
    offset: int


def pieces(segments: Segments, begin: int, end: int) -> tuple[Piece, ...]:
    """The content in positions [begin, end) of a prompt, in order."""
    found, at = [], 0
    for length, content_hash in segments:
        first, last = max(begin, at), min(end, at + length)
        if content_hash is not None and first < last:
            found.append(Piece(first - begin, last - first, content_hash, first - at))
        at += length
    return tuple(found)


def is_inside(segments: Segments, position: int) -> bool:
    """Whether a content segment begins before ``position`` and goes on there."""
    return position > 0 and any(piece.offset for piece in pieces(segments, position, position + 1))


@cache
def contents_by_position(segments: Segments) -> dict[int, tuple[int, int]]:
    """(content hash, offset) of each position that is no token's."""
    return {
        place + i: (content_hash, i)
        for place, length, content_hash, _ in pieces(segments, 0, sum(s.length for s in segments))
        for i in range(length)
    }


def root(salt: int) -> int:
    return salt + 1


def extend(prefix: int, token: int, content: tuple[int, int] | None = None) -> int:
    """The name of a prefix with one position more."""
    prefix = prefix * BASE + token + 1
    if content is None:
        return prefix
    content_hash, offset = content
    return (prefix * BASE**3 + content_hash * MAX_LENGTH + offset) * BASE + CONTENT


def without_last(prefix: int) -> int:
    """The name of a prefix with one position less."""
    return prefix // (BASE**5 if prefix % BASE == CONTENT else BASE)


@cache
def prefixes(salt: int, tokens: tuple[int, ...], segments: Segments) -> tuple[int, ...]:
    """Entry p names the prefix of p + 1 positions: what the KV of position p stands for."""
    names, prefix, contents = [], root(salt), contents_by_position(segments)
    for position, token in enumerate(tokens):
        prefix = extend(prefix, token, contents.get(position))
        names.append(prefix)
    return tuple(names)


Position = tuple[int, int | None, int]
"""(token, content hash or None, offset in the segment)"""


@cache
def read_prefix(prefix: int) -> tuple[int, tuple[Position, ...]]:
    """The salt and the positions that a name stands for."""
    positions: list[Position] = []
    while prefix >= BASE:
        if prefix % BASE == CONTENT:
            content_hash, offset = divmod(prefix // BASE % BASE**3, MAX_LENGTH)
            positions.append((prefix // BASE**4 % BASE - 1, content_hash, offset))
        else:
            positions.append((prefix % BASE - 1, None, 0))
        prefix = without_last(prefix)
    return prefix - 1, tuple(reversed(positions))


def spell(prefix: int) -> str:
    """A prefix in words, for traces: '0|01<3+0>' is salt 0, token 0, placeholder 1 at offset 0 of
    content 3."""
    if prefix == EMPTY:
        return "-"
    salt, positions = read_prefix(prefix)
    texts = [
        str(token) if content_hash is None else f"{token}<{content_hash}+{offset}>"
        for token, content_hash, offset in positions
    ]
    return f"{salt}|{''.join(texts)}"


# --------------------------------------------------------------------------- the world
class Template(NamedTuple):
    """A request the environment may send. ``reads_cache``: takes prefix hits; all publish.
    ``needs_history``: the runner has to know all its tokens, as penalties and grammars do.
    ``settled_only``: its rows compute settled tokens only, as the mask of a grammar needs them.
    ``n``: so many continuations, each a request: a leader and n - 1 siblings.
    ``owner``: on whose share it is served under the policy "fair".
    ``segments``: of the prompt, whose tokens are placeholders where a segment has other content;
    empty: one segment of tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    salt: int = 0
    priority: int = 0
    reads_cache: bool = True
    needs_history: bool = False
    settled_only: bool = False
    n: int = 1
    owner: int = 0
    segments: Segments = ()


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

    ``rank`` orders requests, smaller is older, and never changes once it is given: at arrival, or
    under "fair" with the request's turn, before which it is ``(NEVER, number)``. ``charge`` is what
    its owner was charged, in ticks, and ``turn`` the clock at its turn (-1: none yet). ``limit`` is
    the length at which it ends. ``published`` counts leading blocks that are hits or were offered
    to the index.
    ``leader`` is -1 of a request that is no sibling. ``states`` is the state table: a slot, or
    NO_SLOT, for each interval that it has begun. ``segments`` are those of the prompt.
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
    segments: Segments = ()

    @property
    def in_flight(self) -> int:
        return self.dispatched - self.computed


def names(request: Request, ids: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The prefixes of a request's positions. ``ids``: its tokens, if other than the settled."""
    return prefixes(request.salt, request.tokens if ids is None else ids, request.segments)


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
    lru: tuple[int, ...]  # checkpoints that no request holds, oldest first
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
    "closed",  # an older request is short of blocks: younger ones may not allocate
    "preempting",  # a request was preempted in this step: none is admitted
    "full",  # the running ones are max_num_seqs
    "draining",  # resumed, while steps in flight still write its blocks
    "state slots",  # there is none for it, until steps in flight give some back
    "behind",  # an older waiting request was refused
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
    preempted_for: tuple[int, ...] = ()  # for whom, parallel to preempted
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
