"""Matrix products ``x @ weight.T`` as one Triton kernel that sums in the plain order.

Every output is one float32 accumulator that walks K from 0 to its end, whatever the tile, the
number of rows or the number of programs, and gets the bias last. With one tile a row's result does
not depend on how many rows share the step. With several it did not on an H100 for 16-bit dtypes and
rows of whole 16-byte units; nothing is claimed for others
(:func:`pagespec.kernels.linear_tiles.has_one_tile`). On Hopper a bf16 result equals what cuBLAS
computes when it may not split K, bit for bit (:func:`pagespec.kernels.gpu_linear.sweep` looks for
itself).

With few rows the time is that of reading the weight, and the start of the kernel counts. The
weight does not depend on the kernel before: where dependent launch exists, a program asks for its
first weights to be brought into L2 *before* it waits for that kernel. They go to L2 rather than to
registers, so that a weight written by an earlier kernel is still read as written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagespec.kernels.triton_activation import silu
from pagespec.kernels.triton_store import has_dependent_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one product is cut.

    No field changes the bits of a result where the dtype has 16 bits and rows are whole 16-byte
    units; for other operands that is not claimed. ``prefetch_k`` never does.

    Attributes:
        block_m, block_n, block_k: rows, outputs and summands of a tile; powers of two.
        num_stages: tiles under way at once, plus one. num_warps: of a program.
        prefetch_k: summands of the program's weights that are asked for before waiting for the
            kernel before; 0 for none.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    prefetch_k: int = 0


@triton.jit
def _silu_mul(gate, up, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up, each rounded to the operands' dtype, as two kernels of torch leave it."""
    activated = silu(gate.to(tl.float32), INTERPRETED).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _fold(rows, columns, total, INTERPRETED: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + rows @ columns."""
    if INTERPRETED:  # NumPy knows no bfloat16
        rows, columns = rows.to(tl.float32), columns.to(tl.float32)
    return tl.dot(rows, columns, total, input_precision=PRECISION)


@triton.jit
def _add_bias(total, bias):  # type: ignore[no-untyped-def]
    """total + bias, after all summands of total.

    Where one tile holds all of K there is no loop, and Triton makes ``dot + bias`` a dot that
    starts from the bias: other bits than from a tile with a loop. It leaves this one alone.
    """
    return tl.fma(total, tl.full(total.shape, 1.0, tl.float32), bias.to(tl.float32)[None, :])


@triton.jit
def _prefetch(  # type: ignore[no-untyped-def]
    weight,
    stride,
    begin,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Ask for ``[ROWS, WIDTH]`` elements from row ``begin`` on to be brought into L2."""
    PIECE: tl.constexpr = ROWS * WIDTH // LANES  # one a thread
    lane = tl.arange(0, LANES)
    row = tl.minimum(begin + lane % ROWS, N - 1)
    at = weight + row.to(tl.int64) * stride + lane // ROWS * PIECE
    size = tl.full([LANES], PIECE * (weight.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_rows, K]
    weight,  # [N, K], or [2 N, K] with a gate
    bias,  # [N] or [2 N], or None
    out,  # [num_rows, N], contiguous
    num_rows,
    x_stride,
    w_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_GATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that share weights lie beside each other, so that one read from memory serves them.
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    begin_n = program // num_tiles_m * BLOCK_N
    if PDL:
        if PREFETCH_K > 0:
            _prefetch(weight, w_stride, begin_n, N, BLOCK_N, PREFETCH_K, LANES)
            if HAS_GATE:
                ups_from = weight + tl.cast(N, tl.int64) * w_stride
                _prefetch(ups_from, w_stride, begin_n, N, BLOCK_N, PREFETCH_K, LANES)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    m = program % num_tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = begin_n + tl.arange(0, BLOCK_N)
    is_row = m[:, None] < num_rows
    is_out = is_row & (n[None, :] < N)
    n_read = n
    if N % BLOCK_N:
        n_read = tl.minimum(n, N - 1)  # what is computed beyond the end is not stored
    k = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + n_read.to(tl.int64)[None, :] * w_stride + k[:, None]
    if HAS_GATE:
        up_at = w_at + tl.cast(N, tl.int64) * w_stride

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if HAS_GATE:
        up_total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, K, BLOCK_K):
        if K % BLOCK_K:
            in_k = begin + k < K
            rows = tl.load(x_at + begin, mask=is_row & in_k[None, :], other=0.0)
            columns = tl.load(w_at + begin, mask=in_k[:, None], other=0.0)
        else:
            rows = tl.load(x_at + begin, mask=is_row, other=0.0)
            columns = tl.load(w_at + begin)
        total = _fold(rows, columns, total, INTERPRETED, PRECISION)
        if HAS_GATE:
            if K % BLOCK_K:
                ups = tl.load(up_at + begin, mask=in_k[:, None], other=0.0)
            else:
                ups = tl.load(up_at + begin)
            up_total = _fold(rows, ups, up_total, INTERPRETED, PRECISION)

    if bias is not None:
        total = _add_bias(total, tl.load(bias + n_read))
    result = total.to(out.dtype.element_ty)
    if HAS_GATE:
        if bias is not None:
            up_total = _add_bias(up_total, tl.load(bias + n_read + N))
        result = _silu_mul(result, up_total.to(out.dtype.element_ty), INTERPRETED)
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], result, mask=is_out)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Tile,
    has_gate: bool = False,
    overlap: bool | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, rounded; one launch, any number of rows.

    bfloat16, float16, or float32 (multiplied as such, not as TF32); sums in float32, the bias
    added before rounding, as ``F.linear`` does.

    Args:
        x: ``[M, K]``. Rows may be strided.
        weight: ``[N, K]``, or ``[2 N, K]`` (gate, then up) with a gate. Rows may be strided.
        bias: ``[N]`` (``[2 N]``), or None.
        tile: sizes; :class:`Tile` says when they are without influence on the result.
        has_gate: whether to return ``silu(gate) * up`` of the products with the two halves, each
            operation rounded to the dtype.
        overlap: whether to start before the kernel before has ended; None: where the GPU can.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
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
    pdl = has_dependent_launch(x.device) if overlap is None else overlap
    lanes = 32 * tile.num_warps
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outs, tile.block_n),)
    _linear_kernel[grid](
        x,
        weight,
        bias if bias is None else bias.contiguous(),
        out,
        num_rows,
        x.stride(0),
        weight.stride(0),
        N=num_outs,
        K=k_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        HAS_GATE=has_gate,
        INTERPRETED=not x.is_cuda,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PREFETCH_K=_prefetch_width(weight, tile, lanes),
        LANES=lanes,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )
    return out


def _prefetch_width(weight: Tensor, tile: Tile, lanes: int) -> int:
    """``tile.prefetch_k`` if the pieces of all threads are within K and whole 16-byte units."""
    width = min(tile.prefetch_k, weight.shape[1])
    if tile.block_n > lanes or width * tile.block_n * weight.itemsize % (16 * lanes):
        return 0
    is_aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.itemsize % 16 == 0
    return width if is_aligned else 0
