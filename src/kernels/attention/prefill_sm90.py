"""Warp-specialised prefill attention for Hopper (FlashAttention-3, Shah et al. 2024).

Grid and arithmetic are those of :mod:`.prefill`, and the bits are equal: the same tiles of
``BLOCK_N`` positions in the same order, the same matmuls, each one chain over k, and the same
operations per row. The difference is the division of work among warps:

- A producer warp loads (:mod:`.prefill_sm90_producer`). Keys and values come through TMA into a
  ring of ``STAGES`` slots: slot s holds the keys of step s and the values of step s - 1, which are
  used together. A step is 64 positions: one tile, or two where heads above 128 have tiles of 32.
- Two consumer warpgroups have 64 lines each (:mod:`.prefill_sm90_consumer`). The softmax of a step
  overlaps with the scores of the next step and with the other warpgroup's matmuls.

Head sizes other than 64, 128 and 256 are padded with zeros, which TMA writes and which add exact
zeros to a score. With values of 256, a program has one half, as in :mod:`.prefill`: the
accumulators of all values would not fit its registers.

:func:`fits` lists the requirements of this kernel. Unowned slots may hold NaN. Scores of keys
beyond a query are masked. In the last step, each warpgroup zeroes values beyond ``last`` in shared
memory; both write the same zeros.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import e4m3
from ..arguments import PagedKV
from .online_softmax import Splits, count_at_most
from .prefill import num_leading_singles
from .prefill_sm90_consumer import (
    SCALE_ROWS,
    STEP_N,
    consume,
    lines_of,
    num_entries,
    offsets_of,
    store_zeros,
)
from .prefill_sm90_producer import convert, produce
from .tiling import Tiling

# Rows read together: enough for most batches at once. The width is fixed, because a kernel per
# width would cost seconds of compilation.
_ROWS = gl.constexpr(1024)
_SHARED_BYTES = 216 << 10  # for queries and the ring
_MAX_STAGES = 8
_MAX_VALUES = 128  # elements of a value that fit a warpgroup's registers
# Bytes of keys and values that stay in the L2 cache while programs read them at different rates.
# Tiles of longer contexts are ordered head by head: concurrent programs then read one head.
_CACHED_BYTES = 32 << 20


@gluon.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=[
        "window", "q_token_stride", "q_head_stride", "table_stride", "num_tokens", "num_rows",
    ],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)  # fmt: skip
def prefill_kernel(
    # [slots, HKV * DK], boxes [min(PAGE, BLOCK_N), 64]; padded: [slots, HKV, DK]; for e4m3,
    # pointers to the caches
    k_desc, v_desc, query, out, starts, contexts, tables, table_rows, sinks, factor, cap_in,
    cap_out, window,
    scales,  # float32 [HQ * DV / 128, T] if outputs are quantised, else None
    q_token_stride,  # in units of STEP elements
    q_head_stride, table_stride, num_tokens, num_rows,
    HQ: gl.constexpr, HKV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, STEP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr,
    SPLIT_CHANGE: gl.constexpr, PAGE: gl.constexpr,
    K_PAD: gl.constexpr,  # elements of a key in shared memory
    V_PAD: gl.constexpr,  # elements of a value per program
    PARTS: gl.constexpr, STAGES: gl.constexpr,
    HEAD_BY_HEAD: gl.constexpr,  # the longest context whose tiles are not ordered head by head
    IS_E4M3: gl.constexpr,
):  # fmt: skip
    """Same as :func:`.prefill.prefill_kernel`.

    Grid: ``(tiles * HKV * PARTS,)`` with ``T // (BLOCK_M // G) + B + 1`` tiles. Shapes: query
    ``[T, HQ, DK]``, out ``[T, HQ, DV]``, starts ``[B + 1]``, contexts ``[B]``, tables
    ``[rows, M]``, table_rows ``[B]``.
    """
    G: gl.constexpr = HQ // HKV
    BLOCK_Q: gl.constexpr = BLOCK_M // G
    num_singles = num_leading_singles(starts, num_rows, _ROWS, offsets_of)
    tile = gl.program_id(0) // (HKV * PARTS) + num_singles // BLOCK_Q + num_singles
    if tile > num_tokens // BLOCK_Q + num_rows:
        return
    head = gl.program_id(0) // PARTS % HKV
    if PARTS > 1:
        part = gl.program_id(0) % PARTS * V_PAD
    else:
        part: gl.constexpr = 0  # type: ignore[no-redef]
    row = count_at_most(starts, num_rows, tile, 1, BLOCK_Q, True, _ROWS, offsets_of) - 1
    begin = gl.load(starts + row)
    end = gl.load(starts + row + 1, mask=row < num_rows, other=0)
    end = gl.where(row < num_rows, end, num_tokens)
    num_queries = end - begin
    num_tiles = (num_queries + BLOCK_Q - 1) // BLOCK_Q
    behind = tile - (begin // BLOCK_Q + row)
    if behind >= num_tiles:
        return
    context = gl.load(contexts + row, mask=row < num_rows, other=0)
    if context > HEAD_BY_HEAD:
        nth = behind * HKV + head
        head = nth // num_tiles
        behind = nth % num_tiles
    first = (num_tiles - 1 - behind) * BLOCK_Q
    if (row < num_rows) & (num_queries == 1):  # served by the decode kernel
        return
    if row == num_rows:
        LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V_PAD, V_PAD // 8], [4, 1], [1, 0])
        tokens, heads, mask = lines_of(
            0, BLOCK_M, head, begin, first, num_queries, G, BLOCK_Q, LINE
        )
        store_zeros(out, scales, num_tokens, tokens, heads, mask, part, HQ, DV, V_PAD, LINE)
        return

    start = context - num_queries
    last = start + gl.minimum(first + BLOCK_Q, num_queries) - 1
    if window is not None:
        first_step = gl.maximum(start + first - window + 1, 0) // STEP_N
    else:
        first_step: gl.constexpr = 0  # type: ignore[no-redef]
    table = tables + gl.load(table_rows + row).to(gl.int64) * table_stride
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ENTRIES: gl.constexpr = STAGES * num_entries(BLOCK_N, V_PAD, K_PAD)
    dtype: gl.constexpr = gl.float16 if IS_E4M3 else query.dtype.element_ty
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M // 64, 64, K_PAD], OPERAND)
    ring = gl.allocate_shared_memory(dtype, [ENTRIES, BLOCK_N, V_PAD], OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    bars = (full, empty)
    task = (
        query, out, scales, sinks, head, begin, first, num_queries, num_tokens, start, last,
        q_token_stride, q_head_stride, window, factor, cap_in, cap_out,
    )  # fmt: skip
    if IS_E4M3:
        LINE_OF_SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        rows_of_scales: gl.constexpr = STAGES * SCALE_ROWS
        scales_smem = gl.allocate_shared_memory(
            gl.float32, [rows_of_scales, STEP_N], LINE_OF_SCALES
        )
    else:
        scales_smem: gl.constexpr = None  # type: ignore[no-redef]
    SPLITS: gl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    gl.warp_specialize(
        [
            (consume, (
                0, q_smem.index(0), ring, scales_smem, bars, task, part, first_step, HQ, G, DK, DV,
                STEP, BLOCK_M, SPLITS, STAGES,
            )),
            (consume, (
                1, q_smem.index(1), ring, scales_smem, bars, task, part, first_step, HQ, G, DK, DV,
                STEP, BLOCK_M, SPLITS, STAGES,
            )),
            (convert if IS_E4M3 else produce, (
                k_desc, v_desc, table, head, part, first_step, last, ring, scales_smem, full, empty,
                HKV, PAGE, K_PAD, DK, DV, STAGES,
            )),
        ],
        [4, 4 if IS_E4M3 else 1],
        # Registers per thread. The first partition also gets the registers that the second one
        # leaves.
        [224, 56] if IS_E4M3 else [240, 24],
    )  # fmt: skip


def fits(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, shared: dict[str, Any], t: Tiling
) -> bool:
    """Whether this kernel supports the call. ``shared``: arguments that all attention kernels
    share."""
    dim, v_dim = query.shape[2], e4m3.head_dim(v_cache)
    if e4m3.are_planes(k_cache):
        fits_cache = dim == v_dim and dim in (64, 128)
    else:
        fits_cache = query.dtype == k_cache.dtype == v_cache.dtype
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and fits_cache
        and 32 < v_dim <= dim <= 256
        and dim % 16 == v_dim % 16 == 0
        and shared["PAGE"] >= 16  # with smaller blocks, one warp cannot issue the copies in time
        and t.block_m == 128
        and t.block_n in (32, 64)
        and (t.near_split | t.far_split | t.split_change) % 128 == 0  # splits begin at even steps
        and query.shape[1] // k_cache.shape[2] <= 128
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (k_cache, v_cache))
    )


def constants_of(query: Tensor, k_cache: Tensor, shared: dict[str, Any]) -> dict[str, Any]:
    """The constants of this kernel that are not in ``shared``."""
    is_e4m3 = e4m3.are_planes(k_cache)
    k_pad, v_size = (max(64, triton.next_power_of_2(shared[name])) for name in ("DK", "DV"))
    v_pad = min(v_size, _MAX_VALUES)
    slot_bytes = STEP_N.value * (k_pad + v_pad) * query.itemsize
    stages = (_SHARED_BYTES - 128 * k_pad * query.itemsize) // slot_bytes
    return {
        "BLOCK_M": 128,
        "K_PAD": k_pad,
        "V_PAD": v_pad,
        "PARTS": v_size // v_pad,
        "STAGES": min(_MAX_STAGES, stages),
        "HEAD_BY_HEAD": _CACHED_BYTES // (shared["HKV"] * (k_pad + v_size) * k_cache.itemsize),
        "IS_E4M3": is_e4m3,
    }


def descriptor(x: Tensor, sizes: list[int], box: list[int]) -> TensorDescriptor:
    """A TMA descriptor of contiguous ``x``, viewed as ``sizes``, in boxes with rows of 64 elements
    of 2 bytes."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return TensorDescriptor(x, sizes, strides, box, gl.NVMMASharedLayout(128, 16, len(box)))


def _descriptor(cache: Tensor, box_rows: int) -> TensorDescriptor:
    """A TMA descriptor of a cache ``[blocks, page, heads, D]``. Boxes are 64 elements wide. If the
    last box of a head would reach into the next head, heads are a separate dimension, and TMA reads
    zeros after its end."""
    num_blocks, page, num_heads, dim = cache.shape
    if dim % 64 == 0 and dim & (dim - 1) == 0:
        sizes, box = [num_blocks * page, num_heads * dim], [box_rows, 64]
    else:
        sizes, box = [num_blocks * page, num_heads, dim], [box_rows, 1, 64]
    return descriptor(cache, sizes, box)


def launch(
    query: Tensor,
    kv: PagedKV,
    out: Tensor,
    shared: dict[str, Any],
    t: Tiling,
) -> bool:
    """Launch attention for all rows except rows of one query, which stay unchanged. Padding gets
    zeros.

    Args:
        query: ``[T, Hq, Dk]`` on a GPU. out: ``[T, Hq, Dv]``, contiguous, of the query's dtype, or
            e4m3 if there are scales.
        shared: arguments that all attention kernels share.

    Returns:
        Whether the kernel was launched: False if it does not support the GPU, the shapes or the
            model.
    """
    k_cache, v_cache, *metadata = kv
    if not (query.is_cuda and fits(query, k_cache, v_cache, shared, t)):
        return False
    (num_tokens, num_heads, _), num_rows = query.shape, len(kv.context_lens)
    page, num_kv_heads = k_cache.shape[1:3]
    num_tiles = num_tokens // (128 // (num_heads // num_kv_heads)) + num_rows + 1
    constants = constants_of(query, k_cache, shared)
    k_desc: Any = k_cache
    v_desc: Any = v_cache
    if not constants["IS_E4M3"]:
        k_desc, v_desc = (_descriptor(x, min(page, t.block_n)) for x in (k_cache, v_cache))
    prefill_kernel[(num_tiles * num_kv_heads * constants["PARTS"],)](
        k_desc, v_desc, query, out, *metadata, **shared, **constants, num_warps=4
    )
    return True
