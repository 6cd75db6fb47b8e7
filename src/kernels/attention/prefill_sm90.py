"""Warp-specialised prefill attention for Hopper (FlashAttention-3, Shah et al. 2024).

The grid and the arithmetic are those of :mod:`.prefill`, and so are the
bits: the same tiles of ``BLOCK_N`` positions in the same order, the same matmuls, each one chain
over k, and the same operations a row. What differs is how warps share the work:

- one warp loads. Keys and values come through TMA, a part of a block (up to ``BLOCK_N`` slots by
  64 elements) a message, into a ring of ``STAGES`` units: unit u holds the keys of tile u and the
  values of tile u - 1, which are used together;
- two warpgroups have 64 lines each. Beside the softmax of a tile run the scores of the next one
  and the other warpgroup's matmuls.

What has to be so for this kernel: see :func:`fits`. Unowned slots may hold NaN: scores of keys
beyond a query are masked; of the last tile's values, those beyond ``last`` are zeroed in shared
memory, by each warpgroup for itself, which writes what the other writes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..arguments import PagedKV
from ..device import Gpu
from .prefill_sm90_mainloop import consume, lines_of
from .tiling import Tiling

_STAGES = {64: 8, 128: 5}  # units in the ring, by head size


@gluon.jit
def _row_of(starts, num_rows, tile, BLOCK_Q: gl.constexpr):
    """The row of a tile, as :func:`.online_softmax.count_at_most` finds it."""
    # Most batches at once. As wide for all: a kernel for each width would be seconds of compiling.
    WIDTH: gl.constexpr = 1024
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = 0
    for first in range(0, num_rows + 1, WIDTH):
        i = first + gl.arange(0, WIDTH, LAYOUT)
        keys = gl.load(starts + i, mask=i <= num_rows, other=0) // BLOCK_Q + i
        total += gl.sum(((keys <= tile) & (i <= num_rows)).to(gl.int32), 0)
    return total - 1


@gluon.jit
def _num_leading_singles(starts, num_rows):
    """As :func:`.prefill.num_leading_singles`."""
    WIDTH: gl.constexpr = 1024
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    num_singles = num_rows
    for first in range(0, num_rows, WIDTH):
        row = first + gl.arange(0, WIDTH, LAYOUT)
        end = gl.load(starts + row + 1, mask=row < num_rows, other=0)
        others = gl.where((row < num_rows) & (end != row + 1), row, num_rows)
        num_singles = gl.minimum(num_singles, gl.min(others, 0))
    return num_singles


@gluon.jit
def _load_tile_async(
    desc, table, tile, last, column, segments, bar, PAGE: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Start loading a tile of keys or values: ``[panels, BLOCK_N, 64]``, in parts of a block."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    COUNT: gl.constexpr = BLOCK_N // ROWS
    PANELS: gl.constexpr = segments.shape[0] // COUNT
    for i in gl.static_range(COUNT):
        # Behind the end of the context: its last block once more.
        position = gl.minimum(tile * BLOCK_N + i * ROWS, last)
        block = gl.load(table + position // PAGE)
        slot = block * PAGE + position % PAGE // ROWS * ROWS
        for panel in gl.static_range(PANELS):
            at = [slot, column + panel * 64]
            tma.async_copy_global_to_shared(desc, at, bar, segments.index(panel * COUNT + i))


@gluon.jit
def _produce_early(
    k_desc, v_desc, table, head, last, ring, full, empty,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Units 0 (keys alone), 1 to n - 1, and n (values alone)."""
    ROWS: gl.constexpr = k_desc.block_type.shape[0]
    SEGMENTS: gl.constexpr = [BLOCK_N // ROWS * (D // 64), ROWS, 64]
    BYTES: gl.constexpr = BLOCK_N * D * 2
    column = head * D
    count = last // BLOCK_N + 1
    mbarrier.expect(full.index(0), BYTES)
    segments = ring.index(0)._reinterpret(ring.dtype, SEGMENTS, k_desc.layout)
    _load_tile_async(k_desc, table, 0, last, column, segments, full.index(0), PAGE, BLOCK_N)
    slot = 1
    phase = 1
    for unit in range(1, count):
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(bar, 2 * BYTES)
        segments = ring.index(2 * slot + 1)._reinterpret(ring.dtype, SEGMENTS, v_desc.layout)
        _load_tile_async(v_desc, table, unit - 1, last, column, segments, bar, PAGE, BLOCK_N)
        segments = ring.index(2 * slot)._reinterpret(ring.dtype, SEGMENTS, k_desc.layout)
        _load_tile_async(k_desc, table, unit, last, column, segments, bar, PAGE, BLOCK_N)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(full.index(slot), BYTES)
    segments = ring.index(2 * slot + 1)._reinterpret(ring.dtype, SEGMENTS, v_desc.layout)
    _load_tile_async(
        v_desc, table, count - 1, last, column, segments, full.index(slot), PAGE, BLOCK_N
    )


@gluon.jit
def _produce_late(
    k_desc, v_desc, table, head, last, ring, full, empty,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """For LATE_VALUES: units 0 and 1 (keys alone, if there are any), 2 to
    n - 1, and two of values alone."""
    ROWS: gl.constexpr = k_desc.block_type.shape[0]
    SEGMENTS: gl.constexpr = [BLOCK_N // ROWS * (D // 64), ROWS, 64]
    BYTES: gl.constexpr = BLOCK_N * D * 2
    column = head * D
    count = last // BLOCK_N + 1
    mbarrier.expect(full.index(0), BYTES)
    segments = ring.index(0)._reinterpret(ring.dtype, SEGMENTS, k_desc.layout)
    _load_tile_async(k_desc, table, 0, last, column, segments, full.index(0), PAGE, BLOCK_N)
    if count > 1:
        mbarrier.expect(full.index(1), BYTES)
        segments = ring.index(2)._reinterpret(ring.dtype, SEGMENTS, k_desc.layout)
        _load_tile_async(k_desc, table, 1, last, column, segments, full.index(1), PAGE, BLOCK_N)
    else:
        mbarrier.arrive(full.index(1), count=1)
    slot = 2
    phase = 1
    for unit in range(2, count):
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(bar, 2 * BYTES)
        segments = ring.index(2 * slot + 1)._reinterpret(ring.dtype, SEGMENTS, v_desc.layout)
        _load_tile_async(v_desc, table, unit - 2, last, column, segments, bar, PAGE, BLOCK_N)
        segments = ring.index(2 * slot)._reinterpret(ring.dtype, SEGMENTS, k_desc.layout)
        _load_tile_async(k_desc, table, unit, last, column, segments, bar, PAGE, BLOCK_N)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    for unit in range(gl.maximum(count, 2), count + 2):
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(bar, BYTES)
        segments = ring.index(2 * slot + 1)._reinterpret(ring.dtype, SEGMENTS, v_desc.layout)
        _load_tile_async(v_desc, table, unit - 2, last, column, segments, bar, PAGE, BLOCK_N)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _produce(
    k_desc, v_desc, table, head, last, ring, full, empty,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    LATE_VALUES: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    if LATE_VALUES:
        _produce_late(
            k_desc, v_desc, table, head, last, ring, full, empty, PAGE, BLOCK_N, D, STAGES
        )
    else:
        _produce_early(
            k_desc, v_desc, table, head, last, ring, full, empty, PAGE, BLOCK_N, D, STAGES
        )


@gluon.jit(
    # What follows the batch must not make new versions of the kernel.
    do_not_specialize=["q_token_stride", "q_head_stride", "table_stride", "num_tokens", "num_rows"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables"],
)
def prefill_kernel(
    k_desc,  # [slots, HKV * D], boxes [min(PAGE, BLOCK_N), 64]
    v_desc, query, out, starts, contexts, tables, factor,
    q_token_stride,  # in units of STEP elements
    q_head_stride, table_stride, num_tokens, num_rows,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, STEP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    LATE_VALUES: gl.constexpr,  # of Tiling
):  # fmt: skip
    """As :func:`.prefill.prefill_kernel`, without window, softcap or sinks.

    Grid: ``(tiles * HKV,)`` with ``T // (BLOCK_M // G) + B + 1`` tiles. Shapes: query and out
    ``[T, HQ, D]``, starts ``[B + 1]``, contexts ``[B]``, tables ``[B, M]``.
    """
    G: gl.constexpr = HQ // HKV
    BLOCK_Q: gl.constexpr = BLOCK_M // G
    num_singles = _num_leading_singles(starts, num_rows)
    tile = gl.program_id(0) // HKV + num_singles // BLOCK_Q + num_singles
    if tile > num_tokens // BLOCK_Q + num_rows:
        return
    head = gl.program_id(0) % HKV
    row = _row_of(starts, num_rows, tile, BLOCK_Q)
    begin = gl.load(starts + row)
    end = gl.load(starts + row + 1, mask=row < num_rows, other=0)
    end = gl.where(row < num_rows, end, num_tokens)
    num_queries = end - begin
    behind = tile - (begin // BLOCK_Q + row)
    first = ((num_queries + BLOCK_Q - 1) // BLOCK_Q - 1 - behind) * BLOCK_Q
    if first < 0:
        return
    if (row < num_rows) & (num_queries == 1):  # the decode kernel's
        return
    if row == num_rows:
        LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        tokens, heads, mask = lines_of(
            0, BLOCK_M, head, begin, first, num_queries, G, BLOCK_Q, LINE
        )
        dims = gl.arange(0, D, gl.SliceLayout(0, LINE))
        target = out + (tokens * HQ + heads)[:, None] * D + dims[None, :]
        gl.store(target, gl.zeros([BLOCK_M, D], out.dtype.element_ty, LINE), mask=mask[:, None])
        return

    start = gl.load(contexts + row) - num_queries
    last = start + gl.minimum(first + BLOCK_Q, num_queries) - 1
    table = tables + row.to(gl.int64) * table_stride
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M // 64, 64, D], OPERAND)
    ring = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_N, D], OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    bars = (full, empty)
    task = (
        query, out, head, begin, first, num_queries, start, last, q_token_stride, q_head_stride,
        factor,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (
                0, q_smem.index(0), ring, bars, task, HQ, G, D, STEP, BLOCK_M, BLOCK_N,
                NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES, LATE_VALUES,
            )),
            (consume, (
                1, q_smem.index(1), ring, bars, task, HQ, G, D, STEP, BLOCK_M, BLOCK_N,
                NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE, STAGES, LATE_VALUES,
            )),
            (_produce, (
                k_desc, v_desc, table, head, last, ring, full, empty, PAGE, BLOCK_N, D, STAGES,
                LATE_VALUES,
            )),
        ],
        [4, 1],
        [240, 24],  # registers of a thread; the first partition gets 240 of what is left, too
    )  # fmt: skip


def fits(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, shared: dict[str, Any], t: Tiling
) -> bool:
    """Whether there is a kernel for this. ``shared``: what all attention kernels are given."""
    dim = query.shape[2]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == k_cache.dtype == v_cache.dtype
        and dim in _STAGES
        and k_cache.shape[3] == v_cache.shape[3] == dim
        and shared["PAGE"] >= 16  # smaller blocks are more messages than a warp sends in time
        and all(shared[name] is None for name in ("window", "cap_in", "sinks"))
        and (t.block_m, t.block_n) == (128, 64)
        and (t.near_split | t.far_split | t.split_change) % 128 == 0  # splits begin at even tiles
        and query.shape[1] // k_cache.shape[2] <= 128
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (k_cache, v_cache))
    )


def constants_of(query: Tensor, shared: dict[str, Any], t: Tiling) -> dict[str, Any]:
    """The kernel's constants."""
    names = ("HQ", "HKV", "STEP", "BLOCK_N", "NEAR_SPLIT", "FAR_SPLIT", "SPLIT_CHANGE", "PAGE")
    dim = query.shape[2]
    chosen = {"D": dim, "BLOCK_M": 128, "STAGES": _STAGES[dim], "LATE_VALUES": t.late_values}
    return {name: shared[name] for name in names} | chosen


def launch(
    query: Tensor,
    kv: PagedKV,
    out: Tensor,
    shared: dict[str, Any],
    t: Tiling,
) -> bool:
    """Attention of all rows but those of one query, which are left alone; zeros for padding.

    Args:
        query: ``[T, Hq, D]`` on a GPU. out: contiguous, of its shape and dtype.
        shared: what the attention kernels are given alike.

    Returns:
        Whether it was launched: False where it does not fit the GPU, the shapes or the model.
    """
    k_cache, v_cache, *metadata = kv
    if not (Gpu.of(query.device).has_prefetch and fits(query, k_cache, v_cache, shared, t)):
        return False
    (num_tokens, num_heads, dim), num_rows = query.shape, len(metadata[2])
    num_blocks, page, num_kv_heads, _ = k_cache.shape
    num_tiles = num_tokens // (128 // (num_heads // num_kv_heads)) + num_rows + 1
    sizes = [num_blocks * page, num_kv_heads * dim]
    box = [min(page, t.block_n), 64]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    k_desc, v_desc = (
        TensorDescriptor(x, sizes, [sizes[1], 1], box, layout) for x in (k_cache, v_cache)
    )
    prefill_kernel[(num_tiles * num_kv_heads,)](
        k_desc, v_desc, query, out, *metadata,
        **{name: shared[name] for name in ("factor", "q_token_stride", "q_head_stride")},
        table_stride=metadata[2].stride(0),
        num_tokens=num_tokens,
        num_rows=num_rows,
        **constants_of(query, shared, t),
        num_warps=4,
    )  # fmt: skip
    return True
