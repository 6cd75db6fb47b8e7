"""Batch-invariant matmul ``x @ weight.T`` as a Triton kernel without split-K.

Every output is one float32 accumulator that runs over K from 0 to its end, whatever the tile, the
number of rows or the number of programs. The bias is added last. With one tile, a row's result does
not depend on the number of rows in the step. On an H100 the results of different tiles were equal
for 16-bit dtypes and rows of whole 16-byte units; for other operands this is not guaranteed
(:func:`.tiles.has_one_tile`). On Hopper a bf16 result equals that of cuBLAS without split-K, bit
for bit (:func:`.dispatch.sweep` verifies it).

With few rows, reading the weight takes the time. On Hopper both operands come through tensor
descriptors (TMA), whole tiles at a time. With ``swap_ab`` the weight is the left operand of the
matrix unit, which takes at least 64 rows on the left: then the weight passes through no register.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import has_dependent_launch, overlap_options
from ..fused.rounding import EMULATE, silu


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile sizes of one matmul.

    No field changes the bits of a result if the dtype has 16 bits and rows are whole 16-byte units.
    For other operands this is not guaranteed.

    Attributes:
        block_m, block_n, block_k: rows, outputs and summands of a tile; powers of two.
        num_stages: tiles in flight at once, plus one. num_warps: warps of a program.
        swap_ab: compute the transpose, ``weight @ x.T``.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    swap_ab: bool = False


@triton.jit
def tile_begin(tile, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row of a tile of ROWS rows; 0 if there are fewer rows.

    The last tile ends with the last row, and overlaps the tile before it. TMA writes zeros where a
    box reaches beyond its tensor. On an H200 all multiprocessors together write about 1.5 TB/s of
    zeros, a third of the memory bandwidth. With 136 rows in tiles of 128, the matmuls of Qwen3-8B
    took up to 1.8 times as long as with 256 (docs/notes/matmul.md). Rows in two tiles are computed
    and stored twice, with the same bits.
    """
    return tl.maximum(tl.minimum(tile * ROWS, num_rows - ROWS), 0)


@triton.jit
def place_of_tile(  # type: ignore[no-untyped-def]
    num_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_TMA: tl.constexpr
):
    """(first row, first output) of this program's tile. Programs that share weights are adjacent,
    so that one read from memory serves them."""
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    if HAS_TMA:
        begin_m = tile_begin(tl.program_id(0) % num_tiles_m, num_rows, BLOCK_M)
    else:
        begin_m = tl.program_id(0) % num_tiles_m * BLOCK_M
    return begin_m, tl.program_id(0) // num_tiles_m * BLOCK_N


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    tiles, first, begin, at, mask, MASKED: tl.constexpr
):
    """The tile that starts at row ``first`` and summand ``begin``: by a descriptor, or from
    pointers ``at + begin`` if ``tiles`` is None; zeros beyond the ends."""
    if tiles is not None:
        loaded = tiles.load([first, begin])
    elif MASKED:
        loaded = tl.load(at + begin, mask=mask, other=0.0)
    else:
        loaded = tl.load(at + begin)
    return loaded


@triton.jit
def _silu_mul(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up, each operation rounded to the operands' dtype, as two torch kernels
    would."""
    activated = silu(gate.to(tl.float32)).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    rows,
    weights,
    total,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + rows @ weights.T, or its transpose."""
    if EMULATE:  # NumPy has no bfloat16
        rows, weights = rows.to(tl.float32), weights.to(tl.float32)
    if SWAP:
        total = tl.dot(weights, tl.trans(rows), total, input_precision=PRECISION)
    else:
        total = tl.dot(rows, tl.trans(weights), total, input_precision=PRECISION)
    return total


@triton.jit
def _add_bias(total, bias):  # type: ignore[no-untyped-def]
    """total + bias, after all summands of total.

    Where one tile holds all of K there is no loop, and Triton turns ``dot + bias`` into a dot that
    starts from the bias, which gives other bits than a tile with a loop. It does not transform this
    form.
    """
    return tl.fma(total, tl.full(total.shape, 1.0, tl.float32), bias.to(tl.float32))


@triton.jit
def finished(  # type: ignore[no-untyped-def]
    total, up_total, bias, n, N: tl.constexpr, SIDE: tl.constexpr, HAS_GATE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Accumulators of outputs ``n`` plus their bias, rounded; with a gate ``silu(gate) * up``.
    SIDE: the dimension of rows of x."""
    if bias is not None:
        total = _add_bias(total, tl.expand_dims(tl.load(bias + n), SIDE))
    result = total.to(DTYPE)
    if HAS_GATE:
        if bias is not None:
            up_total = _add_bias(up_total, tl.expand_dims(tl.load(bias + n + N), SIDE))
        result = _silu_mul(result, up_total.to(DTYPE))
    return result


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_rows, K]
    weight,  # [N, K], or [2 N, K] with a gate
    x_tiles,  # descriptors of the two, or None
    weight_tiles,
    bias,  # [N] or [2 N], or None
    out,  # [num_rows, N], contiguous
    num_rows,
    x_stride,
    w_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``, with a gate ``silu(gate) * up`` of its two halves.

    Grid: one program per tile of BLOCK_M rows by BLOCK_N outputs. Each sums over K in order,
        without split-K.
    """
    PRECISION: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin_m, begin_n = place_of_tile(num_rows, BLOCK_M, BLOCK_N, x_tiles is not None)
    m = begin_m + tl.arange(0, BLOCK_M)
    n = begin_n + tl.arange(0, BLOCK_N)
    n_read = n
    if N % BLOCK_N:
        n_read = tl.minimum(n, N - 1)  # results beyond the end are not stored
    is_row = m[:, None] < num_rows
    k = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + n_read.to(tl.int64)[:, None] * w_stride + k[None, :]
    up_at = w_at + tl.cast(N, tl.int64) * w_stride

    ROWS: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up_total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, K, BLOCK_K):
        in_k = (begin + k < K)[None, :]
        x_mask = is_row & in_k if K % BLOCK_K else is_row
        rows = load_tile(x_tiles, begin_m, begin, x_at, x_mask, True)
        weights = load_tile(weight_tiles, begin_n, begin, w_at, in_k, K % BLOCK_K > 0)
        total = _fold(rows, weights, total, SWAP, PRECISION)
        if HAS_GATE:
            ups = load_tile(weight_tiles, begin_n + N, begin, up_at, in_k, K % BLOCK_K > 0)
            up_total = _fold(rows, ups, up_total, SWAP, PRECISION)

    side: tl.constexpr = 1 if SWAP else 0  # the other dimension than that of x's rows
    DTYPE: tl.constexpr = out.dtype.element_ty
    result = finished(total, up_total, bias, n_read, N, side, HAS_GATE, DTYPE)
    m_out, n_out = tl.expand_dims(m, 1 - side), tl.expand_dims(n, side)
    target = out + m_out.to(tl.int64) * N + n_out
    tl.store(target, result, mask=(m_out < num_rows) & (n_out < N))


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Tile,
    has_gate: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``, rounded; one launch, any number of rows.

    bfloat16, float16, or float32 (multiplied in float32, not TF32). Accumulators are float32, and
    the bias is added before rounding, as in ``F.linear``.

    Args:
        x: ``[M, K]``. Rows may be strided.
        weight: ``[N, K]``, or ``[2 N, K]`` (gate, then up) with a gate. Rows may be strided.
        bias: ``[N]`` (``[2 N]``), or None.
        tile: sizes; :class:`Tile` states when they do not affect the result.
        has_gate: whether to return ``silu(gate) * up`` of the matmuls with the two halves, with
            each operation rounded to the dtype.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    num_rows, width = x.shape
    num_outs, k_size = weight.shape
    if has_gate:
        num_outs //= 2
    if width != k_size or x.dtype != weight.dtype:
        raise ValueError(
            f"x {list(x.shape)} {x.dtype} does not fit weight {list(weight.shape)} {weight.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)}: expected {list(weight.shape[:1])}")
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    x_tiles = weight_tiles = None
    if supports_tma(x) and supports_tma(weight):
        x_tiles = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k])
        weight_tiles = TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    _linear_kernel[grid](
        x, weight, x_tiles, weight_tiles, bias if bias is None else bias.contiguous(), out,
        num_rows, x.stride(0), weight.stride(0),
        N=num_outs, K=k_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SWAP=tile.swap_ab, HAS_GATE=has_gate, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


def supports_tma(matrix: Tensor) -> bool:
    """Whether a matrix can have a TMA descriptor: 16-byte units, on a GPU with TMA.

    float32 has none: its matmuls do not use the matrix unit.
    """
    if matrix.itemsize != 2 or matrix.data_ptr() % 16 or matrix.stride(0) * 2 % 16:
        return False
    return not matrix.is_cuda or has_dependent_launch(matrix.device)
