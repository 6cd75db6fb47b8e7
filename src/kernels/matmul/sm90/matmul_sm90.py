"""Matmul of few rows for Hopper that prefetches its weight before the previous kernel has ended.

A step of few rows is a chain of short kernels, each of which waits for the previous one. A matmul
in the chain mostly waits for its weight, which does not depend on these kernels. Triton cannot load
one operand before the wait and the other after it; Gluon can. Here every program loads all of its
weights that fit in shared memory, waits (programmatic dependent launch), and then loads x. With
very few rows some weights are loaded after the wait, because they would delay the previous kernel's
loads (:func:`stages_ahead`). So **weights must be older than the previous kernel**: parameters,
never computed.

A program owns ``part`` rows of the weight (of each half, with a gate) and ``x_rows`` rows of x. It
runs over K from 0 to the end with one float32 accumulator: wgmma of 64 rows, with the weight as the
left operand, by one or two warpgroups. If it owns fewer rows of the weight than wgmma takes, the
rest of the operand is whatever follows in shared memory. Those results are discarded, because rows
of a matmul do not mix. The order of summation, and therefore the bits, are those of
:mod:`..matmul`.

Shared memory is one block of 1 KiB units (8 rows of 128 bytes, the unit of the 128-byte swizzle):
the stages of the weight, each ``[atoms, halves, part, 64]``, then the stages of x, each
``[atoms, x_rows, 64]``, then padding that the last operand reads. An atom is 64 summands.

The norm before a matmul of up to four rows may be fused with it (:func:`norm_matmul`). At batch 1 a
separate norm kernel has a microsecond of work. Here each program adds the residual and normalises
all of x after the same wait, while its weights are loading. The bits are those of
:mod:`...fused.rms_norm` and of the separate matmul. A row is distributed over four warps as in that
norm, so additions have the same order. This bounds K (:func:`serves_norm`).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...collectives.communicator import PushTarget
from ...device import triggers_dependents_late
from ...fused.dispatch import NormForm
from ..matmul import _silu_mul, tile_begin
from ..tuned_tiles import PrefetchTile

_AHEAD_BYTES = 6 << 20
ATOM_BYTES = 128  # of a row
_BLOCK = gl.constexpr(1024)  # elements of a normalised row, padded: 8 for each thread of four warps
MAX_NORM_ROWS = 4  # beyond this, two launches are faster


@gluon.jit
def stage_of(smem, slot, FROM: gl.constexpr, PIECES: gl.constexpr, desc):
    """The units of shared memory for a box of ``desc``: PIECES per stage, the first stage at
    FROM."""
    stage = smem.index(FROM + slot * PIECES)
    return stage._reinterpret(smem.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def load_weights_async(
    smem, bars, w_desc, begin,
    PIECES: gl.constexpr, BYTES: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr,
):  # fmt: skip
    """Load stages FROM to TO of the weights from row ``begin`` on, each with a barrier for
    BYTES."""
    for slot in gl.static_range(FROM, TO):
        mbarrier.init(bars.index(slot), count=1)
    for slot in gl.static_range(FROM, TO):
        mbarrier.expect(bars.index(slot), BYTES)
        target = stage_of(smem, slot, 0, PIECES, w_desc)
        at = _place_of_weights(w_desc, slot, begin)
        tma.async_copy_global_to_shared(w_desc, at, bars.index(slot), target)


@gluon.jit
def _place_of_weights(w_desc, step, begin):
    """Coordinates of a stage's box. Gate and up, if present, are a dimension."""
    ATOMS: gl.constexpr = w_desc.block_type.shape[0]
    if len(w_desc.block_type.shape) == 4:
        at = [step * ATOMS, 0, begin, 0]
    else:
        at = [step * ATOMS, begin, 0]
    return at


@gluon.jit
def load_rows_async(smem, bars, x_desc, begin_m, FROM: gl.constexpr, PIECES: gl.constexpr):
    """Load all stages of x from row ``begin_m`` on. Their barriers already expect these bytes."""
    ATOMS: gl.constexpr = x_desc.block_type.shape[0]
    STAGES: gl.constexpr = bars.shape[0]
    for slot in gl.static_range(STAGES):
        target = stage_of(smem, slot, FROM, PIECES, x_desc)
        at = [slot * ATOMS, begin_m, 0]
        tma.async_copy_global_to_shared(x_desc, at, bars.index(slot), target)


@gluon.jit
def load_stage_async(
    smem, bars, slot, step, pred, w_desc, x_desc, begin, begin_m,
    W_PIECES: gl.constexpr, X_FROM: gl.constexpr, X_PIECES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Load both operands of ``step`` into a stage that has been released, if ``pred``."""
    bar = bars.index(slot)
    mbarrier.expect(bar, BYTES, pred=pred)
    target = stage_of(smem, slot, 0, W_PIECES, w_desc)
    at = _place_of_weights(w_desc, step, begin)
    tma.async_copy_global_to_shared(w_desc, at, bar, target, pred=pred)
    target = stage_of(smem, slot, X_FROM, X_PIECES, x_desc)
    at = [step * x_desc.block_type.shape[0], begin_m, 0]
    tma.async_copy_global_to_shared(x_desc, at, bar, target, pred=pred)


@gluon.jit
def _add_stage(
    smem,
    slot,
    total,
    OPERAND: gl.constexpr, ATOMS: gl.constexpr, W_ROWS: gl.constexpr, X_ROWS: gl.constexpr,
    X_FROM: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """total plus the matmuls of one stage's atoms, without waiting for them."""
    for atom in gl.static_range(ATOMS):
        weights = smem.index((slot * ATOMS + atom) * (W_ROWS // 8))
        rows = smem.index(X_FROM + (slot * ATOMS + atom) * (X_ROWS // 8))
        total = warpgroup_mma(
            weights._reinterpret(gl.bfloat16, [LEFT, 64], OPERAND),
            rows._reinterpret(gl.bfloat16, [X_ROWS, 64], OPERAND).permute((1, 0)),
            total,
            is_async=True,
        )
    return total


@gluon.jit
def store_outputs(
    total, out, begin, begin_m, num_rows,
    N: gl.constexpr, HALVES: gl.constexpr, PART: gl.constexpr, X_ROWS: gl.constexpr,
):  # fmt: skip
    """Round the accumulators ``total [LEFT, X_ROWS]``, gate and multiply them if HALVES is 2, and
    store those of weight rows ``begin`` to ``begin + PART`` and rows of x from ``begin_m`` on."""
    LEFT: gl.constexpr = total.shape[0]
    SUM: gl.constexpr = total.type.layout
    W_ROWS: gl.constexpr = HALVES * PART
    NUM_WARPS: gl.constexpr = LEFT // 16
    WIDE: gl.constexpr = 8 if X_ROWS > 16 else 2  # of a row, stored at once by a thread
    BY_ROW: gl.constexpr = gl.BlockedLayout(
        [WIDE // HALVES, 1], [64 // WIDE, WIDE // 2], [1, NUM_WARPS], [0, 1]
    )
    IS_MOVED: gl.constexpr = HALVES == 2 or WIDE > 2
    LAYOUT: gl.constexpr = BY_ROW if IS_MOVED else SUM
    result = total.to(gl.bfloat16)
    if HALVES == 2:  # rows are ordered as [parts, halves, PART]
        PAIRS: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 2], [1, 8, 4, 1], [1, 2, NUM_WARPS // 2, 1], [3, 1, 2, 0]
        )
        pairs = result.reshape([LEFT // W_ROWS, 2, PART, X_ROWS]).permute([0, 2, 3, 1])
        gate, up = gl.convert_layout(pairs, PAIRS).split()
        result = _silu_mul(gate, up).reshape([LEFT // 2, X_ROWS])
    if IS_MOVED:
        result = gl.convert_layout(result, LAYOUT)
    n = gl.arange(0, LEFT // HALVES, gl.SliceLayout(1, LAYOUT))
    m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, LAYOUT))
    mask = (n[:, None] < PART) & (m[None, :] < num_rows)
    gl.store(out + m[None, :] * N + (begin + n)[:, None], result, mask=mask)


@gluon.jit
def push_outputs(
    total, boxes, half, begin, begin_m, num_rows,
    PART: gl.constexpr, X_ROWS: gl.constexpr, RANK: gl.constexpr, NUM_RANKS: gl.constexpr,
    MAX_ROWS: gl.constexpr, ROW_BYTES: gl.constexpr,
):  # fmt: skip
    """Round the accumulators ``total [LEFT, X_ROWS]``, and push those of weight rows ``begin`` to
    ``begin + PART`` into the box that each rank (this one included) has for this rank
    (:mod:`...collectives.peer_memory`). ``half [X_ROWS]``: half of the box, 0 or 1."""
    LEFT: gl.constexpr = total.shape[0]
    SUM: gl.constexpr = total.type.layout
    bits = total.to(gl.bfloat16).to(gl.int16, bitcast=True)
    bits = gl.where(bits == -1, 0x7FFF, bits).to(gl.int16)  # a NaN that is not the sentinel
    n = gl.arange(0, LEFT, gl.SliceLayout(1, SUM))
    m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, SUM))
    is_row = m < num_rows
    at = ((half * NUM_RANKS + RANK) * MAX_ROWS + m) * (ROW_BYTES // 2)
    mask = (n[:, None] < PART) & is_row[None, :]
    for rank in gl.static_range(NUM_RANKS):
        box = boxes[rank].to(gl.pointer_type(gl.int16))
        gl.store(box + at[None, :] + (begin + n)[:, None], bits, mask=mask)


@gluon.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    x,  # [K / 64, M, 64], boxes [ATOMS, X_ROWS, 64]; with a norm a pointer to [M, K]
    w_desc,  # [K / 64, HALVES, N, 64], boxes [ATOMS, HALVES, PART, 64]
    out,  # [M, N], contiguous
    num_rows,
    N: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr, PART: gl.constexpr,
    X_ROWS: gl.constexpr, ATOMS: gl.constexpr, STAGES: gl.constexpr,
    PREFETCH_STAGES: gl.constexpr,  # stages of weights loaded before the wait
    LATE_TRIGGER: gl.constexpr,
    # For a norm: [M, K], [K], [M, K] (written: residual + x); NORM_ROWS: M padded to a power of
    # two.
    residual=None, norm_weight=None, hidden=None, eps=None,
    FORM: gl.constexpr = None, NORM_ROWS: gl.constexpr = 0,
    # Fields of a PushTarget.
    boxes=None, row_numbers=None,
    RANK: gl.constexpr = 0, NUM_RANKS: gl.constexpr = 0, MAX_ROWS: gl.constexpr = 0,
    ROW_BYTES: gl.constexpr = 0,
):  # fmt: skip
    """``out = x @ weight.T``, with two HALVES ``silu(gate) * up``.

    With boxes the result is pushed there instead, for an all-reduce. With a norm, whose weight is
    staged as a whole, ``hidden = residual + x``, and ``rms_norm(hidden, norm_weight, eps)``
    replaces x.

    Grid: ``(N / PART * ceil(M / X_ROWS),)``.
    """
    if not LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    HAS_NORM: gl.constexpr = FORM is not None
    STEPS: gl.constexpr = K // (64 * ATOMS)
    W_ROWS: gl.constexpr = HALVES * PART
    W_PIECES: gl.constexpr = ATOMS * W_ROWS // 8
    X_PIECES: gl.constexpr = 0 if HAS_NORM else ATOMS * X_ROWS // 8
    X_FROM: gl.constexpr = STAGES * W_PIECES
    LEFT: gl.constexpr = 128 if W_ROWS > 64 else 64  # 64 for each warpgroup
    NUM_WARPS: gl.constexpr = LEFT // 16
    # The operand of the last atom reads LEFT rows from its first row on.
    X_END: gl.constexpr = X_FROM + STAGES * X_PIECES
    W_END: gl.constexpr = X_FROM - W_ROWS // 8 + LEFT // 8
    PIECES: gl.constexpr = X_END if X_END > W_END else W_END
    BYTES: gl.constexpr = (W_PIECES + X_PIECES) * 1024
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, X_ROWS, 16])

    if HAS_NORM:
        begin_m = 0
        begin = gl.program_id(0) * PART
    else:
        # Programs that share weights are adjacent, so that one read from memory serves them.
        num_row_tiles = (num_rows + X_ROWS - 1) // X_ROWS
        row_tile = gl.program_id(0) % num_row_tiles
        # A row that arrives twice would be mistaken for a row of the next all-reduce.
        begin_m = row_tile * X_ROWS if NUM_RANKS > 0 else tile_begin(row_tile, num_rows, X_ROWS)
        begin = gl.program_id(0) // num_row_tiles * PART
    smem = gl.allocate_shared_memory(gl.bfloat16, [PIECES, 8, 64], OPERAND)
    if HAS_NORM:  # by atom, 8 rows
        normed = gl.allocate_shared_memory(gl.bfloat16, [_BLOCK // 8, 64], OPERAND)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    load_weights_async(smem, bars, w_desc, begin, W_PIECES, BYTES, 0, PREFETCH_STAGES)
    if HAS_NORM:
        LINE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
        k = gl.arange(0, _BLOCK, gl.SliceLayout(0, LINE))
        scale = gl.load(norm_weight + k, mask=k < K, other=0.0).to(gl.float32)
    tl.extra.cuda.gdc_wait()
    if LATE_TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_NORM:
        row = gl.arange(0, NORM_ROWS, gl.SliceLayout(1, LINE))
        mask = (row < num_rows)[:, None] & (k < K)[None, :]
        places = row[:, None] * K + k[None, :]
        h = gl.load(x + places, mask=mask, other=0.0)
        more = gl.load(residual + places, mask=mask, other=0.0)
    load_weights_async(smem, bars, w_desc, begin, W_PIECES, BYTES, PREFETCH_STAGES, STAGES)
    if HAS_NORM:
        h = (h.to(gl.float32) + more.to(gl.float32)).to(gl.bfloat16)
        if gl.program_id(0) == 0:
            gl.store(hidden + places, h, mask=mask)
        # The same operations as _norm_kernel and scaled of rms_norm.
        wide = h.to(gl.float32)
        mean = gl.sum(wide * wide, 1) * (1.0 / K)
        y = wide * gl.rsqrt(mean + eps)[:, None]
        if FORM == "rounded":
            y = y.to(gl.bfloat16).to(gl.float32)
        if FORM == "plus_one":
            scale = scale + 1.0
        y = (y * scale[None, :]).to(gl.bfloat16)
        # A unit of the swizzle is 8 rows: repeat the same rows.
        y = y.reshape([NORM_ROWS, _BLOCK // 64, 64]).permute([1, 0, 2])
        y = y.reshape([_BLOCK // 64, 1, NORM_ROWS, 64])
        y = y.broadcast_to([_BLOCK // 64, 8 // NORM_ROWS, NORM_ROWS, 64])
        normed.store(y.reshape([_BLOCK // 8, 64]))
        fence_async_shared()
    else:
        load_rows_async(smem, bars, x, begin_m, X_FROM, X_PIECES)

    if NUM_RANKS > 0:
        m = begin_m + gl.arange(0, X_ROWS, gl.SliceLayout(0, SUM))
        half = gl.load(row_numbers + m, mask=m < num_rows, other=0) & 1
    slot = 0
    total = gl.zeros([LEFT, X_ROWS], gl.float32, SUM)
    if HAS_NORM:
        total = warpgroup_mma_init(total)
        for slot in gl.static_range(STAGES):
            mbarrier.wait(bars.index(slot), 0)
            for atom in gl.static_range(slot * ATOMS, (slot + 1) * ATOMS):
                left = smem.index(atom * (W_ROWS // 8))
                total = warpgroup_mma(
                    left._reinterpret(gl.bfloat16, [LEFT, 64], OPERAND),
                    normed.slice(atom * 8, 8).permute((1, 0)),
                    total,
                    is_async=True,
                )
    elif STEPS == STAGES:  # no place is loaded twice: only data is waited for
        total = warpgroup_mma_init(total)
        for slot in range(STAGES):
            mbarrier.wait(bars.index(slot), 0)
            total = _add_stage(smem, slot, total, OPERAND, ATOMS, W_ROWS, X_ROWS, X_FROM, LEFT)
    else:
        phase = 0
        last = 0
        for step in range(STEPS):
            mbarrier.wait(bars.index(slot), phase)
            total = _add_stage(smem, slot, total, OPERAND, ATOMS, W_ROWS, X_ROWS, X_FROM, LEFT)
            # All matmuls but those of this stage are done: the previous stage is free.
            total = warpgroup_mma_wait(ATOMS, deps=(total,))
            then = step + STAGES - 1
            go = (step > 0) & (then < STEPS)
            load_stage_async(
                smem, bars, last, then, go, w_desc, x, begin, begin_m,
                W_PIECES, X_FROM, X_PIECES, BYTES,
            )  # fmt: skip
            last = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    total = warpgroup_mma_wait(0, deps=(total,))
    if NUM_RANKS > 0:
        push_outputs(
            total, boxes, half, begin, begin_m, num_rows, PART, X_ROWS,
            RANK, NUM_RANKS, MAX_ROWS, ROW_BYTES,
        )  # fmt: skip
    else:
        store_outputs(total, out, begin, begin_m, num_rows, N, HALVES, PART, X_ROWS)


@functools.cache
def _operand_layout(num_bits: int, num_dims: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, num_bits, num_dims)


def describe(
    matrix: Tensor, rows: int, line: int, *, halves: int = 0, atoms: int = 0
) -> TensorDescriptor:
    """A TMA descriptor of ``matrix [R, K]``, in boxes of ``rows`` by ``line`` elements.

    Args:
        halves: if not 0, ``[halves, R / halves, K]``, in boxes of ``rows`` of each half.
        atoms: if not 0, the last dimension is split: ``[K / line, .., line]``, ``atoms`` to a box.
    """
    (size, width), row = matrix.shape, matrix.stride(0)
    shape, strides, box = [size, width], [row, 1], [rows, line]
    if halves:
        size //= halves
        shape, strides, box = [halves, size, width], [size * row, row, 1], [halves, rows, line]
    if atoms:
        shape, strides, box = [width // line, *shape[:-1], line], [line, *strides], [atoms, *box]
    return TensorDescriptor(
        matrix, shape, strides, box, _operand_layout(8 * matrix.itemsize, len(box))
    )


def stages_ahead(
    num_rows: int, num_weight_rows: int, row_bytes: int, atoms: int, stages: int
) -> int:
    """Number of weight stages to load before the wait; the others are loaded after it.

    Normally all of them. With few rows (:func:`triggers_dependents_late`) at most 6 MiB of a weight
    that is staged as a whole: the preceding kernel ends only when its pending loads have arrived.

    Args:
        row_bytes: bytes per row of the weight. atoms: number of 128-byte atoms of a row in a stage.
    """
    if not triggers_dependents_late(num_rows) or stages * atoms * ATOM_BYTES < row_bytes:
        return stages
    return min(stages, max(1, stages * _AHEAD_BYTES // (num_weight_rows * row_bytes)))


def _launch(
    x: Tensor,
    weight: Tensor,
    tile: PrefetchTile,
    has_gate: bool,
    operands: dict[str, Any],
    is_launched: bool = True,
) -> Tensor:
    """Launch :func:`skinny_kernel` with options and the ``operands`` of a norm or a push, or only
    compile it.

    Raises:
        ValueError: shapes do not match each other or the tile.
    """
    (num_rows, k_size), halves = x.shape, 2 if has_gate else 1
    num_outs = len(weight) // halves
    if weight.shape[1] != k_size or not tile.fits(num_outs, k_size, has_gate):
        raise ValueError(f"x {list(x.shape)} does not fit weight {list(weight.shape)} or {tile}")
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    x_rows = 8 if num_rows <= 8 else tile.x_rows
    grid = (num_outs // tile.part * -(-num_rows // x_rows),)
    kernel = skinny_kernel
    (kernel[grid] if is_launched else functools.partial(kernel.warmup, grid=grid))(
        x if "FORM" in operands else describe(x, x_rows, 64, atoms=tile.atoms),
        describe(weight, tile.part, 64, halves=halves, atoms=tile.atoms),
        out, num_rows,
        N=num_outs, K=k_size, HALVES=halves, PART=tile.part, X_ROWS=x_rows, ATOMS=tile.atoms,
        STAGES=tile.stages,
        PREFETCH_STAGES=stages_ahead(num_rows, len(weight), k_size * 2, tile.atoms, tile.stages),
        LATE_TRIGGER=triggers_dependents_late(num_rows),
        num_warps=4 if tile.part * halves <= 64 else 8,
        launch_pdl=True,
        **operands,
    )  # fmt: skip
    return out


def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    tile: PrefetchTile,
    has_gate: bool = False,
    target: PushTarget | None = None,
) -> Tensor:
    """``x @ weight.T``, rounded; one launch.

    Args:
        x: bfloat16 ``[M, K]`` on a Hopper GPU; rows are whole 16-byte units and may be strided.
        weight: bfloat16 ``[N, K]``, or ``[2 N, K]`` (gate, then up), with the same conditions. It
            must not be written by a kernel that may still run when the previous one ends.
        tile: sizes, which do not affect the result.
        has_gate: whether to return ``silu(gate) * up``, each operation rounded.
        target: where to push the result, which is then stored nowhere else; not with a gate. If it
            is not connected, the kernel is only compiled.

    Returns:
        ``[M, N]``, contiguous; with a target it is not written.

    Raises:
        ValueError: shapes do not match each other or the tile.
    """
    if target is None:
        return _launch(x, weight, tile, has_gate, {})
    pushed = {"boxes": target.row_boxes, "row_numbers": target.row_numbers, **target.constants}
    return _launch(x, weight, tile, has_gate, pushed, target.is_connected)


def serves_norm(num_rows: int, k_size: int, tile: PrefetchTile, has_gate: bool) -> bool:
    """Whether :func:`norm_matmul` supports this many rows of ``k_size``, staged as a whole."""
    return (
        0 < num_rows <= MAX_NORM_ROWS
        and _BLOCK.value // 2 < k_size <= _BLOCK.value
        and tile.stages * tile.atoms * 64 == k_size
        and tile.part * (2 if has_gate else 1) <= 64
    )


def norm_matmul(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    form: NormForm,
    weight: Tensor,
    *,
    tile: PrefetchTile,
    has_gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """(``norm(h) @ weight.T``, h) with h = ``residual + x``; one launch.

    Args:
        x, residual: bfloat16 ``[M, K]`` on a Hopper GPU, contiguous; M at most
            :data:`MAX_NORM_ROWS`.
        norm_weight: ``[K]``, a parameter like ``weight``: both are read before the wait. eps and
            form: see :func:`..fused.dispatch.add_rms_norm`.
        weight, has_gate: see :func:`matmul`.
        tile: a tile that :func:`serves_norm` accepts.

    Returns:
        ``[M, N]`` and ``[M, K]``, contiguous.

    Raises:
        ValueError: shapes do not match each other or the tile.
    """
    num_rows, k_size = x.shape
    if residual.shape != x.shape or not serves_norm(num_rows, k_size, tile, has_gate):
        raise ValueError(
            f"x {list(x.shape)} does not fit residual {list(residual.shape)}, {tile} or "
            f"{MAX_NORM_ROWS} rows"
        )
    hidden = x.new_empty(num_rows, k_size)
    norm = {
        "residual": residual,
        "norm_weight": norm_weight,
        "hidden": hidden,
        "eps": eps,
        "FORM": form,
        "NORM_ROWS": max(2, triton.next_power_of_2(num_rows)),
        # The setting of the separate norm. The gate without a norm has another setting, but it
        # concerns only exp's last factor, a power of two, and the sum with 1: both are exact either
        # way.
        "enable_fp_fusion": False,
    }
    return _launch(x, weight, tile, has_gate, norm), hidden
