"""The attention kernels on the CPU, under Triton's interpreter, at small shapes.

`tests/conftest.py` enables the interpreter if there is no GPU. With a GPU the kernels are compiled,
this file is not collected, and test_decode_gpu.py runs a superset of its tests.

No test uses bfloat16: the interpreter of Triton 3.7 lacks it, and that of 3.9 multiplies its bit
patterns as integers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from benchmarks import attention as benchmark
from pagespec.kernels import device
from pagespec.kernels.attention import launch, reference, triton_backend
from pagespec.kernels.attention.attention_spec import reference_only
from pagespec.kernels.attention.tiling import Tiling
from pagespec.kernels.attention.triton_backend import TritonBackend
from pagespec.kernels.fused import kv_store
from tests.support.paged import (
    Batch,
    Rows,
    Shape,
    bundled,
    float64_attention,
    make_batch,
    rescheduled,
)

pytestmark = pytest.mark.usefixtures("poisoned", "ordered_dot")

ROWS: dict[str, Rows] = {
    # An extend, a decode, a prefill, a row of no queries: rows of one query go to another kernel.
    "mixed": [(30, 9), (70, 1), (0, 5), (0, 0), (17, 1)],
    "decode": [(10, 1), (100, 1), (0, 1)],
    # As many rows as tokens or more, yet not one query each.
    "empty rows": [(5, 1), (0, 0), (20, 4), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)],
    "singles in front": [(9, 1), (70, 1), (30, 1), (5, 2), (0, 0), (44, 40), (8, 1)],
    "singles and padding": [(9, 1), (20, 1)],
}
SHAPES = [
    Shape(),
    Shape(hq=6, hkv=2, dk=96, dv=96, window=7, softcap=3.0, has_sinks=True),
    Shape(hq=5, hkv=1, dk=24, dv=32, block_size=32, softcap=2.0),
    Shape(hq=2, hkv=2, dk=128, dv=128, window=40, has_sinks=True),
    Shape(dk=16, dv=8, block_size=32, window=1, dtype=torch.float16),
]
# Of one KV head, for the tests that compare bits: they attend often.
ONE_HEAD = [
    Shape(hq=2, hkv=1),
    Shape(hq=3, hkv=1, dk=32, dv=32, window=7, softcap=3.0, has_sinks=True),
    Shape(hq=1, hkv=1, dk=24, dv=16, block_size=32, window=40),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

# Short splits, so that short contexts have several, and more pieces than are merged at once.
SMALL = Tiling(
    block_n=16,
    near_split=16,
    far_split=32,
    split_change=64,
    block_m=16,
    decode_warps=4,
    decode_stages=2,
    prefill_warps=4,
    prefill_stages=2,
    combine_chunk=3,
)
# How the pieces of a context are spread over programs; none of it may change a bit.
SPREADS = {
    "one program a context": {"unsplit_from": 1},
    "first segment to split_change": {"first_splits_from": 1, "max_programs": 64},
    "short contexts whole": {
        "first_splits_from": 1,
        "some_unsplit_from": 1,
        "unsplit_below": 64,
        "max_programs": 64,
    },
    "long contexts to split_change": {"max_programs": 1 << 12, "long_context": 64},
    "a program a piece": {"max_programs": 1 << 12, "long_context": 0},
    "one lane for all pieces": {"max_programs": 1},
    "three lanes": {"max_programs": 6},
}


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Runs the programs of a grid, one after another, in random order."""
    builder = interpreter.interpreter_builder
    original, orders = builder.set_grid_idx, {}

    def permuted(*index: int) -> None:
        grid = tuple(builder.grid_dim)
        if grid not in orders:
            orders[grid] = list(np.ndindex(grid))
            random.Random(seed).shuffle(orders[grid])
        original(*orders[grid][np.ravel_multi_index(index, grid)])

    builder.set_grid_idx = permuted
    try:
        yield
        assert orders  # it did go through here
    finally:
        del builder.set_grid_idx


def stored(rows: Rows, shape: Shape, *, num_padding: int = 3) -> Batch:
    batch = make_batch(rows, shape, num_padding=num_padding)
    kv_store.kv_store(*batch.store)
    return batch


def attend(arguments: tuple, tiling: Tiling = SMALL, **changes: int) -> Tensor:
    return launch.paged_attention(*bundled(*arguments), tiling=replace(tiling, **changes))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape: Shape, rows: Rows) -> None:
    # Tiles of one block, and tiles of several.
    for block_n, num_padding in ((16, 3), (32, 0)):
        batch = stored(rows, shape, num_padding=num_padding)
        out = attend(batch.attend, block_n=block_n, near_split=32)
        error = (out[: batch.num_tokens].double() - float64_attention(batch, rows, shape)).abs()
        assert error.max().item() <= TOLERANCE[shape.dtype]  # false for NaN
        assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("shape", ONE_HEAD, ids=str)
def test_spreading_segments_over_programs_changes_no_bit(shape: Shape) -> None:
    decodes = [(10, 1), (90, 1)]
    batches = [(decodes, 3), ([(3, 2), (64, 1)], 3), ([*decodes, (30, 1), (90, 1), (0, 1)], 0)]
    for rows, num_padding in batches:
        batch = stored(rows, shape, num_padding=num_padding)
        outputs = {name: attend(batch.attend, **spread) for name, spread in SPREADS.items()}
        expected = float64_attention(batch, rows, shape)
        first = outputs["one program a context"]
        torch.testing.assert_close(first[: len(expected)].double(), expected, rtol=1e-5, atol=1e-5)
        for name, out in outputs.items():
            assert torch.equal(out, first), name


@pytest.mark.parametrize(
    "spread", [{"unsplit_from": 1, "some_unsplit_from": 1}, SPREADS["short contexts whole"]]
)
def test_the_order_of_rows_changes_no_bit(spread: dict[str, int]) -> None:
    tiling = replace(SMALL, **spread)
    shape = Shape(hq=4, hkv=2, dk=16, dv=16)
    for rows in ([(10, 1), (100, 1), (0, 0), (63, 1)], [(3, 2), (100, 1), (0, 0)]):
        batch = stored(rows, shape, num_padding=0)
        query, kv, params = bundled(*batch.attend)
        expected = launch.paged_attention(query, kv, params, tiling=tiling)
        longest = triton_backend.longest_first(kv.context_lens, 512)
        assert longest is not None
        for order in (longest, longest.flip(0)):
            out = launch.paged_attention(query, kv, params, tiling=tiling, order=order)
            assert torch.equal(out, expected)


def test_rows_are_taken_in_the_order_that_is_given() -> None:
    """An order that names one row twice leaves out another."""
    tiling = replace(SMALL, unsplit_from=1, some_unsplit_from=1)
    batch = stored([(10, 1), (20, 1), (30, 1)], Shape(dk=16, dv=16), num_padding=0)
    query, kv, params = bundled(*batch.attend)
    expected = launch.paged_attention(query, kv, params, tiling=tiling)
    order = torch.tensor([2, 0, 2], dtype=torch.int32)
    out = launch.paged_attention(query, kv, params, tiling=tiling, order=order)
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert out[1].isnan().all()  # as fresh memory is here
    few = launch.paged_attention(query, kv, params, tiling=SMALL, order=order)
    assert torch.equal(few, expected)  # with few programs no order is needed


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 100])
def test_longest_contexts_come_first(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    contexts = torch.randint(0, 9, (num_rows,), generator=generator, dtype=torch.int32)
    order = triton_backend.longest_first(contexts, 512)
    expected = contexts.argsort(descending=True, stable=True)
    assert order is not None
    assert torch.equal(order.long(), expected)
    assert (triton_backend.longest_first(contexts, 8) is None) == (num_rows < 64)


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
def test_whoever_arrives_last_merges_and_leaves_the_counters_zero(spread: dict[str, int]) -> None:
    """Contexts of one piece and of many, together with empty rows, padding and rows of several
    queries."""
    arrival_counters = torch.zeros(16, dtype=torch.int32)
    shape = Shape(hq=6, hkv=2, dk=16, dv=24, window=70, has_sinks=True)
    for rows in ([(10, 1), (100, 1), (0, 0)], [(3, 2), (100, 1), (0, 0)]):
        batch = stored(rows, shape)
        expected = attend(batch.attend)
        tiling = replace(SMALL, **spread)
        for seed in range(2):
            with shuffled(seed):
                out = launch.paged_attention(
                    *bundled(*batch.attend), tiling=tiling, arrival_counters=arrival_counters
                )
            assert torch.equal(out, expected), seed
            assert not arrival_counters.any(), seed


def test_counters_are_shared_by_calls_of_all_sizes() -> None:
    attention = TritonBackend()
    small, large = (stored([(140, 1), (5, 1)] * n, Shape(dk=16, dv=16)) for n in (1, 2))
    expected = [launch.paged_attention(*bundled(*batch.attend)) for batch in (small, large)]
    for _ in range(2):
        for batch, out in zip((small, large), expected, strict=True):
            assert torch.equal(attention.attend(*bundled(*batch.attend)), out)


def test_counters_that_are_too_few_are_refused() -> None:
    batch = stored([(90, 1), (3, 1)], Shape(dk=16, dv=16), num_padding=0)
    arrival_counters = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 counters of arrival where 4 are needed"):
        launch.paged_attention(
            *bundled(*batch.attend), tiling=SMALL, arrival_counters=arrival_counters
        )
    whole = replace(SMALL, unsplit_from=4)  # then none are needed
    out = launch.paged_attention(
        *bundled(*batch.attend), tiling=whole, arrival_counters=arrival_counters[:0]
    )
    assert torch.equal(out, attend(batch.attend))


@pytest.mark.parametrize("shape", ONE_HEAD, ids=str)
def test_schedules_give_the_same_bits(shape: Shape) -> None:
    """One prefill; several chunks at once; decodes at once and alone."""
    length = 75
    batch = stored([(0, length)], shape, num_padding=0)
    whole = attend(batch.attend)
    chunks = [(0, 1), (1, 8), (8, 40), (40, 41), (41, length)]
    assert torch.equal(attend(rescheduled(batch, chunks)), whole)
    decodes = [(p, p + 1) for p in (0, 15, 16, 63, 64, 74)]
    tokens = [begin for begin, _ in decodes]
    assert torch.equal(attend(rescheduled(batch, decodes)), whole[tokens])
    for alone in ((64, 65), (70, 75)):
        assert torch.equal(attend(rescheduled(batch, [alone])), whole[slice(*alone)])


def test_rows_do_not_see_their_neighbours() -> None:
    rows = ROWS["mixed"]
    batch = stored(rows, ONE_HEAD[0], num_padding=0)
    together = attend(batch.attend)
    query, k_cache, v_cache, starts, contexts, tables, table_rows, *rest = batch.attend
    for b, (_, n) in enumerate(rows):
        begin = int(starts[b])
        own = torch.tensor([0, n], dtype=torch.int32)
        one = (query[begin : begin + n], k_cache, v_cache, own, contexts[b : b + 1])
        alone = attend((*one, tables, table_rows[b : b + 1], *rest))
        assert torch.equal(alone, together[begin : begin + n]), rows[b]


def test_default_tilings_serve_each_dtype() -> None:
    for dtype, tolerance in TOLERANCE.items():
        shape = Shape(dtype=dtype)
        batch = stored(ROWS["mixed"], shape)
        out = launch.paged_attention(*bundled(*batch.attend))
        error = (out[: batch.num_tokens] - float64_attention(batch, ROWS["mixed"], shape)).abs()
        assert error.max().item() <= tolerance


def test_store_takes_strided_views_and_writes_exactly_its_slots() -> None:
    for k_dim, v_dim in ((3, 5), (16, 32)):
        k_cache, v_cache = torch.zeros(4, 4, 2, k_dim), torch.zeros(4, 4, 2, v_dim)
        merged = torch.randn(3, 2 * k_dim + 2 * v_dim)  # of a merged projection
        key = merged[:, : 2 * k_dim].view(3, 2, k_dim)
        value = merged[:, 2 * k_dim :].view(3, 2, v_dim)
        head_major = key.transpose(0, 1).contiguous().transpose(0, 1)
        dim_major = value.transpose(1, 2).contiguous().transpose(1, 2)
        kv_store.kv_store(head_major, dim_major, k_cache, v_cache, torch.tensor([5, 0, 11]))
        assert torch.equal(k_cache.view(16, 2, k_dim)[[5, 0, 11]], key)
        assert torch.equal(v_cache.view(16, 2, v_dim)[[5, 0, 11]], value)
        for cache in (k_cache, v_cache):
            written = (cache.view(16, -1) != 0).any(1).nonzero().flatten().tolist()
            assert written == [0, 5, 11]


def test_strides_are_multiples_of_16_whatever_the_number_of_tokens() -> None:
    for num_tokens in range(1, 40):
        even, odd = torch.zeros(3, num_tokens, 16), torch.zeros(3, num_tokens, 24)
        assert device.vector_strides(even.transpose(0, 1))[1:] == (num_tokens, 16)
        assert device.vector_strides(odd.transpose(0, 1))[1:] == (num_tokens * 24, 1)
        merged = torch.zeros(num_tokens, 64)[:, 16:48].view(num_tokens, 2, 16)
        assert device.vector_strides(merged) == (4 if num_tokens > 1 else 0, 1, 16)


def test_attention_takes_strided_queries() -> None:
    batch = stored([(20, 3), (7, 1)], Shape(dk=16, dv=16))
    expected = attend(batch.attend)
    query, *rest = batch.attend
    whole = torch.randn(len(query), 2, 4, 16)
    whole[:, 0] = query
    head_major = query.transpose(0, 1).contiguous().transpose(0, 1)
    dim_major = query.transpose(1, 2).contiguous().transpose(1, 2)
    for view in (whole[:, 0], head_major, dim_major):
        assert torch.equal(attend((view, *rest)), expected)


def test_attention_of_no_tokens_and_of_no_rows() -> None:
    query, k_cache, v_cache, starts, contexts, tables, table_rows, *rest = stored(
        ROWS["decode"], SHAPES[0]
    ).attend
    caches = k_cache, v_cache
    assert attend((query[:0], *caches, starts, contexts, tables, table_rows, *rest)).shape[0] == 0
    none = starts[:1], contexts[:0], tables, table_rows[:0]
    padding = attend((query, *caches, *none, *rest))
    assert torch.equal(padding, torch.zeros(len(query), 4, 64))


def test_refuses_a_block_size_that_is_no_power_of_two() -> None:
    batch = make_batch(ROWS["decode"], Shape(dk=16, dv=16, block_size=12))
    with pytest.raises(ValueError, match="power of two"):
        launch.paged_attention(*bundled(*batch.attend))


def test_the_benchmark_counts_bytes_and_operations_of_inputs_that_work() -> None:
    case = benchmark.Case("tiny", 3, 20, 4, 2, spread=0.5, head_dim=16, is_prefill=True)
    lengths = case.lengths()
    assert len(lengths) == 3
    assert all(10 <= n <= 30 for n in lengths)
    assert case.kv_bytes() == sum(lengths) * 2 * (16 + 16) * 2  # two heads, two bytes
    visible = sum(position + 1 for n in lengths for position in range(n))
    assert case.flops() == visible * 4 * (2 * 16 + 2 * 16)  # query heads, two matmuls
    seen = sum(min(position + 1, 12) for n in lengths for position in range(n))
    assert replace(case, window=12).flops() == seen * 4 * (2 * 16 + 2 * 16)
    assert reference_only([case]) is None  # it has what kernels are chosen by
    decode = replace(case, is_prefill=False)
    for one, num_tokens in ((case, sum(lengths)), (decode, 3)):
        layers = benchmark.inputs(one, 16, device="cpu", num_layers=1)
        out = reference.paged_attention(*layers[0])
        assert out.shape == (num_tokens, 4, 16)
        assert out.isfinite().all()
