"""``x @ weight.T`` in float32 from 16-bit operands, as a Triton kernel: a router's logits, which
transformers computes from float32 copies of both.

A multiplication of two bfloat16 or float16 elements is exact in float32, so the copies add nothing;
only the additions matter. The matrix unit truncates sums, which over all of K gives an error twenty
times that of a float32 matmul (docs/notes/mla.md). So it sums 128 summands at a time, from zero,
and each partial sum is added to the total in float32 with normal rounding.

A result has one order of additions, whatever the tile: partial sums of 128 in the order of K. The
tile determines how many of them are in flight at once, not the order in which they are added.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..device import Gpu, as_rows, overlap_options
from ..fused.rounding import EMULATE
from ..jit.parallel_build import may_skip_launches
from .matmul import Tile, load_tile
from .tuned_tiles import _tile

PART = 128
"""Summands that the matrix unit sums by itself. The same for all tiles, because it determines the
order."""
_ROW_UNIT = 8  # elements of 16 bytes: other rows may have other bits in another tile (tiles.py)


# Several parts of 128 summands are loaded and multiplied at once (block_k). The chain of matrix
# instructions of one part is serial, and few warps have registers for several.
TILES = (
    _tile(128, 128, PART, 3, 8),
    _tile(64, 64, PART, 4),
    _tile(32, 32, 2 * PART, 4),
    _tile(16, 16, 4 * PART, 4),
)
# For GPUs with less shared memory than an H100.
_SMALL_TILES = (_tile(64, 64, PART, 3), _tile(32, 32, PART, 3), _tile(16, 16, 2 * PART, 3))


@triton.jit
def _prefetch(weight, n, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch rows ``n [BLOCK_N]`` of the weight into the L2 cache, in lines of 128 bytes."""
    line = tl.minimum(tl.arange(0, triton.next_power_of_2((K + 63) // 64)) * 64, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(weight + n[:, None] * K + line[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _wide_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_rows, K]
    weight,  # [N, K], contiguous
    out,  # float32 [num_rows, N], contiguous
    num_rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: ``(tiles of rows * tiles of outputs,)``. Tiles of the same rows are adjacent, so that
    one read from memory serves them."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m = tl.program_id(0) // TILES_N * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    # Results beyond the end are not stored.
    n_read = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        if BLOCK_M == 16:  # few rows: reading the weight takes the time
            _prefetch(weight, n_read, K)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_row = m[:, None] < num_rows
    k = tl.arange(0, PART)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + n_read[:, None] * K + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(0, K, PART * PARTS):
        for i in tl.static_range(PARTS):
            begin = group + i * PART
            in_k = (begin + k < K)[None, :]
            x_mask = is_row & in_k if K % (PART * PARTS) else is_row
            rows = load_tile(None, 0, begin, x_at, x_mask, True)
            weights = load_tile(None, 0, begin, w_at, in_k, K % (PART * PARTS) > 0)
            if EMULATE:  # NumPy has no bfloat16
                rows, weights = rows.to(tl.float32), weights.to(tl.float32)
            part = tl.dot(rows, tl.trans(weights))
            # Not ``total + part``: Triton turns that into a dot that starts from the total. Parts
            # beyond K are 0 and change nothing, because a total is never -0.
            total = tl.fma(total, tl.full(total.shape, 1.0, tl.float32), part)
    target = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, total, mask=is_row & (n[None, :] < N))


def choose_wide_tile(num_rows: int, num_outs: int, card: Gpu) -> Tile:
    """The largest tile that gives two fifths of the multiprocessors a program, else the smallest:
    larger tiles save repeated reads of rows and weights."""
    tiles = wide_tiles(num_outs, card)
    for tile in tiles:
        num_programs = -(-num_rows // tile.block_m) * -(-num_outs // tile.block_n)
        if 5 * num_programs >= 2 * card.num_sms:
            return tile
    return tiles[-1]


def wide_tiles(num_outs: int, card: Gpu) -> list[Tile]:
    """All tiles for a weight, largest first, without those that are more than half empty."""
    tiles = TILES if card.is_large else _SMALL_TILES
    return [tile for tile in tiles if tile.block_n < 2 * num_outs or tile is tiles[-1]]


def wide_matmul(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """``x @ weight.T`` in float32; one launch, any number of rows.

    Args:
        x: bfloat16 or float16 ``[M, K]``. Rows may be strided.
        weight: ``[N, K]`` of the same dtype, contiguous; a parameter: it may be read before the
            kernels queued before have ended.

    Returns:
        float32 ``[M, N]``, contiguous.
    """
    (num_rows, k_size), num_outs = x.shape, len(weight)
    out = torch.empty(num_rows, num_outs, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    _wide_kernel[grid](
        x, weight, out, num_rows, x.stride(0),
        N=num_outs, K=k_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PART=PART,
        PARTS=tile.block_k // PART, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


def fits(weight: Tensor) -> bool:
    """Whether :func:`wide_linear` takes a weight: 16 bits, whole 16-byte units a row."""
    return (
        weight.dim() == 2
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % _ROW_UNIT == 0
        and weight.is_contiguous()
    )


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear(x.float(), weight.float())`` with another order of additions, which is the same
    for all row counts.

    Args:
        x: bfloat16 or float16 ``[..., K]``.
        weight: ``[N, K]`` of the same dtype, accepted by :func:`fits`; a parameter, as in
            :func:`wide_matmul`.

    Returns:
        float32 ``[..., N]``.
    """
    if x.device.type == "cpu":
        return F.linear(x.float(), weight.float())
    rows, card = as_rows(x), Gpu.of(x.device)
    if may_skip_launches():
        # During compilation for later steps with other row counts, compile all tiles.
        for tile in wide_tiles(len(weight), card):
            wide_matmul(rows, weight, tile)
    out = wide_matmul(rows, weight, choose_wide_tile(len(rows), len(weight), card))
    return out.view(*x.shape[:-1], len(weight))
