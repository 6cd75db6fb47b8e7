"""The state of the specification, as immutable values. This module contains no rules."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

STOP = 2  # the token that ends a request with "stop"
EMPTY = 0  # a slot that was not written since its block was last allocated
NEVER = 1 << 62  # first component of a rank that is not assigned yet
NO_SLOT = -1  # an entry of a state table whose slot was released

# --------------------------------------------------------------------------- exact prefixes
# A prefix (salt, p0, p1, ...) is encoded as one integer in base 8: exact, not a hash. A token is
# one nonzero digit. A position with other content has five digits: its placeholder token, three
# for content hash and offset, and CONTENT. Decoding from the last digit on is unambiguous.
BASE = 8
CONTENT = 7  # not used as a token
MAX_LENGTH = 64  # of a content segment, so that hash and offset fit into three digits


class Segment(NamedTuple):
    """``length`` consecutive positions of a prompt. ``content_hash`` is None for a token segment,
    whose tokens are the content. A content segment (such as the embeddings of an image) has
    placeholder tokens; its hash (1 to 7 in encoded prefixes) identifies its content."""

    length: int
    content_hash: int | None = None


Segments = tuple[Segment, ...]


class Piece(NamedTuple):
    """The part of a content segment within a range of positions: ``length`` positions, from index
    ``place`` of the range on; the first of them is position ``offset`` of the segment."""

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
    """Whether a content segment begins before ``position`` and continues there."""
    return position > 0 and any(piece.offset for piece in pieces(segments, position, position + 1))


@cache
def contents_by_position(segments: Segments) -> dict[int, tuple[int, int]]:
    """(content hash, offset) of each position of a content segment."""
    return {
        place + i: (content_hash, i)
        for place, length, content_hash, _ in pieces(segments, 0, sum(s.length for s in segments))
        for i in range(length)
    }


def root(salt: int) -> int:
    return salt + 1


def extend(prefix: int, token: int, content: tuple[int, int] | None = None) -> int:
    """The encoding of a prefix that is one position longer."""
    prefix = prefix * BASE + token + 1
    if content is None:
        return prefix
    content_hash, offset = content
    return (prefix * BASE**3 + content_hash * MAX_LENGTH + offset) * BASE + CONTENT


def without_last(prefix: int) -> int:
    """The encoding of a prefix that is one position shorter."""
    return prefix // (BASE**5 if prefix % BASE == CONTENT else BASE)


@cache
def prefixes(salt: int, tokens: tuple[int, ...], segments: Segments) -> tuple[int, ...]:
    """Entry p encodes the prefix of p + 1 positions, which determines the KV of position p."""
    names, prefix, contents = [], root(salt), contents_by_position(segments)
    for position, token in enumerate(tokens):
        prefix = extend(prefix, token, contents.get(position))
        names.append(prefix)
    return tuple(names)


Position = tuple[int, int | None, int]
"""(token, content hash or None, offset in the segment)"""


@cache
def read_prefix(prefix: int) -> tuple[int, tuple[Position, ...]]:
    """Decode a prefix to its salt and positions."""
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
    """A prefix as text, for traces: '0|01<3+0>' is salt 0, token 0, placeholder 1 at offset 0 of
    content 3."""
    if prefix == EMPTY:
        return "-"
    salt, positions = read_prefix(prefix)
    texts = [
        str(token) if content_hash is None else f"{token}<{content_hash}+{offset}>"
        for token, content_hash, offset in positions
    ]
    return f"{salt}|{''.join(texts)}"


# --------------------------------------------------------------------------- configuration
class Template(NamedTuple):
    """A request that the environment may send.

    ``reads_cache``: takes prefix hits; every request publishes its blocks.
    ``needs_history``: the runner needs all its tokens, as penalties and grammars do.
    ``settled_only``: its rows compute settled tokens only, as grammar masks require.
    ``n``: number of continuations, each a request: a leader and n - 1 siblings.
    ``owner``: whose share is charged under the policy "fair".
    ``segments``: segments of the prompt, whose tokens are placeholders in segments with other
    content; empty: one token segment."""

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
    """One finite configuration to explore."""

    name: str
    templates: tuple[Template, ...]
    num_requests: int = 2
    num_blocks: int = 3
    block_size: int = 1
    budget: int = 4  # max_num_batched_tokens
    budgets: tuple[int, ...] = ()  # smaller budgets that the engine may choose for a step
    cap: int = 2  # max_num_seqs
    max_model_len: int = 8
    depth: int = 0  # number of unsettled steps allowed when the next one is scheduled
    outputs: tuple[int, ...] = (0, STOP)
    policy: str = "fcfs"
    overtaking: int = 0  # K: the policy's bound on overtaking
    ageing: int = 1  # arrivals per level of priority
    cost_unit: int = 1  # tokens per arrival, under shortest_first
    credit: int = 0  # ticks that a turn may start before the clock, under fair
    ticks: int = 1  # ticks per token
    reply: int = 1  # maximum number of answer tokens that a turn is charged for
    caching: bool = True
    abort: bool = True
    pause: bool = True
    fail: bool = False  # engine operations may fail or be interrupted
    reset: bool = False  # the user may reset the prefix cache
    max_drafts: int = 0  # maximum number of draft tokens per row
    max_wanted: int = 0  # maximum number of tokens that the runner drafts behind a row
    max_samples: int = 0  # maximum number of samples of a step with draft tokens; 0: no limit
    num_states: int = 0  # state slots; 0: the model has no recurrent layers
    interval: int = 0  # tokens per entry of a state table, a multiple of block_size
    defects: frozenset[str] = frozenset()

    def limit(self, template: Template) -> int:
        return min(len(template.prompt) + template.max_tokens, self.max_model_len)


class Request(NamedTuple):
    """``computed <= dispatched <= total``: settled; settled or in flight; known or being sampled.

    ``rank`` orders requests; smaller is older. It is assigned once: at arrival or, under "fair",
    at the request's turn, before which it is ``(NEVER, number)``. ``charge`` is the charge to
    its owner, in ticks; ``turn`` is the clock at its turn (-1: none yet). ``limit`` is the length
    at which it ends. ``published`` counts leading blocks that are hits or were offered to the
    index. ``leader`` is -1 for a request that is not a sibling. ``states`` is the state table: a
    slot, or NO_SLOT, for each interval begun. ``segments`` are those of the prompt.
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
    """The prefixes of a request's positions. ``ids``: its tokens, if not the settled ones."""
    return prefixes(request.salt, request.tokens if ids is None else ids, request.segments)


class Row(NamedTuple):
    """One request in a dispatched step: its own positions [start, start + n), plus one position per
    draft token in ``drafts``. Behind the accepted samples, the runner drafts ``wanted`` tokens.

    ``samples`` are the tokens that will be sampled: none, or one after the row's own positions and
    one after each draft. The environment has chosen them; no rule may read them before they settle
    (S31 checks this for plans). ``blocks`` and ``states`` are the tables at dispatch. ``stale``
    means that the request was finished or preempted since. These fields are history for S28, S29
    and S47; no rule reads them to decide.
    """

    request: int
    start: int
    n: int
    samples: tuple[int, ...]
    blocks: tuple[int, ...]
    stale: bool = False
    states: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    wanted: int = 0

    @property
    def end(self) -> int:
        """End of the positions that the row writes."""
        return self.start + self.n + len(self.drafts)

    @property
    def last_end(self) -> int:
        """End of the positions that the row or its drafting writes."""
        return self.end + self.wanted


class Slots(NamedTuple):
    """The state slots; all fields are by slot. A slot holds the state after some tokens, identified
    by their prefix, or EMPTY."""

    refs: tuple[int, ...]  # number of requests whose state table contains it
    keys: tuple[int | None, ...]  # keys of published checkpoints
    index: tuple[tuple[int, int], ...]  # (key, slot), sorted
    free: tuple[int, ...]  # a stack, top last
    lru: tuple[int, ...]  # checkpoints that no request references, oldest first
    contents: tuple[int, ...]


class State(NamedTuple):
    """Requests are identified by their arrival number, blocks by their index."""

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
    left: tuple[int, ...]  # left the running set; the next plan releases them
    # All tokens of requests that need their history, as the runner derives them from plans.
    histories: tuple[tuple[int, tuple[int, ...]], ...]
    pending: tuple[int, ...]  # siblings whose leader has not computed the prompt yet
    slots: Slots
    state_view: tuple[tuple[int, tuple[int, ...]], ...]  # the runner's state tables, like ``view``
    queued: tuple[int, ...]  # without a turn yet, in order of arrival; only under "fair"
    clock: int  # virtual time, in ticks
    shares: tuple[tuple[int, tuple[int, int]], ...]  # (owner, (account, start of its latest turn))


# --------------------------------------------------------------------------- plans and labels
# Why a request has no row in a plan. The first six apply to running requests; all but "ending",
# "unsettled" and "held" to waiting ones. If several apply, the first in the walk's order is given.
REFUSALS = (
    "ending",  # its last token is being sampled: nothing is left to compute
    "unsettled",  # its next token is being sampled, and must settle before it is computed
    "held",  # a victim: it drains, so that its blocks can be released
    "budget",  # the step's tokens are used up, or reserved for decodes
    "blocks",  # too few blocks, even with those of younger requests: closes allocation
    "closed",  # an older request is short of blocks: younger ones may not allocate
    "preempting",  # a request was preempted in this step: none is admitted
    "full",  # max_num_seqs requests are running
    "draining",  # resumed while steps in flight still write its blocks
    "state slots",  # no slot is available until steps in flight release some
    "behind",  # an older waiting request was refused
)


Drafts = tuple[tuple[int, tuple[int, ...]], ...]
"""(request, draft tokens)"""
Wishes = tuple[tuple[int, int], ...]
"""(request, number of tokens that the runner drafts behind its row, at least 1)"""


class PlanRow(NamedTuple):
    """Own positions [start, start + n) of a request, then its draft tokens. It samples
    ``num_samples`` tokens: none, or one after its own positions and one after each draft. Behind
    the accepted samples, the runner drafts ``wanted`` tokens with a second model."""

    request: int
    start: int
    n: int
    num_samples: int
    drafts: tuple[int, ...] = ()
    wanted: int = 0

    @property
    def end(self) -> int:
        """End of the positions that the row computes."""
        return self.start + self.n + len(self.drafts)

    @property
    def last_end(self) -> int:
        """End of the positions that the row or its drafting writes. The first drafted position is
        that of the last accepted sample: ``start + n`` if no draft is accepted, ``end`` if all are.
        """
        return self.end + self.wanted


class Plan(NamedTuple):
    """The decision of one schedule. ``rows``, ``preempted``, ``tables``, ``added``, ``released``,
    ``prefixes``, ``copies``, ``state_tables`` and ``added_states`` leave the scheduler; a runner
    has no other input. The other fields record the reasons, which the properties examine."""

    rows: tuple[PlanRow, ...]
    preempted: tuple[int, ...] = ()
    preempted_for: tuple[int, ...] = ()  # the request that gained, parallel to preempted
    admitted: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (request, its hit blocks)
    held: tuple[int, ...] = ()  # victims that must drain first, not scheduled
    closed_by: int | None = None  # the first request that got fewer blocks than it needs
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (admitted request, its whole table)
    added: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (other row, blocks added to its table)
    released: tuple[int, ...] = ()  # no longer running: the runner may drop their tables
    # (admitted request that needs its history, its tokens before the row)
    prefixes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # (source, destination) block: copied before the step reads or writes anything
    copies: tuple[tuple[int, int], ...] = ()
    forked: tuple[tuple[int, int], ...] = ()  # (admitted sibling, whose blocks it shares)
    # (running or waiting request without a row, one of REFUSALS), without preempted requests
    refused: tuple[tuple[int, str], ...] = ()
    state_tables: tuple[tuple[int, tuple[int, ...]], ...] = ()  # like ``tables``
    added_states: tuple[tuple[int, tuple[int, ...]], ...] = ()  # like ``added``
    budget: int = 0  # the step's token budget
    displaced: tuple[int, ...] = ()  # preempted requests whose places were taken


class Add(NamedTuple):
    request: int
    template: Template


class Schedule(NamedTuple):
    """Plan and dispatch a step. ``tokens``: its samples, in row order. ``budget``: token budget of
    the step; 0: the scope's. ``offer``: draft tokens for some requests; the plan carries as many as
    fit. ``wishes``: numbers of tokens to draft behind rows; the plan has as many as fit."""

    tokens: tuple[int, ...]
    budget: int = 0
    offer: Drafts = ()
    wishes: Wishes = ()


class Settle(NamedTuple):
    """Settle the oldest step. ``tokens``: its samples, in row order."""

    tokens: tuple[int, ...]


class Abort(NamedTuple):
    request: int


class Pause(NamedTuple):
    request: int


class Resume(NamedTuple):
    request: int


class ResetCache(NamedTuple):
    """The user resets the cache, for new weights: KV computed before must not be read again."""


class Fail(NamedTuple):
    """An engine operation raised or was interrupted, at any point."""


Label = Add | Schedule | Settle | Abort | Pause | Resume | ResetCache | Fail
