"""A runner without a model. Its output tokens depend on everything that its KV cache holds.

The "KV" of a slot is a hash of the token written there and of the previous slot's KV, which is read
through the block table. For a content segment, the hash covers the content and the position in it.
The next token is a hash of all KV entries that the row reads. So an aliased block, a stale cache
hit, an unwritten slot or a wrong position changes the output tokens. The runner builds block
tables, tokens and histories from the plans alone; as a real runner, it has no access to live
requests. If a request needs its history, its next token depends on the history as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.segments import Segment
from tests.support.tables import HistoriesFromPlans, StateTablesFromPlans, TablesFromPlans

_MODULUS = (1 << 61) - 1
_POISON = -1
_MAX_SAMPLED = 1024  # tokens of earlier steps that are kept: more than any steps in flight sample

TOKEN_STRIDE = 256
"""Token ids are multiples of this: a key that saw only their low byte would take all for equal."""


def kv_of(token: int, previous_kv: int, position: int) -> int:
    return (previous_kv * 1_000_003 + token * 7_919 + position * 104_729 + 12_345) % _MODULUS


@cache
def embeddings(segments: tuple[Segment, ...]) -> dict[int, int]:
    """The values in place of a token at each position of a content segment."""
    found, position = {}, 0
    for length, content_hash, _ in segments:
        for offset in range(length):
            if content_hash is not None:
                number = int.from_bytes(content_hash, "little")
                found[position] = (number * 611_953 + offset * 15_485_863 + 1_299_709) % _MODULUS
            position += 1
    return found


def token_after(kvs: Sequence[int], seed: int, vocab_size: int, history: Sequence[int] = ()) -> int:
    mixed = seed
    for value in (*kvs, *history):
        mixed = (mixed * 31 + value) % _MODULUS
    return (mixed >> 7) % vocab_size * TOKEN_STRIDE


def stream_alone(
    prompt: list[int],
    max_num_tokens: int,
    *,
    seed: int,
    vocab_size: int,
    stop_token_ids: frozenset[int] = frozenset(),
    salt: int = 0,
    needs_history: bool = False,
    segments: tuple[Segment, ...] = (),
) -> list[int]:
    """The outputs of a request that runs alone, computed without blocks or a schedule."""
    in_place = embeddings(segments)
    tokens: list[int] = list(prompt)
    kvs: list[int] = []
    while len(tokens) < max_num_tokens:
        for position in range(len(kvs), len(tokens)):
            read = in_place.get(position, tokens[position])
            kvs.append(kv_of(read, kvs[-1] if kvs else salt, position))
        history = tokens if needs_history else ()
        tokens.append(token_after(kvs, seed, vocab_size, history))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class _Step:
    tokens: list[int]
    num_unread: int
    drafts: dict[str, list[int]]


class ContentRunner:
    """Implements ``pagespec.engine.runner.Runner``, with draft tokens. Only ``collect``, or later
    steps on the "device", can read the tokens of step N; the host never sees them earlier."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        pipeline_depth: int = 0,
        num_state_slots: int = 0,
        state_interval: int = 0,
        max_draft_tokens: int = 0,
    ) -> None:
        self.pipeline_depth = pipeline_depth
        self.max_draft_tokens = max_draft_tokens
        self.max_num_samples: int | None = None
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kv = [_POISON] * (num_blocks * block_size)
        self.states = [_POISON] * num_state_slots
        self.state_interval = state_interval
        self.num_steps = 0
        self.fail_at_step: int | None = None
        self._tables = TablesFromPlans()
        self._state_tables = StateTablesFromPlans()
        self._histories = HistoriesFromPlans()
        self._sampled: list[int] = []  # by the steps before, newest first
        self._num_uncollected = 0

    def reset(self) -> None:
        """Makes all cache contents unreadable, since the pool must not reuse any of them."""
        self.change_weights()
        self._tables.clear()
        self._state_tables.clear()
        self._histories.clear()
        self._sampled.clear()
        self._num_uncollected = 0

    def change_weights(self) -> None:
        """KV entries of the old weights become invalid under the new ones, which sample the same
        tokens."""
        self.kv = [_POISON] * len(self.kv)
        self.states = [_POISON] * len(self.states)

    def dispatch(self, plan: StepPlan) -> _Step:
        assert self._num_uncollected <= self.pipeline_depth, "steps were forgotten without a reset"
        if self.fail_at_step is not None and self.num_steps >= self.fail_at_step:
            self.fail_at_step = None
            raise RuntimeError("out of memory, says the fake")
        self.num_steps += 1
        writes: list[tuple[int, int]] = []
        state_writes: list[tuple[int, int]] = []
        sampled: list[int] = []
        self._tables.take(plan)
        self._state_tables.take(plan)
        known_ids = [t if t >= 0 else self._sampled[-1 - t] for t in plan.token_ids]
        self._histories.take(plan, known_ids)
        token_ids = iter(known_ids)
        self._copy_blocks(plan.copies)
        for request, start, num_tokens, num_samples in plan.rows():
            table = self._tables[request.request_id]
            slots = [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start + num_tokens)
            ]
            kvs = [self.kv[slot] for slot in slots[:start]]
            in_place = embeddings(request.segments)
            for position in range(start, start + num_tokens):
                token = in_place.get(position, next(token_ids))
                salt = int.from_bytes(request.cache_salt, "little")
                kvs.append(kv_of(token, kvs[-1] if kvs else salt, position))
                writes.append((slots[position], kvs[-1]))
            if self.states:
                # The states behind draft tokens are not kept.
                own = kvs[: len(kvs) - max(0, num_samples - 1)]
                state_writes += self._next_states(request.request_id, start, own)
            assert num_samples <= 1 + self.max_draft_tokens, "more samples than are wanted"
            history = self._histories[request.request_id] if request.needs_history else ()
            for end in range(len(kvs) - num_samples + 1, len(kvs) + 1):
                known = kvs[:end], request.seed, self.vocab_size, history[:end]
                sampled.append(token_after(*known))
        drafts = self._draft(plan, writes)
        assert next(token_ids, None) is None, "more token ids than positions"
        assert len({slot for slot, _ in writes}) == len(writes), "S15: two writes to one slot"
        for slot, kv in writes:
            self.kv[slot] = kv
        assert len({slot for slot, _ in state_writes}) == len(state_writes), "S48: two writes"
        for slot, state in state_writes:
            self.states[slot] = state
        self._sampled = (sampled + self._sampled)[:_MAX_SAMPLED]
        self._num_uncollected += 1
        return _Step(sampled, 1, drafts)

    def _draft(self, plan: StepPlan, writes: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """Tokens drafted behind rows. A second model writes their positions, which must have slots
        that no row of the step writes for another request."""
        drafts = {}
        written = {slot // self.block_size for slot, _ in writes}
        for row, wanted in plan.wanted_drafts.items():
            name = plan.requests[row].request_id
            begin = plan.starts[row] + plan.num_tokens[row]
            last = (begin + wanted - 1) // self.block_size
            table = self._tables[name]
            assert last < len(table), f"S64: {name} drafts {wanted} tokens without slots"
            behind = set(table[-(-begin // self.block_size) : last + 1])
            assert not behind & written, f"S64: {name} drafts in blocks of other rows"
            drafts[name] = [(begin + i) % self.vocab_size for i in range(wanted)]
        return drafts

    def _next_states(
        self, request_id: str, start: int, kvs: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Write the states of a row from ``start`` on to its state slots. The state after a
        position is that position's KV, which is chained over all earlier ones. The state that is
        read must be that of ``start - 1``, and so of exactly this prefix."""
        table, interval = self._state_tables[request_id], self.state_interval
        assert len(table) == -(-len(kvs) // interval), f"S44: {table} for {len(kvs)} tokens"
        if start:
            slot = table[(start - 1) // interval]
            assert slot >= 0, f"S44: {request_id} has no state to begin from"
            state = self.states[slot]
            assert state == kvs[start - 1], f"S45: {request_id} reads another's state at {start}"
        ends = {min((i + 1) * interval, len(kvs)): i for i in range(start // interval, len(table))}
        written = {table[i]: kvs[end - 1] for end, i in ends.items()}  # in place the last one stays
        assert -1 not in written, f"S44: {request_id} has no slot to write"
        return list(written.items())

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy all blocks at once, as one launch may: no copy reads what another copy wrote."""
        size, old = self.block_size, list(self.kv) if copies else self.kv
        for source, copy in copies:
            self.kv[copy * size : (copy + 1) * size] = old[source * size : (source + 1) * size]

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, _Step)
        assert handle.num_unread == 1, "collected twice"
        handle.num_unread = 0
        self._num_uncollected -= 1
        return StepResult(handle.tokens, drafts=handle.drafts)
