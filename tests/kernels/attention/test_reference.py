"""The reference attention against a naive float64 attention, over ragged mixed batches."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from tests.support.paged import Shape, float64_attention, make_batch


def naive(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """q [n, Hq, Dk] over k, v [context, Hkv, D], one query and head at a time, in float64."""
    n, hq, _ = q.shape
    context, hkv, dv = v.shape
    out = torch.zeros(n, hq, dv, dtype=torch.float64)
    for j in range(n):
        position = context - n + j
        low = max(0, position - window + 1) if window else 0
        for h in range(hq):
            g = h // (hq // hkv)
            scores = k[low : position + 1, g].double() @ q[j, h].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h : h + 1].double()])
            p = scores.softmax(0)[: position + 1 - low]
            out[j, h] = p @ v[low : position + 1, g].double()
    return out


ROWS = {
    "mixed": [(0, 5), (17, 1), (30, 9), (3, 1), (0, 1), (99, 1), (40, 2)],
    "decode": [(10, 1), (11, 1), (12, 1), (10, 1)],
    "ragged decode": [(1, 1), (200, 1), (3, 1), (190, 1), (90, 1)],
    "with empty rows": [(5, 1), (0, 0), (0, 4), (0, 0)],
    "prefill": [(0, 33), (0, 2)],
    "long chunk": [(130, 530)],
}


# hq, hkv, dk, dv, window, softcap, sinks
MODELS = [
    (9, 3, 64, 64, 0, 0.0, False),
    (4, 4, 16, 16, 8, 0.0, False),
    (4, 2, 24, 16, 0, 0.0, False),
    (4, 2, 16, 16, 0, 5.0, False),
    (6, 2, 16, 8, 7, 3.0, True),
    (4, 1, 16, 16, 1, 0.0, True),
]
CASES = [
    pytest.param(rows, block_size, *model, id=f"{name}-{block_size}-{number}")
    for name, rows in ROWS.items()
    for block_size in (1, 16, 256)
    for number, model in enumerate(MODELS)
    # The naive loop is slow: the long chunk in one block size, with two KV heads.
    if name != "long chunk" or (block_size == 16 and model[1] == 2)
]


@pytest.mark.parametrize(
    ("rows", "block_size", "hq", "hkv", "dk", "dv", "window", "softcap", "sinks"), CASES
)
def test_matches_naive(
    rows: list[tuple[int, int]],
    block_size: int,
    hq: int,
    hkv: int,
    dk: int,
    dv: int,
    window: int,
    softcap: float,
    sinks: bool,
) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    num_padding = 3
    needed = [math.ceil((start + n) / block_size) for start, n in rows]
    num_blocks = sum(needed) + 2
    order = rng.sample(range(num_blocks), sum(needed))
    # Everything that no row owns holds NaN, the null block included.
    k_cache = torch.full((num_blocks + 1, block_size, hkv, dk), math.nan)
    v_cache = torch.full((num_blocks + 1, block_size, hkv, dv), math.nan)
    tables = torch.full((len(rows), max(max(needed), 2)), num_blocks, dtype=torch.int32)
    num_tokens = sum(n for _, n in rows)
    query = torch.randn(num_tokens + num_padding, hq, dk)
    sink = torch.randn(hq) if sinks else None
    key = torch.randn(num_tokens + num_padding, hkv, dk)
    value = torch.randn(num_tokens + num_padding, hkv, dv)
    slots = [num_blocks * block_size] * (num_tokens + num_padding)
    scale = dk**-0.5
    expected, starts, taken = [], [0], 0
    for b, (start, n) in enumerate(rows):
        mine = order[taken : taken + needed[b]]
        taken += needed[b]
        tables[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        first = starts[-1]
        starts.append(first + n)
        k = torch.cat([torch.randn(start, hkv, dk), key[first : first + n]])
        v = torch.cat([torch.randn(start, hkv, dv), value[first : first + n]])
        for position in range(start + n):
            slot = mine[position // block_size] * block_size + position % block_size
            if position >= start:
                slots[first + position - start] = slot
            else:
                k_cache.view(-1, hkv, dk)[slot] = k[position]
                v_cache.view(-1, hkv, dv)[slot] = v[position]
        expected.append(naive(query[first : first + n], k, v, scale, window, softcap, sink))
    key[num_tokens:] = math.nan
    value[num_tokens:] = math.nan

    ops.kv_store(key, value, k_cache, v_cache, torch.tensor(slots))
    out = ops.paged_attention(
        query,
        k_cache,
        v_cache,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([s + n for s, n in rows], dtype=torch.int32),
        tables,
        torch.arange(len(rows), dtype=torch.int32),
        scale,
        window,
        softcap,
        sink,
    )
    assert out.shape == (num_tokens + num_padding, hq, dv)
    torch.testing.assert_close(out[:num_tokens].double(), torch.cat(expected), rtol=1e-5, atol=2e-6)
    assert (out[num_tokens:] == 0).all()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(dk=16, dv=16, chunk=24),
        Shape(dk=16, dv=16, chunk=24, has_sinks=True, block_size=1),
        Shape(hq=6, dk=16, dv=8, has_slopes=True),
        Shape(hq=4, hkv=1, dk=16, dv=16, has_slopes=True, window=70, chunk=128),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
def test_chunks_and_slopes(rows: list[tuple[int, int]], shape: Shape) -> None:
    batch = make_batch(rows, shape)
    ops.kv_store(*batch.store)
    out = ops.paged_attention(*batch.attend)
    expected = float64_attention(batch, rows, shape)
    found = out[: batch.num_tokens].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (out[batch.num_tokens :] == 0).all()


def test_kv_store_writes_exactly_its_slots() -> None:
    k_cache, v_cache = torch.zeros(4, 4, 2, 3), torch.zeros(4, 4, 2, 5)
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 5)
    ops.kv_store(key, value, k_cache, v_cache, torch.tensor([5, 0, 11]))
    assert torch.equal(k_cache[1, 1], key[0])
    assert torch.equal(v_cache[0, 0], value[1])
    assert torch.equal(v_cache[2, 3], value[2])
    assert (k_cache.view(16, -1) != 0).any(1).nonzero().flatten().tolist() == [0, 5, 11]


def test_ops_pass_torch_opcheck() -> None:
    k_cache, v_cache = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    args = (torch.randn(2, 2, 8), torch.randn(2, 2, 8), k_cache, v_cache, torch.tensor([4, 5]))
    torch.library.opcheck(torch.ops.pagespec.kv_store.default, args)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    context, tables = torch.tensor([2], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    query = torch.randn(2, 4, 8)
    torch.library.opcheck(
        torch.ops.pagespec.paged_attention.default,
        (query, k_cache, v_cache, starts, context, tables, context - 2, 0.3, 0, 0.0, None),
    )
