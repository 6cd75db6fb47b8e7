"""Grouped matmul of a mixture of experts: rows sorted by expert, each times its expert's weight.

A program computes one tile of one expert's rows and runs over K in order with one float32
accumulator, as :mod:`..matmul.matmul` does. So a row's bits depend neither on the number of rows of
its expert nor on its place among them. Grids depend only on shapes, so calls can be captured.

With few rows, reading the weights of the experts that have rows takes the time. So tiles are as in
that module: through tensor descriptors (TMA) where the GPU has them, with the weight as the left
operand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import Gpu, overlap_options
from ..matmul.matmul import Tile, _fold, _silu_mul, supports_tma
from ..matmul.tuned_tiles import _swapped, _tile

LATE_TRIGGER_ROWS = 32
"""Most rows for which a kernel lets the next one start only after its own wait: those of four
tokens with eight experts each (:func:`..device.triggers_dependents_late`)."""
AHEAD_ROWS = 2
"""The most weights that are prefetched before the wait: those of the experts of this many rows, an
eighth of those of a step of one token and one padding token. More would slow the preceding kernel
(docs/notes/experts.md)."""


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    base, weight_tiles, expert, begin_n, here, n, is_n, k, in_k, k_stride, n_stride,
    WIDTH: tl.constexpr, K: tl.constexpr, K_IS_INNER: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N, BLOCK_K]`` of an expert's weight, which begins at ``base``: its outputs n from
    ``begin_n`` on, at ``here + k``. A descriptor may include rows of the next expert beyond the
    end."""
    # One return statement: the compiler compares the types of all of them.
    if K_IS_INNER:
        if weight_tiles is not None:
            weights = weight_tiles.load([expert * WIDTH + begin_n, here])
        else:
            weights = tl.load(
                base + n[:, None] * n_stride + (here + k)[None, :],
                mask=is_n[:, None] & in_k[None, :],
                other=0.0,
            )
    elif weight_tiles is not None:
        weights = tl.trans(weight_tiles.load([expert * K + here, begin_n]))
    else:
        weights = tl.trans(
            tl.load(
                base + (here + k)[:, None] * k_stride + n[None, :] * n_stride,
                mask=in_k[:, None] & is_n[None, :],
                other=0.0,
            )
        )
    return weights


@triton.jit
def _prefetch(rows, NUM_BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch the first NUM_BYTES of each row that a pointer of ``rows`` addresses into the L2
    cache; both are whole units of 16 bytes. No instruction waits for it."""
    sizes = tl.full(rows.shape, NUM_BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [rows.to(tl.int64), sizes], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "x_stride"], do_not_specialize_on_alignment=["x", "offs"]
)
def _grouped_kernel(  # type: ignore[no-untyped-def]
    x, weight, x_tiles, weight_tiles, offs, out, num_rows,
    x_stride, expert_stride, k_stride, n_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    K_IS_INNER: tl.constexpr, HAS_GATE: tl.constexpr, PRECISION: tl.constexpr,
    READS_AHEAD: tl.constexpr,  # reads offs, and prefetches AHEAD_BYTES of each row of the weight
    AHEAD_BYTES: tl.constexpr, LATE_TRIGGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[r] = x[r] @ weight[e]`` for the rows r of expert e, which end at ``offs[e]``; with a
    gate ``silu(gate) * up`` of its two halves. Rows after the last expert's get zeros.

    Grid: (tiles of rows x tiles of N); those of one tile of rows are adjacent. Shapes: x ``[rows,
    K]``, weight ``[E, K, WIDTH]`` with any strides, WIDTH = N or 2 N with a gate, offs ``[E]``, out
    ``[rows, N]``. x_tiles and weight_tiles are descriptors of the two, or None: of ``[E * WIDTH,
    K]``, or if K is not inner ``[E * K, WIDTH]``.
    """
    if PDL and not LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL and not READS_AHEAD:
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // TILES_N
    begin_n = tl.program_id(0) % TILES_N * BLOCK_N
    # The rows after the last expert's are treated as rows of one more expert.
    experts = tl.arange(0, E_PADDED)
    # From the L2 cache: before the wait, the L1 cache may have old contents.
    begins = tl.load(
        offs + experts - 1, mask=(experts > 0) & (experts <= E), other=0, cache_modifier=".cg"
    )
    ends = tl.load(offs + experts, mask=experts < E, other=num_rows, cache_modifier=".cg")
    tiles_of = tl.where(experts <= E, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    last_tiles = tl.cumsum(tiles_of, 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    if expert > E:
        return
    is_it = experts == expert
    begin = tl.sum(tl.where(is_it, begins, 0), 0)
    end = tl.sum(tl.where(is_it, ends, 0), 0)
    first = begin + (tile - tl.sum(tl.where(is_it, last_tiles - tiles_of, 0), 0)) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    n = begin_n + tl.arange(0, BLOCK_N)
    base = weight + expert.to(tl.int64) * expert_stride
    if PDL and READS_AHEAD:
        if AHEAD_BYTES and expert < E:
            _prefetch(base + tl.minimum(n, N - 1).to(tl.int64) * n_stride, AHEAD_BYTES)
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    side: tl.constexpr = 1 if SWAP else 0  # the other dimension than that of x's rows
    m_out, n_out = tl.expand_dims(m, 1 - side), tl.expand_dims(n, side)
    target = out + m_out.to(tl.int64) * N + n_out
    is_ours = (m_out < end) & (n_out < N)
    ROWS: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    WIDTH: tl.constexpr = 2 * N if HAS_GATE else N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if expert == E:
        tl.store(target, total.to(out.dtype.element_ty), mask=is_ours)
        return
    k = tl.arange(0, BLOCK_K)
    for here in range(0, K, BLOCK_K):
        in_k = here + k < K
        if x_tiles is not None:  # may include rows of other experts, which are not stored
            rows = x_tiles.load([first, here])
        else:
            rows = tl.load(
                x + m.to(tl.int64)[:, None] * x_stride + (here + k)[None, :],
                mask=(m < end)[:, None] & in_k[None, :],
                other=0.0,
            )
        weights = _weights(
            base, weight_tiles, expert, begin_n, here, n, n < N, k, in_k,
            k_stride, n_stride, WIDTH, K, K_IS_INNER,
        )  # fmt: skip
        total = _fold(rows, weights, total, SWAP, PRECISION)
        if HAS_GATE:
            ups = _weights(
                base, weight_tiles, expert, begin_n + N, here, n + N, n < N, k, in_k,
                k_stride, n_stride, WIDTH, K, K_IS_INNER,
            )  # fmt: skip
            up_total = _fold(rows, ups, up_total, SWAP, PRECISION)
    result = total.to(out.dtype.element_ty)
    if HAS_GATE:
        result = _silu_mul(result, up_total.to(out.dtype.element_ty))
    tl.store(target, result, mask=is_ours)


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    has_gate: bool = False,
    has_old_offs: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """``x[begin:end] @ weight[e]`` for the rows of each expert e, as torch's ``grouped_mm``.

    Args:
        x: ``[S, K]``, sorted by expert, float32, bfloat16 or float16 (float32 is multiplied in
            float32, not TF32). weight: ``[E, K, N]``, any strides, of the same dtype.
        offs: int32 ``[E]``, the end of each expert's rows. Rows after the last get zeros.
        has_gate: whether N is twice that of the result, which is ``silu(gate) * up`` of the two
            halves, each operation rounded to the dtype.
        has_old_offs: whether another call with as many rows and the same ``offs`` comes before.
            With few rows, that call lets no later kernel start before ``offs`` is written. So this
            call reads ``offs``, and prefetches a part of the weights that it needs, before its
            wait.
        tile: a tile to use instead of :func:`choose_grouped_tile`'s.

    Returns:
        ``[S, N]``, ``[S, N / 2]`` with a gate, contiguous.
    """
    num_rows, k_size = x.shape
    num_experts, _, num_outs = weight.shape
    if has_gate:
        num_outs //= 2
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    if tile is None:
        card = Gpu.of(x.device)
        tile = choose_grouped_tile(num_rows, num_experts, x.itemsize, has_gate, card)
    k_is_inner = weight.stride(1) == 1
    x_tiles = weight_tiles = None
    matrix = _as_matrix(weight, k_is_inner)
    # If N is inner, the last tile along K must not reach into the next expert.
    ends_with_tile = k_is_inner or k_size % tile.block_k == 0
    if matrix is not None and ends_with_tile and supports_tma(x) and supports_tma(matrix):
        block = [tile.block_n, tile.block_k] if k_is_inner else [tile.block_k, tile.block_n]
        x_tiles = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k])
        weight_tiles = TensorDescriptor.from_tensor(matrix, block)
    # One tile more than the full ones for each expert with rows, and for the rows after the last.
    num_tiles = num_rows // tile.block_m + min(num_experts + 1, num_rows)
    is_late = num_rows <= LATE_TRIGGER_ROWS
    reads_ahead = is_late and has_old_offs
    ahead_bytes = 0
    if reads_ahead and weight_tiles is not None and k_is_inner:
        # The fraction of the weight's rows to prefetch, in whole lines.
        share = min(1.0, AHEAD_ROWS / num_rows)
        ahead_bytes = int(k_size * x.itemsize * share) // 128 * 128
    _grouped_kernel[(num_tiles * triton.cdiv(num_outs, tile.block_n),)](
        x, weight, x_tiles, weight_tiles, offs, out, num_rows,
        x.stride(0), weight.stride(0), weight.stride(1), weight.stride(2),
        N=num_outs,
        K=k_size,
        E=num_experts,
        E_PADDED=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SWAP=tile.swap_ab,
        K_IS_INNER=k_is_inner,
        HAS_GATE=has_gate,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        READS_AHEAD=reads_ahead,
        AHEAD_BYTES=ahead_bytes,
        LATE_TRIGGER=is_late,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


def _as_matrix(weight: Tensor, k_is_inner: bool) -> Tensor | None:
    """``[E * N, K]`` or ``[E * K, N]`` of a weight ``[E, K, N]`` without gaps, else None."""
    stored = weight.transpose(1, 2) if k_is_inner else weight
    return stored.flatten(0, 1) if stored.is_contiguous() else None


def choose_grouped_tile(
    num_rows: int, num_experts: int, itemsize: int, has_gate: bool, card: Gpu
) -> Tile:
    """The tile for ``num_rows`` rows that the experts share. It does not affect the result.

    The fastest at the shape of Qwen3-30B-A3B on an H200 for 1, 64, 256 and 8,192 tokens
    (docs/notes/experts.md), by the average number of rows per expert.

    Args:
        itemsize: bytes per element. card: the GPU.
    """
    if itemsize == 4:
        return _tile(16, 32, 32, 3)
    average = num_rows / num_experts
    if average > 128:
        return _tile(128, 128 if card.is_large or not has_gate else 64, 64, 3, 8)
    if not card.is_large:
        return _tile(16 if average <= 16 else 64, 64, 64, 3)
    if average <= 8:
        return _swapped(16, 64, 128, 3) if has_gate else _swapped(16, 128, 64, 5)
    if average <= 24:
        return _swapped(32, 64, 128, 5) if has_gate else _swapped(32, 128, 64, 5)
    return _tile(64, 64, 64, 3)
