"""Inputs of the recurrent ops, and steps that run sequences in chunks over one state tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pagespec.kernels.recurrent import ops
from pagespec.kernels.recurrent import recurrent_spec as spec
from pagespec.kernels.recurrent.recurrent_spec import CHUNK


@dataclass
class Case:
    """An op with inputs of some sequences.

    Attributes:
        per_token: arguments ``[T, ...]`` by their place; of every sequence.
        call: the op, given all per-token arguments, the states and (starts, contexts, tables,
            table_rows, interval, num_drafts).
        state_shape: of one state. state_dtype: its dtype.
        key, value: which of the inputs a GPU keeps in slots beside a state, where it computes in
            chunks; key -1 if it does not.
        in_chunks: whether slots are such ones.
    """

    name: str
    per_token: list[Tensor]
    call: Callable[..., Tensor]
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype = torch.float32
    key: int = -1
    value: int = -1
    in_chunks: bool = False

    def __post_init__(self) -> None:
        self.in_chunks = self.key >= 0 and torch.get_default_device().type == "cuda"

    @property
    def slot_shape(self) -> tuple[int, ...]:
        if not self.in_chunks:
            return self.state_shape
        dtypes = (self.per_token[i].dtype for i in (self.key, self.value))
        return spec.slot_shape(*self.state_shape, *dtypes)

    def state(self, slot: Tensor) -> Tensor:
        """The state that a slot holds, in chunks that at the last chunk's begin."""
        if not self.in_chunks:
            return slot
        num_heads, num_keys, num_values = self.state_shape
        tile = spec.block_v(num_keys, num_values)
        found = slot[:, : tile * num_keys].reshape(num_heads, -1, num_keys)
        return found[:, :num_values].mT

    def kept(self, slot: Tensor, num_tokens: int, interval: int) -> Tensor:
        """The contents of a slot after ``num_tokens`` positions, without older contents."""
        if not self.in_chunks:
            return slot
        num_heads, num_keys, num_values = self.state_shape
        tile = spec.block_v(num_keys, num_values)
        key, value = (self.per_token[i].dtype for i in (self.key, self.value))
        layout = spec.record_layout(num_keys, num_values, key, value)
        since = num_tokens % interval % CHUNK
        keys = slot[:, layout.keys : layout.values].contiguous().view(key)
        values = slot[:, layout.values : layout.scalars].contiguous().view(value)
        by_value = values.view(num_heads, -1, CHUNK, tile).transpose(1, 2).flatten(2)
        kept = [
            self.state(slot),
            keys.view(-1, CHUNK, num_keys)[:, :since],
            by_value[:, :since, :num_values],
            slot[:, layout.scalars : layout.scalars + since],
        ]
        if self.name == "delta_rule":
            first_beta = layout.scalars + CHUNK
            kept.append(slot[:, first_beta : first_beta + since])
            kept.append(slot[:, layout.rows :].reshape(-1, CHUNK, CHUNK)[:, :since])
        return torch.cat([x.flatten().float() for x in kept])


def short_conv(
    num_tokens: int,
    channels: int = 40,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    has_bias: bool = True,
) -> Case:
    weight = torch.randn(channels, width).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_bias else None

    def call(tokens: Sequence[Tensor], states: Tensor, *rows: object) -> Tensor:
        return ops.short_conv(tokens[0], weight, bias, states, *rows, activation)

    x = torch.randn(num_tokens, channels).to(dtype)
    return Case("short_conv", [x], call, (width - 1, channels), dtype)


def delta_rule(
    num_tokens: int,
    heads: int = 4,
    key_heads: int = 2,
    keys: int = 16,
    values: int = 20,
    dtype: torch.dtype = torch.float32,
    per_channel: bool = False,
) -> Case:
    query, key = torch.randn(2, num_tokens, key_heads, keys).to(dtype)
    value = torch.randn(num_tokens, heads, values).to(dtype)
    shape = (num_tokens, heads, keys) if per_channel else (num_tokens, heads)
    decay = -torch.rand(shape)
    beta = torch.rand(num_tokens, heads).to(dtype)

    def call(tokens: Sequence[Tensor], states: Tensor, *rows: object) -> Tensor:
        return ops.delta_rule(*tokens, states, *rows, keys**-0.5, True)

    inputs, kept = [query, key, value, decay, beta], -1 if per_channel else 1
    return Case("delta_rule", inputs, call, (heads, keys, values), key=kept, value=2)


def ssd_scan(
    num_tokens: int,
    heads: int = 4,
    groups: int = 2,
    inner: int = 12,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    x = torch.randn(num_tokens, heads, inner).to(dtype)
    dt = torch.randn(num_tokens, heads).to(dtype)
    rates, skip, bias = -torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(heads)
    B, C = torch.randn(2, num_tokens, groups, size).to(dtype)

    def call(tokens: Sequence[Tensor], states: Tensor, *rows: object) -> Tensor:
        x, dt, B, C = tokens
        return ops.ssd_scan(x, dt, rates, B, C, skip, bias, states, *rows, True, 0.001, 5.0)

    return Case("ssd_scan", [x, dt, B, C], call, (heads, size, inner), key=2, value=0)


def selective_scan(
    num_tokens: int, inner: int = 24, size: int = 10, dtype: torch.dtype = torch.float32
) -> Case:
    x, dt, z = torch.randn(3, num_tokens, inner).to(dtype)
    rates, skip, bias = -torch.rand(inner, size) - 0.1, torch.randn(inner), torch.randn(inner)
    B, C = torch.randn(2, num_tokens, size).to(dtype)

    def call(tokens: Sequence[Tensor], states: Tensor, *rows: object) -> Tensor:
        x, dt, B, C, z = tokens
        return ops.selective_scan(x, dt, rates, B, C, skip, z, bias, states, *rows, True)

    return Case("selective_scan", [x, dt, B, C, z], call, (size, inner))


@dataclass
class Request:
    """One sequence of a case: tokens ``[first, last)`` of its inputs, and how far it has come.
    ``of_drafts``: the outputs of the draft tokens of its latest row."""

    first: int
    last: int
    table: list[int]
    done: int = 0
    outputs: list[Tensor] = field(default_factory=list)
    of_drafts: Tensor | None = None


class Steps:
    """Runs requests over the inputs of one case, step by step, over one tensor of states."""

    def __init__(self, case: Case, num_slots: int, interval: int) -> None:
        self.case = case
        self.interval = interval
        # The contents of a slot that was not written must not matter.
        self.states = torch.full(
            (num_slots + 1, *case.slot_shape), float("nan"), dtype=case.state_dtype
        )

    def step(
        self,
        work: Sequence[tuple[Request, int]],
        num_padding: int = 0,
        num_drafts: Sequence[int] = (),
    ) -> Tensor:
        """Give each request its number of tokens (0 too), and then its number of draft tokens;
        returns what padding tokens got."""
        null = len(self.states) - 1
        tokens, starts, contexts = [], [0], []
        drafts = num_drafts or [0] * len(work)
        for (request, n), more in zip(work, drafts, strict=True):
            begin = request.first + request.done
            tokens += range(begin, begin + n + more)
            starts.append(len(tokens))
            request.done += n
            contexts.append(request.done + more)
        width = max([1, *(len(request.table) for request, _ in work)])
        tables = [r.table + [null] * (width - len(r.table)) for r, _ in work]
        # As in a store: more rows than the step has, in another order.
        tables = [[null] * width, *reversed(tables), [null] * width]
        index = torch.tensor(tokens + [0] * num_padding, dtype=torch.int64)
        out = self.case.call(
            [x[index] for x in self.case.per_token],
            self.states,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32).view(len(work) + 2, width),
            torch.arange(len(work), 0, -1, dtype=torch.int32),
            self.interval,
            torch.tensor(num_drafts, dtype=torch.int32) if num_drafts else None,
        )
        for (request, n), begin, end in zip(work, starts[:-1], starts[1:], strict=True):
            request.outputs.append(out[begin : begin + n])
            request.of_drafts = out[begin + n : end]
        return out[len(tokens) :]


def run_whole(case: Case, first: int, last: int, interval: int = 1 << 20) -> tuple[Tensor, Tensor]:
    """(outputs, slot at the end) of one sequence in one step, alone."""
    steps = Steps(case, 1, interval)
    request = Request(first, last, [0] * -(-(last - first) // interval))
    steps.step([(request, last - first)])
    return request.outputs[0], steps.states[0]


def use_kernels_of(patch: pytest.MonkeyPatch, **are: bool) -> None:
    """Has chunks computed as of steps with such rows: ``has_long_rows``, ``has_many_rows``."""
    from pagespec.kernels.recurrent import chunked

    for name, value in are.items():
        patch.setattr(chunked, name, lambda *_, value=value: value)


def check_drafts(make_case: Callable[[int], Case], rng: random.Random, interval: int) -> None:
    """Rows with and without draft tokens, which cross chunks and intervals. Outputs, states and
    checkpoints must have the bits of sequences alone, and those of draft tokens their own."""
    most = interval + CHUNK + 2
    lengths = [interval + 5, 2 * interval + 3, 3]
    case = make_case(sum(lengths) + most)
    requests, begin, slot = [], 0, 0
    tables = []
    for length in lengths:
        requests.append(Request(begin, begin + length, []))
        count = -(-length // interval)
        tables.append(list(range(slot, slot + count)))
        begin, slot = begin + length, slot + count
    wholes = [run_whole(case, r.first, r.last + most, interval)[0] for r in requests]
    steps = Steps(case, slot, interval)
    while left := [i for i, r in enumerate(requests) if r.done < lengths[i]]:
        rng.shuffle(left)
        work, num_drafts = [], []
        for i in left:
            request = requests[i]
            num_left = lengths[i] - request.done
            n = min(num_left, rng.choice([1, 1, 2, interval, interval + 3]))
            work.append((request, n))
            num_drafts.append(rng.choice([0, 1, 3, CHUNK, most]))
            # Entries of own positions only: others are the null slot, whose contents are not read.
            request.table = tables[i][: -(-(request.done + n) // interval)]
        assert not steps.step(work, rng.choice([0, 2]), num_drafts).any()
        for i, more in zip(left, num_drafts, strict=True):
            done, found = requests[i].done, requests[i].of_drafts
            assert torch.equal(found, wholes[i][done : done + more])
    assert steps.states[-1].isnan().all()
    for request, whole, table, length in zip(requests, wholes, tables, lengths, strict=True):
        assert torch.equal(torch.cat(request.outputs), whole[:length])
        for i, own in enumerate(table):
            end = min((i + 1) * interval, length)
            _, state = run_whole(case, request.first, request.first + end, interval)
            found = case.kept(steps.states[own], end, interval)
            assert torch.equal(found, case.kept(state, end, interval))
