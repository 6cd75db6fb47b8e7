"""Paged KV caches with random contents for kernel tests, and reference attention in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagespec.kernels import e4m3, ops
from pagespec.kernels.arguments import AttentionParams, LatentKV, PagedKV
from pagespec.kernels.fused.dispatch import kv_store
from pagespec.kernels.mla import dispatch as mla

Rows = list[tuple[int, int]]
"""(tokens already in the cache, new tokens) of each row of a batch."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The attention parameters of a model."""

    hq: int = 4
    hkv: int = 2
    dk: int = 64
    dv: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    chunk: int = 0
    has_slopes: bool = False
    is_e4m3: bool = False  # caches hold planes of it
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = [f"{self.hq}/{self.hkv}", f"d{self.dk}", f"b{self.block_size}"]
        words += [f"v{self.dv}"] if self.dv != self.dk else []
        words += [f"w{self.window}"] if self.window else []
        words += [f"cap{self.softcap}"] if self.softcap else []
        words += ["sinks"] if self.has_sinks else []
        words += [f"c{self.chunk}"] if self.chunk else []
        words += ["slopes"] if self.has_slopes else []
        words += ["e4m3"] if self.is_e4m3 else []
        return " ".join([*words, str(self.dtype).removeprefix("torch.")])

    @property
    def slopes(self) -> list[float]:
        """ALiBi slopes, one per query head."""
        return [0.9 ** (head + 1) for head in range(self.hq)]


@dataclass(frozen=True)
class Batch:
    """Arguments of ``kv_store`` and of ``paged_attention`` but for the caches, and the truth.

    Attributes:
        store: key ``[T, Hkv, Dk]``, value ``[T, Hkv, Dv]``, k_cache, v_cache, slot_mapping.
        attend: query, k_cache, v_cache, query_starts, context_lens, block_tables, table_rows,
            scale, window, softcap, sinks; with a chunk or slopes, these.
        histories: (K ``[context, Hkv, Dk]``, V) of each row, new tokens included.
        num_tokens: of the rows, without padding.
    """

    store: tuple[Tensor, ...]
    attend: tuple
    histories: list[tuple[Tensor, Tensor]]
    num_tokens: int


def make_batch(
    rows: Rows, shape: Shape, *, num_padding: int = 3, seed: int = 0, device: str = "cpu"
) -> Batch:
    """A batch whose old tokens are already in the caches. All memory without an owner contains NaN:
    unused slots and blocks, the null block (the target of padding and of the tables' unused ends),
    and the keys and values of padding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    s = shape
    size = s.block_size
    needed = [math.ceil((start + n) / size) for start, n in rows]
    num_blocks = sum(needed) + 2
    order = rng.sample(range(num_blocks), sum(needed))
    num_tokens = sum(n for _, n in rows)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).to(s.dtype)

    def nans(*sizes: int) -> Tensor:
        return torch.full(sizes, math.nan, dtype=s.dtype, device=device)

    def cache(dim: int) -> Tensor:
        if not s.is_e4m3:
            return nans(num_blocks + 1, size, s.hkv, dim)
        shape = (num_blocks + 1, size, s.hkv, dim + e4m3.SCALE_BYTES)
        ones = torch.full(shape, 255, dtype=torch.uint8, device=device)  # NaN of either type
        return ones.view(torch.float8_e4m3fn)

    def held(x: Tensor) -> Tensor:
        """The values of a tensor after it was stored in a cache."""
        return e4m3.decode_rows(e4m3.encode_rows(x)) if s.is_e4m3 else x

    k_cache, v_cache = cache(s.dk), cache(s.dv)
    key, value = (
        nans(num_tokens + num_padding, s.hkv, s.dk),
        nans(num_tokens + num_padding, s.hkv, s.dv),
    )
    slots = torch.full((num_tokens + num_padding,), num_blocks * size, device=device)
    tables = torch.full((len(rows), max(*needed, 1) + 1), num_blocks, dtype=torch.int32)
    histories, starts, taken = [], [0], 0
    for b, (start, n) in enumerate(rows):
        mine = torch.tensor(order[taken : taken + needed[b]], dtype=torch.int32)
        taken += needed[b]
        tables[b, : len(mine)] = mine
        positions = torch.arange(start + n)
        own = (mine[positions // size].long() * size + positions % size).to(device)
        k, v = normal(start + n, s.hkv, s.dk), normal(start + n, s.hkv, s.dv)
        kv_store(k[:start], v[:start], k_cache, v_cache, own[:start])
        first = starts[-1]
        key[first : first + n], value[first : first + n] = k[start:], v[start:]
        slots[first : first + n] = own[start:]
        starts.append(first + n)
        histories.append((held(k), held(v)))
    query = normal(num_tokens + num_padding, s.hq, s.dk)
    contexts = torch.tensor([start + n for start, n in rows], dtype=torch.int32)
    return Batch(
        (key, value, k_cache, v_cache, slots),
        (
            query,
            k_cache,
            v_cache,
            torch.tensor(starts, dtype=torch.int32).to(device),
            contexts.to(device),
            *(x.to(device) for x in scattered(tables, rng)),
            s.dk**-0.5,
            s.window,
            s.softcap,
            normal(s.hq) if s.has_sinks else None,
            *((s.chunk, s.slopes if s.has_slopes else None) if s.chunk or s.has_slopes else ()),
        ),
        histories,
        num_tokens,
    )


def scattered(tables: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    """A store of more rows than ``tables [B, M]`` has, in another order, and ``table_rows [B]``:
    the row of each table. The other rows contain blocks of other tables."""
    num_rows = len(tables)
    rows = torch.tensor(rng.sample(range(num_rows + 2), num_rows), dtype=torch.int32)
    store = torch.randint(0, int(tables.max()) + 1, (num_rows + 2, tables.shape[1])).int()
    store[rows.long()] = tables
    return store, rows


def float64_attention(batch: Batch, rows: Rows, shape: Shape) -> Tensor:
    """``[num_tokens, Hq, Dv]`` in float64, from the histories rather than the caches."""
    query, sinks = batch.attend[0], batch.attend[10]
    outputs, first = [], 0
    for (start, n), (k, v) in zip(rows, batch.histories, strict=True):
        for a in range(0, n, 256):
            b = min(a + 256, n)
            q = query[first + a : first + b]
            outputs.append(_float64_row(q, k[: start + b], v[: start + b], start + a, shape, sinks))
        first += n
    return torch.cat(outputs)


def _float64_row(
    q: Tensor, k: Tensor, v: Tensor, start: int, shape: Shape, sinks: Tensor | None
) -> Tensor:
    """Queries ``q [n, Hq, Dk]`` at positions from ``start`` over ``k``, ``v [context, Hkv, D]``."""
    n, context = len(q), len(k)
    grouped = q.double().view(n, shape.hkv, -1, shape.dk)
    scores = torch.einsum("nhgd,chd->nhgc", grouped, k.double()) * shape.dk**-0.5
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    queries = torch.arange(start, start + n, device=q.device)[:, None]
    keys = torch.arange(context, device=q.device)
    visible = keys <= queries
    if shape.window:
        visible &= keys > queries - shape.window
    if shape.chunk:
        visible &= keys // shape.chunk == queries // shape.chunk
    if shape.has_slopes:
        slopes = torch.tensor(shape.slopes, dtype=torch.float64, device=q.device)
        scores += slopes.view(shape.hkv, -1, 1) * (keys - queries)[:, None, None]
    scores.masked_fill_(~visible[:, None, None], -math.inf)
    if sinks is not None:
        column = sinks.double().view(1, shape.hkv, -1, 1).expand(n, -1, -1, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :context]
    return torch.einsum("nhgc,chd->nhgd", weights, v.double()).reshape(n, shape.hq, shape.dv)


def rescheduled(batch: Batch, chunks: Sequence[tuple[int, int]]) -> tuple:
    """Arguments of ``paged_attention`` in which ranges ``[begin, end)`` of the queries are separate
    rows. The given batch has one row, prefilled from position 0 and stored."""
    query, k_cache, v_cache, _, _, tables, table_rows, *rest = batch.attend
    tokens = torch.cat([torch.arange(begin, end) for begin, end in chunks])
    starts = torch.tensor([0, *(end - begin for begin, end in chunks)]).cumsum(0)
    contexts = torch.tensor([end for _, end in chunks])
    device = query.device
    return (
        query[tokens.to(device)],
        k_cache,
        v_cache,
        starts.to(device, torch.int32),
        contexts.to(device, torch.int32),
        tables,
        table_rows.expand(len(chunks)).contiguous(),
        *rest,
    )


@contextmanager
def poisoned_memory(device: str) -> Iterator[None]:
    """Inside, new tensors contain NaN, so elements that a kernel does not write are visible."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if not torch.empty(64, device=device).isnan().all():
            raise RuntimeError("fresh tensors are not filled with NaN")
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def bundled(query: Tensor, *rest: Any) -> tuple[Tensor, PagedKV, AttentionParams]:
    """Convert the arguments of ``ops.paged_attention`` to those of ``launch.paged_attention``."""
    return query, PagedKV(*rest[:6]), AttentionParams(*rest[6:])


def check_positions(attend: Callable[[tuple], Tensor], shape: Shape, cut_step: int) -> None:
    """Check that a position has the same bits in any step: 210 positions of one row at once, then
    cut at each ``cut_step``, then together with rows of any length."""
    num_tokens = 210
    batch = make_batch([(0, num_tokens), (0, 250), (0, 1), (0, 70)], shape, num_padding=0)
    ops.kv_store(*batch.store)
    query, k_cache, v_cache, _, _, tables, table_rows, *rest = batch.attend
    begins = [0, num_tokens, num_tokens + 250, num_tokens + 251]

    def served(rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """(row, begin, end) each; its outputs."""
        queries = torch.cat([query[begins[r] + a : begins[r] + b] for r, a, b in rows])
        lengths = [b - a for _, a, b in rows]
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        contexts = torch.tensor([b for _, _, b in rows], dtype=torch.int32)
        mine = tables, table_rows[[r for r, _, _ in rows]]
        step = (queries, k_cache, v_cache, starts, contexts, *mine, *rest)
        return list(attend(step).split(lengths))

    whole = served([(0, 0, num_tokens)])[0]
    for cut in range(1, num_tokens, cut_step):
        assert torch.equal(served([(0, 0, cut)])[0], whole[:cut])
        assert torch.equal(served([(0, cut, num_tokens)])[0], whole[cut:])
    for position in range(num_tokens):
        assert torch.equal(served([(0, position, position + 1)])[0][0], whole[position])
    for position in range(0, num_tokens, 11):
        mine = (0, position, position + 1)
        for others in ([(1, 249, 250)], [(2, 0, 1), (3, 69, 70)], [(1, 3, 90), (3, 69, 70)]):
            for rows in ([mine, *others], [*others, mine]):
                assert torch.equal(served(rows)[rows.index(mine)][0], whole[position])


# Caches of latent vectors ------------------------------------------------------------------------


def latent_shape(num_heads: int, rank: int, rope_dim: int, **others: Any) -> Shape:
    """One KV head whose values are the first ``rank`` elements of the keys."""
    return Shape(hq=num_heads, hkv=1, dk=rank + rope_dim, dv=rank, **others)


def latent_batch(rows: Rows, shape: Shape, *, num_padding: int = 3, device: str = "cpu") -> Batch:
    """A batch whose new vectors are already stored."""
    batch = make_batch(rows, shape, num_padding=num_padding, device=device)
    key, _, cache, _, slots = batch.store
    mla.store_latent(key[None, :, 0, : shape.dv], key[None, :, 0, shape.dv :], cache, slots)
    histories = [(k, k[..., : shape.dv]) for k, _ in batch.histories]
    return replace(batch, histories=histories)


def arguments(attend: tuple, rank: int) -> tuple[Tensor, LatentKV, float, int]:
    """Of ``attention``, from those of ``paged_attention``."""
    query, cache, _, *batch = attend[:7]
    return query, LatentKV(cache, *batch), attend[7], rank


def expected(batch: Batch, rows: Rows, shape: Shape) -> Tensor:
    """``[num_tokens, H, R]`` in float64."""
    return float64_attention(batch, rows, shape)


def float64_heads(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("thi,hio->tho", x.double(), weight.double())
