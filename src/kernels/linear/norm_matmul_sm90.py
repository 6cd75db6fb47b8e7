"""RMSNorm and the matmul of few rows behind it as one kernel for Hopper.

At batch 1 a norm is a kernel that waits for one and is waited for by the next, for a microsecond
of work. Here each program of :mod:`.matmul_sm90`'s kernel adds the residual and
normalises all of its x itself, behind the same wait, while its weights are under way. That is the
same work 32 times or more, so it pays for few rows only.

Bits are those of :mod:`.rms_norm` and of the matmul alone: a row is spread over
four warps as there, which gives the same order of additions. Hence the bounds on K
(:func:`fits`): there a narrower or wider row has fewer or more warps.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..fused.dispatch import NormForm
from .matmul_sm90 import load_weights_async, store_outputs
from .matmul_sm90_launch import plan_launch
from .tuned_tiles import PrefetchTile

_BLOCK = 1024  # elements of a row, padded: 8 for each thread of four warps
MAX_ROWS = 4  # beyond, two launches are quicker


@gluon.jit(do_not_specialize=["num_rows"])
def normed_kernel(
    x,  # [M, K], as residual and hidden
    residual,
    norm_weight,  # [K]
    hidden,  # written: residual + x
    w_desc,  # [K / 64, HALVES, N, 64], boxes [ATOMS, HALVES, PART, 64]
    out,  # [M, N]
    num_rows,
    eps,
    N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr, PART: gl.constexpr,
    ROWS: gl.constexpr,  # M, padded to a power of two; at most 8
    ATOMS: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, FORM: gl.constexpr,
    PREFETCH_STAGES: gl.constexpr,  # stages of weights loaded before the wait
    LATE_TRIGGER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """``hidden = residual + x``, ``out = rms_norm(hidden, norm_weight, eps) @ weight.T``, with two
    HALVES ``silu(gate) * up``. Grid: ``(N / PART,)``.
    """
    if PDL and not LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    W_ROWS: gl.constexpr = HALVES * PART
    W_PIECES: gl.constexpr = ATOMS * W_ROWS // 8
    BYTES: gl.constexpr = ATOMS * W_ROWS * 128
    # Behind the last atom lies what its operand reads beyond: LEFT rows from its first on.
    LEFT: gl.constexpr = 64
    PIECES: gl.constexpr = STAGES * W_PIECES + (LEFT - W_ROWS) // 8
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])

    begin = gl.program_id(0) * PART
    weights = gl.allocate_shared_memory(gl.bfloat16, [PIECES, 8, 64], OPERAND)
    normed = gl.allocate_shared_memory(gl.bfloat16, [BLOCK // 8, 64], OPERAND)  # by atom, 8 rows
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    load_weights_async(weights, bars, w_desc, begin, W_PIECES, BYTES, 0, PREFETCH_STAGES)
    k = gl.arange(0, BLOCK, gl.SliceLayout(0, LINE))
    scale = gl.load(norm_weight + k, mask=k < K, other=0.0).to(gl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()

    row = gl.arange(0, ROWS, gl.SliceLayout(1, LINE))
    mask = (row < num_rows)[:, None] & (k < K)[None, :]
    places = row[:, None] * K + k[None, :]
    h = gl.load(x + places, mask=mask, other=0.0)
    more = gl.load(residual + places, mask=mask, other=0.0)
    load_weights_async(weights, bars, w_desc, begin, W_PIECES, BYTES, PREFETCH_STAGES, STAGES)
    h = h.to(gl.float32) + more.to(gl.float32)
    rounded = h.to(gl.bfloat16)
    if gl.program_id(0) == 0:
        gl.store(hidden + places, rounded, mask=mask)
    # As _norm_kernel and scaled of rms_norm.
    h = rounded.to(gl.float32)
    mean = gl.sum(h * h, 1) * (1.0 / K)
    y = h * gl.rsqrt(mean + eps)[:, None]
    if FORM == "rounded":
        y = y.to(gl.bfloat16).to(gl.float32)
    if FORM == "plus_one":
        scale = scale + 1.0
    y = (y * scale[None, :]).to(gl.bfloat16)
    # The unit of the swizzle is 8 rows: the same ones several times.
    y = y.reshape([ROWS, BLOCK // 64, 64]).permute([1, 0, 2])
    y = y.reshape([BLOCK // 64, 1, ROWS, 64]).broadcast_to([BLOCK // 64, 8 // ROWS, ROWS, 64])
    normed.store(y.reshape([BLOCK // 8, 64]))
    fence_async_shared()

    total = warpgroup_mma_init(gl.zeros([LEFT, 8], gl.float32, SUM))
    for slot in gl.static_range(STAGES):
        mbarrier.wait(bars.index(slot), 0)
        for atom in gl.static_range(slot * ATOMS, (slot + 1) * ATOMS):
            left = weights.index(atom * (W_ROWS // 8))
            total = warpgroup_mma(
                left._reinterpret(gl.bfloat16, [LEFT, 64], OPERAND),
                normed.slice(atom * 8, 8).permute((1, 0)),
                total,
                is_async=True,
            )
    total = warpgroup_mma_wait(0, deps=(total,))
    store_outputs(total, out, begin, 0, num_rows, N, HALVES, PART, 8)


def serves(num_rows: int, k_size: int, tile: PrefetchTile, has_gate: bool) -> bool:
    """Whether the kernel computes so many rows, of this tile."""
    return 0 < num_rows <= MAX_ROWS and fits(k_size, tile, has_gate)


def fits(k_size: int, tile: PrefetchTile, has_gate: bool) -> bool:
    """Whether the kernel takes rows of ``k_size``, cut like this: all of K in shared memory."""
    return (
        _BLOCK // 2 < k_size <= _BLOCK
        and tile.stages * tile.atoms * 64 == k_size
        and tile.part * (2 if has_gate else 1) <= 64
    )


def matmul(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    form: NormForm,
    weight: Tensor,
    *,
    tile: PrefetchTile,
    has_gate: bool = False,
    overlap: bool = True,
) -> tuple[Tensor, Tensor]:
    """(``norm(h) @ weight.T``, h) with h = ``residual + x``; one launch.

    Args:
        x, residual: bfloat16 ``[M, K]`` on a Hopper GPU, contiguous; M at most :data:`MAX_ROWS`.
        norm_weight: ``[K]``, a parameter like ``weight``: both are read before the wait. eps and
            form as of :func:`.dispatch.add_rms_norm`.
        weight, has_gate, overlap: as of :func:`.matmul_sm90.matmul`.
        tile: one that :func:`fits`.

    Returns:
        ``[M, N]`` and ``[M, K]``, contiguous.

    Raises:
        ValueError: shapes do not fit each other or the tile.
    """
    num_rows, k_size = x.shape
    num_outs = len(weight) // (2 if has_gate else 1)
    if not 0 < num_rows <= MAX_ROWS or weight.shape[1] != k_size or residual.shape != x.shape:
        raise ValueError(
            f"x {list(x.shape)} does not fit residual {list(residual.shape)}, weight "
            f"{list(weight.shape)} or {MAX_ROWS} rows"
        )
    if not fits(k_size, tile, has_gate):
        raise ValueError(f"{tile} does not fit rows of {k_size}")
    launch = plan_launch(num_rows, num_outs, k_size, has_gate, tile, overlap)
    out, hidden = x.new_empty(num_rows, num_outs), x.new_empty(num_rows, k_size)
    normed_kernel[(launch.num_programs,)](
        x, residual, norm_weight, hidden, launch.describe(weight), out, num_rows, eps,
        **constants_of(launch.constants, num_rows, form),
        num_warps=4,
        # As for the norm alone. In the gate, which has it otherwise without a norm, it concerns
        # exp's last factor, a power of two, and the sum with 1: exact either way.
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip
    return out, hidden


def constants_of(
    matmul_constants: dict[str, object], num_rows: int, form: NormForm
) -> dict[str, object]:
    """The kernel's constants; ``matmul_constants``: those of the matmul alone."""
    names = (
        "N",
        "K",
        "HALVES",
        "PART",
        "ATOMS",
        "STAGES",
        "PREFETCH_STAGES",
        "LATE_TRIGGER",
        "PDL",
    )
    chosen = {"ROWS": max(2, triton.next_power_of_2(num_rows)), "BLOCK": _BLOCK, "FORM": form}
    return {name: matmul_constants[name] for name in names} | chosen
