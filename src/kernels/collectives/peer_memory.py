"""All-reduce, alone or with the norm after it, and all-gather, each in one launch, by writes into
the memory of the other GPUs.

Grid: ``(rows, ceil(columns / CHUNK))``, for chunks of a few KB; with a norm ``(rows,)``. Program
(i, j) of every rank has the same chunk of a row::

    push     its part into the box that each peer keeps for this rank
    flag     at each peer: a number, one more than in the last call (release, system scope)
    wait     for that number from each peer, or one beyond (acquire)
    combine  the parts in rank order, in float32 (all-reduce), or concatenated (all-gather)

This is a one-shot algorithm, like the "one-shot" kernels of TensorRT-LLM and vLLM for few rows. The
kernels of :mod:`.two_shot` add in the same order, so an element's sum has one order whatever the
batch. A box has two halves, used alternately: a peer that writes call n + 2 has seen the flags of
call n + 1, which the reader of call n set after it. Numbers are kept per chunk, so they need no
reset, and calls may differ in size.

The all-reduce of few rows with the norm after it (``few_rows_norm_kernel``) has no flags: a rank
waits for the data itself. Grid: ``(rows,)``. Program i of every rank has row i::

    push     its part into the box that each peer keeps for this rank
    wait     until no element of a peer's part is the sentinel, and read it
    clear    what was read, to the sentinel
    combine  the parts in rank order, in float32; residual and norm

This resembles the "Lamport" kernels of TensorRT-LLM, but with two halves of a box, used
alternately. A flag costs a round trip to the peer: it may leave only when the data pushed before it
has arrived. Here each element is its own flag. The sentinel is the NaN whose bits are all ones. If
a part contains it, another NaN is sent instead, and the sum is a NaN all the same.

The reader of a row's half clears it, in the launch that reads it, before that rank pushes the next
call. The peer pushes into this half again only after it has read that call (``spec/sentinel.py``).
Calls may differ in width and dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.rms_norm import mean_square
from ..fused.rounding import rounded, scaled
from ..overlap import overlap


@triton.jit
def bits_of(values):  # type: ignore[no-untyped-def]
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
    """1 if some element has not arrived yet, else 0."""
    return tl.max((bits == -1).to(tl.int32), axis=0)


@triton.jit
def arrived(here, mask, ended):  # type: ignore[no-untyped-def]
    """The bits at ``here`` once no element is the sentinel, which is then restored."""
    found = tl.load(here, mask=mask, other=0, volatile=True)
    is_missing = _is_missing(found)
    while is_missing != 0:
        is_ended = tl.load(ended, volatile=True)
        found = tl.load(here, mask=mask, other=0, volatile=True)
        is_missing = tl.where(is_ended != 0, 0, _is_missing(found))
    tl.store(here, tl.full(found.shape, -1, found.dtype), mask=mask)
    return found


@triton.jit
def few_rows_norm_kernel(  # type: ignore[no-untyped-def]
    partial, out, boxes, ended, numbers, residual, hidden, weight, eps, row_stride,
    residual_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
    IS_PUSHED: tl.constexpr, LATE_TRIGGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The results of :func:`.peer_memory.all_reduce_norm_kernel`, and their bits.

    Shapes: as for that kernel, but ``boxes`` is a tuple with the address of each rank's ``[2,
    NUM_RANKS, MAX_ROWS, ROW_BYTES]``. ended: int32 ``[1]``, this rank's own; not 0 ends all
    waiting. numbers: int32 ``[MAX_ROWS]``, this rank's own: how often each row was sent.

    IS_PUSHED: the preceding kernel has pushed this rank's part, also into its own box
    (:mod:`..matmul.sm90.matmul_sm90`), and let this kernel start after its own wait. Then this
    kernel waits only for the data, and does not read ``partial``.
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
    # Loads without a wait for the preceding kernels bypass a cache that may be older than these.
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
        bits = bits_of(part)
        for peer in tl.static_range(NUM_RANKS):
            if peer != RANK:
                at = boxes[peer] + ((half + RANK) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
                tl.store(tl.multiple_of(at.to(tl.pointer_type(BITS)), 16) + i, bits, mask=mask)
    # The loads of the next kernel's weights would delay the pushes.
    if PDL and LATE_TRIGGER and not IS_PUSHED:
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK or IS_PUSHED:
            at = boxes[RANK] + ((half + peer) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
            here = tl.multiple_of(at.to(tl.pointer_type(BITS)), 16) + i
            term = arrived(here, mask, ended).to(DTYPE, bitcast=True).to(tl.float32)
        else:
            term = part.to(tl.float32)
        # x_0 itself, not 0 + x_0, which would lose the sign of a zero.
        h = term if peer == 0 else h + term
    tl.store(numbers + row, number + 1)  # all threads have read it: they synchronised since
    h = rounded(h, DTYPE)
    base = row.to(tl.int64) * N
    if HAS_RESIDUAL:
        h = rounded(h + more.to(tl.float32), DTYPE)
        tl.store(hidden + base + i, h.to(DTYPE), mask=mask)
    y = scaled(h * tl.rsqrt(mean_square(h, N) + eps), w.to(tl.float32), FORM, DTYPE)
    tl.store(out + base + i, y.to(DTYPE), mask=mask)
    if PDL and IS_PUSHED:  # a kernel that waits for this one also waits for those before
        tl.extra.cuda.gdc_wait()


@triton.jit
def _flag_of(flags, owner, sender, chunk, MAX_CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The flag by which ``owner`` sees that ``sender`` has pushed a chunk."""
    return flags[owner].to(tl.pointer_type(tl.int32)) + sender * MAX_CHUNKS + chunk


@triton.jit
def _part_of(  # type: ignore[no-untyped-def]
    box, dtype: tl.constexpr, half, sender, chunk, MAX_CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """The place in a box for what ``sender`` pushes of a chunk, or of several, if these are
    blocks."""
    place = ((half + sender).to(tl.int64) * MAX_CHUNKS + chunk) * CHUNK
    return tl.multiple_of(box.to(tl.pointer_type(dtype)) + place, 16)


@triton.jit
def _push(  # type: ignore[no-untyped-def]
    values, mask, boxes, flags, number, flag_chunk, half, chunk, inside,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write this rank's part into each peer's box, then ``number`` to the flag of one chunk."""
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            there = _part_of(boxes[peer], values.dtype, half, RANK, chunk, MAX_CHUNKS, CHUNK)
            tl.store(there + inside, values, mask=mask)
    tl.debug_barrier()
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            flag = _flag_of(flags, peer, RANK, flag_chunk, MAX_CHUNKS)
            tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def wait_for(flag, number):  # type: ignore[no-untyped-def]
    """Wait until ``flag`` is ``number`` or one beyond: a peer whose wait has ended may be a call
    ahead. Then everything pushed before can be read. Numbers may wrap around."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while number - seen > 0:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def _sum_of_ranks(  # type: ignore[no-untyped-def]
    part, mask, boxes, flags, number, flag_chunk, half, chunk, inside,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Push ``part``, wait for the peers', and add them: float32, rounded to the dtype of
    ``part``."""
    _push(
        part, mask, boxes, flags, number, flag_chunk, half, chunk, inside,
        RANK, NUM_RANKS, MAX_CHUNKS, CHUNK,
    )  # fmt: skip
    total = tl.zeros(part.shape, tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        term = part.to(tl.float32)
        if peer != RANK:
            wait_for(_flag_of(flags, RANK, peer, flag_chunk, MAX_CHUNKS), number)
            here = _part_of(boxes[RANK], part.dtype, half, peer, chunk, MAX_CHUNKS, CHUNK)
            # Bypass the L1 cache, which may contain the data of two calls ago.
            term = tl.load(here + inside, mask=mask, other=0.0, cache_modifier=".cg")
            term = term.to(tl.float32)
        # x_0 itself, not 0 + x_0, which would lose the sign of a zero.
        total = term if peer == 0 else total + term
    return rounded(total, part.dtype)


@triton.jit
def all_reduce_kernel(  # type: ignore[no-untyped-def]
    partial, out, boxes, flags, numbers, num_columns, row_stride,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``out`` = the sum of the ranks' ``partial``.

    Shapes: partial and out ``[rows, columns]``, out contiguous. boxes: a tuple with the address of
    each rank's ``[2, NUM_RANKS, MAX_CHUNKS, CHUNK]``; flags: likewise, int32 ``[NUM_RANKS,
    MAX_CHUNKS]``. numbers: int32 ``[MAX_CHUNKS]``, this rank's own: how often each chunk was sent.
    """
    # The next kernel loads its weights while this one waits for its peers.
    overlap(PDL, LATE_TRIGGER=True)
    row = tl.program_id(0)
    chunk = row * tl.num_programs(1) + tl.program_id(1)
    number = tl.load(numbers + chunk) + 1
    inside = tl.arange(0, CHUNK)
    columns = tl.program_id(1) * CHUNK + inside
    mask = columns < num_columns
    part = tl.load(partial + row.to(tl.int64) * row_stride + columns, mask=mask, other=0.0)
    half = (number & 1) * NUM_RANKS
    total = _sum_of_ranks(
        part, mask, boxes, flags, number, chunk, half, chunk, inside,
        RANK, NUM_RANKS, MAX_CHUNKS, CHUNK,
    )  # fmt: skip
    base = out + row.to(tl.int64) * num_columns
    tl.store(base + columns, total.to(part.dtype), mask=mask)
    tl.store(numbers + chunk, number)


@triton.jit
def all_reduce_norm_kernel(  # type: ignore[no-untyped-def]
    partial, out, boxes, flags, numbers, residual, hidden, weight, eps, row_stride,
    residual_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``hidden = residual + sum of the ranks' partial``, and ``out`` is its RMSNorm; without a
    residual, ``out`` is the RMSNorm of the sum. The bits are those of :func:`all_reduce_kernel` and
    of ``rms_norm``.

    Grid: ``(rows,)``. A row is sent with one flag, that of its first chunk. Its other chunks are
    counted as well, for calls that are divided differently. Shapes: partial, residual, out and
    hidden ``[rows, N]``, the last two contiguous, weight ``[N]``; others as in
    :func:`all_reduce_kernel`.
    """
    NUM_CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    i = tl.arange(0, BLOCK)
    mask = i < N
    # A parameter: it is read before the preceding kernels have ended.
    w = tl.load(weight + i, mask=mask, other=0.0)
    overlap(PDL, LATE_TRIGGER=True)
    row = tl.program_id(0)
    first = row * NUM_CHUNKS
    number = tl.load(numbers + first) + 1
    part = tl.load(partial + row.to(tl.int64) * row_stride + i, mask=mask, other=0.0)
    half = (number & 1) * NUM_RANKS
    for other in tl.static_range(1, NUM_CHUNKS):
        parity = (tl.load(numbers + first + other) + 1) & 1
        half = tl.where(i // CHUNK == other, parity * NUM_RANKS, half)
    # Loaded here: loaded after the norm, it would delay the end of the launch.
    counted = tl.arange(0, BLOCK // CHUNK if BLOCK > CHUNK else 1)
    is_chunk = counted < NUM_CHUNKS
    counts = tl.load(numbers + first + counted, mask=is_chunk, other=0) + 1
    if HAS_RESIDUAL:
        place = residual + row.to(tl.int64) * residual_stride
        more = tl.load(place + i, mask=mask, other=0.0)
    h = _sum_of_ranks(
        part, mask, boxes, flags, number, first, half, first + i // CHUNK, i % CHUNK,
        RANK, NUM_RANKS, MAX_CHUNKS, CHUNK,
    )  # fmt: skip
    base = row.to(tl.int64) * N
    if HAS_RESIDUAL:
        h = rounded(h + more.to(tl.float32), part.dtype)
        tl.store(hidden + base + i, h.to(part.dtype), mask=mask)
    y = scaled(h * tl.rsqrt(mean_square(h, N) + eps), w.to(tl.float32), FORM, part.dtype)
    tl.store(out + base + i, y.to(part.dtype), mask=mask)
    tl.store(numbers + first + counted, counts, mask=is_chunk)


@triton.jit
def all_gather_kernel(  # type: ignore[no-untyped-def]
    part, out, boxes, flags, numbers, begins, row_stride, num_all,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: ``(rows, ceil(most columns of a rank / CHUNK))``. Shapes: part ``[rows, columns of this
    rank]``, out ``[rows, columns of all]``, begins int32 ``[NUM_RANKS + 1]``: the first column of
    each rank in out; others as in :func:`all_reduce_kernel`."""
    overlap(PDL, LATE_TRIGGER=True)
    row = tl.program_id(0)
    chunk = row * tl.num_programs(1) + tl.program_id(1)
    number = tl.load(numbers + chunk) + 1
    inside = tl.arange(0, CHUNK)
    columns = tl.program_id(1) * CHUNK + inside
    begin = tl.load(begins + RANK)
    mask = columns < tl.load(begins + RANK + 1) - begin
    values = tl.load(part + row.to(tl.int64) * row_stride + columns, mask=mask, other=0)
    half = (number & 1) * NUM_RANKS
    _push(
        values, mask, boxes, flags, number, chunk, half, chunk, inside,
        RANK, NUM_RANKS, MAX_CHUNKS, CHUNK,
    )  # fmt: skip
    base = out + row.to(tl.int64) * num_all
    for peer in tl.static_range(NUM_RANKS):
        begin = tl.load(begins + peer)
        mask = columns < tl.load(begins + peer + 1) - begin
        if peer != RANK:
            wait_for(_flag_of(flags, RANK, peer, chunk, MAX_CHUNKS), number)
            here = _part_of(boxes[RANK], values.dtype, half, peer, chunk, MAX_CHUNKS, CHUNK)
            values = tl.load(here + inside, mask=mask, other=0, cache_modifier=".cg")
        else:
            values = tl.load(part + row.to(tl.int64) * row_stride + columns, mask=mask, other=0)
        tl.store(base + begin + columns, values, mask=mask)
    tl.store(numbers + chunk, number)
