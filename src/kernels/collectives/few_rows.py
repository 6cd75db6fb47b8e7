"""All-reduce of few rows with the norm behind it, in one launch, without flags: a rank waits for
the data itself.

Grid: ``(rows,)``. Program i of every rank has row i::

    push     its part into the box that each peer keeps for this rank
    wait     until no element of a peer's part is the sentinel, and read it
    clear    what was read, to the sentinel
    combine  the parts in rank order, in float32; residual and norm

As the "Lamport" kernels of TensorRT-LLM, but with two halves of a box, used in turn. What a flag
costs is a way to the peer and back: it may leave only when what was pushed before has arrived. Here
each element says itself that it is there. The sentinel is the NaN whose bits are all ones; a part
that has it sends another NaN, and the sum is a NaN all the same.

A row's half is cleared by its reader, in the launch that reads it, before that rank pushes the next
call; the peer pushes into this half again only when it has read that (``spec/sentinel.py``). Calls
may differ in width and dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.rms_norm import mean_square
from ..fused.rounding import rounded, scaled


@triton.jit
def _bits_of(values):  # type: ignore[no-untyped-def]
    """``values`` as integers, without the sentinel."""
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
        bits = tl.where(bits == -1, 0x7FFF, bits).to(tl.int16)
    else:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(bits == -1, 0x7FFFFFFF, bits).to(tl.int32)
    return bits


@triton.jit
def _is_missing(bits):  # type: ignore[no-untyped-def]
    """1 if some element has not come yet, else 0."""
    return tl.max((bits == -1).to(tl.int32), axis=0)


@triton.jit
def few_rows_norm_kernel(  # type: ignore[no-untyped-def]
    partial,  # [rows, N], as residual
    out,  # [rows, N], contiguous, as hidden
    boxes,  # a tuple: address of each rank's [2, NUM_RANKS, MAX_ROWS, ROW_BYTES]
    ended,  # int32 [1], this rank's own: not 0 once nothing is waited for
    numbers,  # int32 [MAX_ROWS], this rank's own: how often each row was sent
    residual,
    hidden,
    weight,  # [N], a parameter: it is read before the kernels queued before have ended
    eps,
    row_stride,
    residual_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    IS_PUSHED: tl.constexpr,
    LATE_TRIGGER: tl.constexpr,
    PDL: tl.constexpr,
):
    """The results of :func:`.peer_memory.all_reduce_norm_kernel`, and their bits.

    IS_PUSHED: the kernel before has pushed this rank's part, into its own box as well
    (:mod:`..linear.matmul_sm90`), and let this one start behind its own wait. Then the data is all
    that is waited for, and ``partial`` is not read.
    """
    DTYPE: tl.constexpr = partial.dtype.element_ty
    i = tl.arange(0, BLOCK)
    mask = i < N
    w = tl.load(weight + i, mask=mask, other=0.0)
    if PDL:
        if not IS_PUSHED:
            tl.extra.cuda.gdc_wait()
        if IS_PUSHED or not LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    # What is read without a wait for the kernels before, past a cache that may be older than they.
    CACHE: tl.constexpr = ".cg" if IS_PUSHED else ""
    number = tl.load(numbers + row, cache_modifier=CACHE)
    if not IS_PUSHED:
        part = tl.load(partial + row.to(tl.int64) * row_stride + i, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row.to(tl.int64) * residual_stride
        more = tl.load(place + i, mask=mask, other=0.0, cache_modifier=CACHE)
    half = (number & 1) * NUM_RANKS
    BITS: tl.constexpr = tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32
    if not IS_PUSHED:
        bits = _bits_of(part)
        for peer in tl.static_range(NUM_RANKS):
            if peer != RANK:
                at = boxes[peer] + ((half + RANK) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
                tl.store(tl.multiple_of(at.to(tl.pointer_type(BITS)), 16) + i, bits, mask=mask)
    # The next kernel's weights would be in the way of what is pushed.
    if PDL and LATE_TRIGGER and not IS_PUSHED:
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK or IS_PUSHED:
            at = boxes[RANK] + ((half + peer) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
            here = tl.multiple_of(at.to(tl.pointer_type(BITS)), 16) + i
            found = tl.load(here, mask=mask, other=0, volatile=True)
            is_missing = _is_missing(found)
            while is_missing != 0:
                is_ended = tl.load(ended, volatile=True)
                found = tl.load(here, mask=mask, other=0, volatile=True)
                is_missing = tl.where(is_ended != 0, 0, _is_missing(found))
            tl.store(here, tl.full(found.shape, -1, found.dtype), mask=mask)
            term = found.to(DTYPE, bitcast=True).to(tl.float32)
        else:
            term = part.to(tl.float32)
        # x_0 itself, not 0 + x_0: that would lose the sign of a zero.
        h = term if peer == 0 else h + term
    tl.store(numbers + row, number + 1)  # all threads have read it: they have met since
    h = rounded(h, DTYPE)
    base = row.to(tl.int64) * N
    if HAS_RESIDUAL:
        h = rounded(h + more.to(tl.float32), DTYPE)
        tl.store(hidden + base + i, h.to(DTYPE), mask=mask)
    y = scaled(h * tl.rsqrt(mean_square(h, N) + eps), w.to(tl.float32), FORM, DTYPE)
    tl.store(out + base + i, y.to(DTYPE), mask=mask)
    if PDL and IS_PUSHED:  # who waits for this kernel waits for those before, too
        tl.extra.cuda.gdc_wait()
