"""Decode attention over latent vectors for Hopper: tiles are loaded while the preceding one is
processed.

Arithmetic, grid and results are those of :mod:`.decode`, and the bits are equal: the same tiles,
the same matmuls, each one chain over k, and the same operations per line. In that kernel, Triton
loads a tile after it has computed the preceding one. Here a producer warp loads through TMA into a
ring of tiles (:mod:`.prefill_sm90_warpgroups`), and a consumer warpgroup computes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..arguments import LatentKV
from ..attention.decode import token_of
from ..attention.online_softmax import Splits, ends_split, split_of
from ..attention.prefill_sm90_consumer import fold_factors, fold_sums, offsets_of, times
from .decode import segment_bounds, splits_in_first, worker_step
from .prefill_sm90 import descriptors, num_panels, ring_constants
from .prefill_sm90_warpgroups import STEP_N, Barriers, barriers, load_step

LINES = gl.constexpr(16)  # heads per program: the narrow side of the matrix instructions
_SHARED_BYTES = 224 << 10  # for queries, weights and the ring
_MOST_SLOTS = 4
# Registers per thread, averaged over both partitions: the producer gets 40, the consumer the rest.
MEAN_REGISTERS = 136


@gluon.jit
def _segment(segment, num_first, position, splits, IS_SPLIT: gl.constexpr):
    """First and end position of a segment."""
    begin = 0
    end = position + 1
    if IS_SPLIT:
        begin, end = segment_bounds(segment, num_first, position, splits)
    return begin, end


@gluon.jit
def _fold(total, state, factor):
    """:func:`..attention.online_softmax.fold` for turned states."""
    row_max, a, b = fold_factors(total[0], state[0], factor)
    row_sum = fold_sums(total[1], state[1], a, b, True)
    return row_max, row_sum, fold_sums(total[2], state[2], a, b, True)


@gluon.jit
def _attend(
    q_smem, ring, p_smem, bars, out, partial, stats, unit, token, position, group, worker, step,
    num_first, num_segments, max_splits, factor, splits,
    H: gl.constexpr, R: gl.constexpr, PANELS: gl.constexpr, GROUP: gl.constexpr,
    SLOTS: gl.constexpr, IS_SPLIT: gl.constexpr,
):  # fmt: skip
    """The consumer warpgroup: :func:`.tiles.attend_vectors` for each segment."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LINES, 16])
    LINE: gl.constexpr = gl.SliceLayout(0, ACC)
    PANEL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GROUPS: gl.constexpr = PANELS // GROUP
    dtype: gl.constexpr = ring.dtype
    ones = gl.full([64, STEP_N], 1.0, dtype, gl.DotOperandLayout(0, ACC, 2))
    offsets = gl.arange(0, STEP_N, gl.SliceLayout(1, ACC))
    heads = group * LINES + gl.arange(0, LINES, LINE)
    is_line = heads < H
    dims = gl.arange(0, R, gl.SliceLayout(1, ACC))[:, None]
    mask = (dims < R) & is_line[None, :]
    done = 0
    if worker < num_segments:
        mbarrier.wait(bars.q_full, 0)
    for segment in range(worker, num_segments, step):
        begin, end = _segment(segment, num_first, position, splits, IS_SPLIT)
        row_max = gl.full([LINES], float("-inf"), gl.float32, LINE)
        row_sum = gl.zeros([64, LINES], gl.float32, ACC)
        acc = gl.zeros([R, LINES], gl.float32, ACC)
        total = (row_max, row_sum, acc)
        for start in range(begin, end, STEP_N):
            slot = done % SLOTS
            phase = done // SLOTS & 1
            scores = gl.zeros([STEP_N, LINES], gl.float32, ACC)
            for panel in gl.static_range(PANELS):
                if panel % GROUP == 0:
                    mbarrier.wait(bars.full.index(slot * GROUPS + panel // GROUP), phase)
                queries = q_smem.index(panel).permute((1, 0))
                scores = warpgroup_mma(
                    ring.index(slot * PANELS + panel), queries, scores, use_acc=panel > 0,
                    is_async=True,
                )  # fmt: skip
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = gl.where((start + offsets <= position)[:, None], scores, float("-inf"))
            new_row_max = gl.maximum(row_max, gl.max(scores, 0))
            base = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
            weights = gl.exp2(gl.fma(scores, factor, -(base * factor)[None, :])).to(dtype)
            rescale = gl.exp2((row_max - base) * factor)
            row_max = new_row_max
            p_smem.store(weights)
            if start + (STEP_N - 1) > position:
                # Vectors of unused slots may be NaN, but values must be finite.
                exists = start + gl.arange(0, STEP_N, gl.SliceLayout(1, PANEL)) <= position
                for panel in gl.static_range(PANELS - 1):
                    part = ring.index(slot * PANELS + panel)
                    values = part.load(PANEL)
                    part.store(gl.where(exists[:, None], values, gl.zeros_like(values)))
            fence_async_shared()
            vectors = ring.index(slot * PANELS)._reinterpret(dtype, [STEP_N, R], ring.layout)
            row_sum = warpgroup_mma(ones, p_smem, times(row_sum, rescale, True), is_async=True)
            acc = times(acc, rescale, True)
            acc = warpgroup_mma(vectors.permute((1, 0)), p_smem, acc, is_async=True)
            row_sum, acc = warpgroup_mma_wait(0, deps=(row_sum, acc))
            mbarrier.arrive(bars.empty.index(slot), count=1)
            done += 1
            if ends_split(start + STEP_N, splits):
                total = _fold(total, (row_max, row_sum, acc), factor)
                row_max = gl.full_like(row_max, float("-inf"))
                row_sum = gl.zeros_like(row_sum)
                acc = gl.zeros_like(acc)
        # The last split if its end was not reached; otherwise an empty state, which changes
        # nothing.
        row_max, row_sum, acc = _fold(total, (row_max, row_sum, acc), factor)
        if IS_SPLIT:
            index = (unit.to(gl.int64) * H + heads) * max_splits + segment
            gl.store(partial + index[None, :] * R + dims, acc, mask=mask)
            gl.store(stats + index * 2, row_max, mask=is_line)
            gl.store(stats + index * 2 + 1, gl.max(row_sum, 0), mask=is_line)
        else:
            result = times(acc, 1.0 / gl.max(row_sum, 0), True).to(dtype)
            target = out + (token.to(gl.int64) * H + heads)[None, :] * R + dims
            gl.store(target, result, mask=mask)


@gluon.jit
def _load(
    q_desc, c_desc, table, q_smem, ring, bars, token, position, group, worker, step, num_first,
    num_segments, splits,
    H: gl.constexpr, PAGE: gl.constexpr, PANELS: gl.constexpr, GROUP: gl.constexpr,
    SLOTS: gl.constexpr, IS_SPLIT: gl.constexpr,
):  # fmt: skip
    """The producer warp: load queries, and the vectors of each segment step by step."""
    if worker < num_segments:
        mbarrier.expect(bars.q_full, PANELS * (LINES * 64 * 2))
        for panel in gl.static_range(PANELS):
            at = [token * H + group * LINES, panel * 64]
            tma.async_copy_global_to_shared(q_desc, at, bars.q_full, q_smem.index(panel))
    done = 0
    for segment in range(worker, num_segments, step):
        begin, end = _segment(segment, num_first, position, splits, IS_SPLIT)
        for start in range(begin, end, STEP_N):
            slot = done % SLOTS
            phase = (done // SLOTS & 1) ^ 1
            load_step(c_desc, table, start, position, ring, slot, bars, phase, PAGE, PANELS, GROUP)
            done += 1


@gluon.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=["table_stride", "num_rows", "num_workers", "max_splits"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)
def latent_decode_sm90_kernel(
    q_desc,  # [T * H, R + P], boxes [LINES, 64]
    c_desc,  # [slots, R + P], boxes [min(PAGE, 64), 64]
    out, partial, stats, starts, contexts, tables, table_rows, factor, table_stride, num_rows,
    num_workers, max_splits,
    H: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr, SPLIT_CHANGE: gl.constexpr,
    BY_TOKEN: gl.constexpr, IS_SPLIT: gl.constexpr, PDL: gl.constexpr,
    GROUP: gl.constexpr,  # panels of 64 elements that share a barrier
    SLOTS: gl.constexpr,  # of the ring
):  # fmt: skip
    """Same as :func:`.decode.latent_decode_kernel`, with its grid and arguments."""
    PANELS: gl.constexpr = R // 64 + 1
    GROUPS: gl.constexpr = (H + LINES - 1) // LINES
    SPLITS: gl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = c_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [PANELS, LINES, 64], OPERAND)
    ring = gl.allocate_shared_memory(dtype, [SLOTS * PANELS, STEP_N, 64], OPERAND)
    p_smem = gl.allocate_shared_memory(dtype, [STEP_N, LINES], gl.NVMMASharedLayout(32, 16, 2))
    full, empty = barriers(SLOTS * (PANELS // GROUP), 1), barriers(SLOTS, 1)
    q_full = barriers(1, 1).index(0)
    fence_async_shared()
    bars = Barriers(full, empty, q_full, q_full, q_full, q_full, q_full, q_full)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    unit = gl.program_id(1)
    group = gl.program_id(0) % GROUPS
    worker = gl.program_id(0) // GROUPS
    row, token, position = token_of(starts, contexts, num_rows, unit, BY_TOKEN, offsets_of)
    num_first = splits_in_first(position, num_workers, SPLITS)
    num_segments = 1
    step = 1
    if IS_SPLIT:
        num_segments = split_of(position, SPLITS) + 2 - num_first
        step = worker_step(worker, num_workers, num_segments)
    if position < 0:
        num_segments = 0
        step = 1
        if BY_TOKEN and worker == 0:  # padding
            _store_zeros(out, token, group, H, R)
    table_row = gl.load(table_rows + gl.minimum(row, num_rows - 1))
    table = tables + table_row.to(gl.int64) * table_stride
    gl.warp_specialize(
        [
            (_attend, (
                q_smem, ring, p_smem, bars, out, partial, stats, unit, token, position, group,
                worker, step, num_first, num_segments, max_splits, factor, SPLITS, H, R, PANELS,
                GROUP, SLOTS, IS_SPLIT,
            )),
            (_load, (
                q_desc, c_desc, table, q_smem, ring, bars, token, position, group, worker, step,
                num_first, num_segments, SPLITS, H, PAGE, PANELS, GROUP, SLOTS, IS_SPLIT,
            )),
        ],
        [1],
        [40],  # registers per thread
    )  # fmt: skip


@gluon.jit
def _store_zeros(out, token, group, H: gl.constexpr, R: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    heads = group * LINES + gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
    target = out + ((token.to(gl.int64) * H + heads) * R)[:, None] + dims[None, :]
    zeros = gl.zeros([LINES, R], out.dtype.element_ty, LAYOUT)
    gl.store(target, zeros, mask=(heads < H)[:, None])


def serves(num_heads: int) -> bool:
    """Whether the heads fill exactly one program. With more heads, programs of :mod:`.decode` share
    a tile."""
    return num_heads <= LINES.value


def constants_of(rank: int) -> dict[str, int]:
    """The constants of this kernel alone."""
    panels = num_panels(rank)
    # The remainder after queries (64 elements of 2 bytes per panel and line) and weights.
    num_free = _SHARED_BYTES - (panels * 64 + STEP_N.value) * LINES.value * 2
    ring = ring_constants(panels, num_free)
    return ring | {"SLOTS": min(ring["SLOTS"], _MOST_SLOTS)}


def launch(
    query: Tensor, kv: LatentKV, out: Tensor, partial: Tensor, stats: Tensor, factor: float,
    grid: tuple[int, int], num_workers: int, max_splits: int, constants: dict[str, Any],
) -> None:  # fmt: skip
    """Compute the results of :func:`.decode.latent_decode_kernel`, for a batch that
    :func:`.prefill_sm90.is_served` accepts and heads that this kernel :func:`serves`.

    Args:
        query: ``[T, H, R + P]`` and out: ``[T, H, R]``, contiguous, on a GPU.
        partial, stats, grid, num_workers, max_splits: as for that kernel.
        constants: those shared by both kernels.
    """
    q_desc, c_desc = descriptors(query, kv.cache, LINES.value)
    latent_decode_sm90_kernel[grid](
        q_desc, c_desc, out, partial, stats, *kv[1:], factor, kv.block_tables.stride(0),
        len(kv.context_lens), num_workers, max_splits,
        PAGE=kv.cache.shape[1],
        **constants,
        **constants_of(out.shape[2]),
        num_warps=4,
        maxnreg=MEAN_REGISTERS,
        launch_pdl=constants["PDL"],
    )  # fmt: skip
