"""All-reduce of many rows in one launch, alone or with the norm after it: reduce-scatter, then
all-gather, by writes into the memory of the other GPUs.

Each row has an owner among the ranks. A rank sends its part of a row to the owner only, and the
owner sends back the sum. So a GPU sends ``2 (N - 1) / N`` of the bytes of the rows, where the
one-shot kernels of :mod:`.peer_memory` send N - 1 times these bytes. A rank has three kinds of
programs::

    push    a block of ROWS rows into the owner's box; then a flag per row (release, system scope)
    sum     wait for the flags of a row of this rank; add the parts in rank order, in float32; write
            the sum, in the dtype of the parts, into each peer's box; flag; residual and norm
    finish  wait for the flag of a row of another rank; read the sum; residual and norm

A unit is NUM_RANKS blocks, one per owner. Programs are ordered by unit: the sums of a unit follow
the pushes of the unit ``lag`` later, and the ends follow the sums in the same way. Few programs
therefore have to wait. A program waits only for programs of lower numbers, and a GPU starts
programs in the order of their numbers, so every program ends.

A box has no halves. A rank starts a call after its last call has ended: its parts were then read,
because it has read their sums. An owner writes a sum of a call after the peer's push of that call,
and the peer has then read the sums of all earlier calls (``spec/two_shot.py``). This holds wherever
calls place their rows. A flag holds the number of calls that had the row, so it needs no reset.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.rms_norm import mean_square
from ..fused.rounding import rounded, scaled
from ..overlap import overlap
from .peer_memory import arrived, bits_of, wait_for


@triton.jit
def _of_rank(addresses, rank, NUM_RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address of a rank, or the addresses of several, that are no constants."""
    found = addresses[0]
    for other in tl.static_range(1, NUM_RANKS):
        found = tl.where(rank == other, addresses[other], found)
    return found


@triton.jit
def _rows_of(box, row, STRIDE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of a row, and of those after it, in a part of a box."""
    rows = box.to(tl.pointer_type(DTYPE)) + row.to(tl.int64) * STRIDE
    return tl.multiple_of(rows, 16)


@triton.jit
def _wait_for_peers(  # type: ignore[no-untyped-def]
    flags, number, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_ROWS: tl.constexpr
):
    """:func:`.peer_memory.wait_for` for a row's flags of all peers. flags: of rank 0."""
    peers = tl.arange(0, triton.next_power_of_2(NUM_RANKS))
    is_peer = (peers < NUM_RANKS) & (peers != RANK)
    behind = number * 0 + 1
    while behind > 0:
        seen = tl.atomic_add(flags + peers * MAX_ROWS, 0, mask=is_peer, sem="acquire", scope="sys")
        behind = tl.max(tl.where(is_peer, number - seen, 0), axis=0)


@triton.jit
def _push_block(  # type: ignore[no-untyped-def]
    partial, box, flags, numbers, first, num_rows, row_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Push rows from ``first`` on to ``box``, then their numbers to the owner's ``flags``."""
    i, row = tl.arange(0, BLOCK)[None, :], tl.arange(0, ROWS)
    is_row = first + row < num_rows
    mask = is_row[:, None] & (i < N)
    number = tl.load(numbers + first + row, mask=is_row, other=0) + 1
    parts = partial + ((first + row).to(tl.int64) * row_stride)[:, None]
    values = tl.load(parts + i, mask=mask, other=0.0)
    tl.store(box + (row * STRIDE)[:, None] + i, values, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(flags + first + row, number, mask=is_row, sem="release", scope="sys")


@triton.jit
def _run_task(  # type: ignore[no-untyped-def]
    task, partial, out, boxes, flags, numbers, residual, hidden, weight, eps, row_stride,
    residual_stride, num_rows, lag,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr, SENDER_BYTES: tl.constexpr,
):  # fmt: skip
    """A push, a sum or a finish of :func:`two_shot_kernel`."""
    DTYPE: tl.constexpr = partial.dtype.element_ty
    ITEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    # The stride of rows in boxes: 16-byte loads and stores.
    STRIDE: tl.constexpr = (N * ITEM_BYTES + 15) // 16 * (16 // ITEM_BYTES)
    NUM_PEERS: tl.constexpr = NUM_RANKS - 1
    PER_SLOT: tl.constexpr = NUM_PEERS + ROWS * NUM_RANKS
    slot, place = task // PER_SLOT, task % PER_SLOT
    i = tl.arange(0, BLOCK)
    mask = i < N
    if place < NUM_PEERS:
        peer = (RANK + 1 + place) % NUM_RANKS
        first = (slot * NUM_RANKS + peer) * ROWS
        if first < num_rows:
            box = _of_rank(boxes, peer, NUM_RANKS) + RANK * SENDER_BYTES
            box = _rows_of(box, slot * ROWS, STRIDE, DTYPE)
            peer_flags = _of_rank(flags, peer, NUM_RANKS).to(tl.pointer_type(tl.int32))
            peer_flags += RANK * MAX_ROWS
            _push_block(
                partial, box, peer_flags, numbers, first, num_rows, row_stride,
                N, BLOCK, ROWS, STRIDE,
            )  # fmt: skip
    else:
        is_own = place < NUM_PEERS + ROWS
        unit = slot - tl.where(is_own, lag, 2 * lag)
        inside = place - NUM_PEERS
        owner = (RANK + inside // ROWS) % NUM_RANKS
        row = (unit * NUM_RANKS + owner) * ROWS + inside % ROWS
        if (unit >= 0) & (row < num_rows):
            own_flags = flags[RANK].to(tl.pointer_type(tl.int32)) + row
            number = tl.load(numbers + row) + 1
            total = tl.zeros((BLOCK,), tl.float32)
            more, w = tl.zeros((BLOCK,), DTYPE), tl.zeros((BLOCK,), DTYPE)
            if HAS_RESIDUAL:
                at = residual + row.to(tl.int64) * residual_stride
                more = tl.load(at + i, mask=mask, other=0.0)
            if FORM is not None:
                w = tl.load(weight + i, mask=mask, other=0.0)
            if is_own:
                part = tl.load(partial + row.to(tl.int64) * row_stride + i, mask=mask, other=0.0)
                _wait_for_peers(own_flags, number, RANK, NUM_RANKS, MAX_ROWS)
                for peer in tl.static_range(NUM_RANKS):
                    term = part.to(tl.float32)
                    if peer != RANK:
                        box = boxes[RANK] + peer * SENDER_BYTES
                        here = _rows_of(box, unit * ROWS + inside, STRIDE, DTYPE)
                        # Bypass the L1 cache, which may contain the data of an earlier call.
                        term = tl.load(here + i, mask=mask, other=0.0, cache_modifier=".cg")
                        term = term.to(tl.float32)
                    # x_0 itself, not 0 + x_0, which would lose the sign of a zero.
                    total = term if peer == 0 else total + term
                total = rounded(total, DTYPE)
                for peer in tl.static_range(NUM_RANKS):
                    if peer != RANK:
                        box = boxes[peer] + NUM_RANKS * SENDER_BYTES
                        there = _rows_of(box, row, STRIDE, DTYPE)
                        tl.store(there + i, total.to(DTYPE), mask=mask)
                tl.debug_barrier()
                # One thread per peer: a release waits for the earlier writes of its thread.
                peers = tl.arange(0, triton.next_power_of_2(NUM_RANKS))
                is_peer = (peers < NUM_RANKS) & (peers != RANK)
                flag = _of_rank(flags, peers, NUM_RANKS).to(tl.pointer_type(tl.int32))
                flag += RANK * MAX_ROWS + row
                tl.atomic_xchg(flag, number, mask=is_peer, sem="release", scope="sys")
            else:
                wait_for(own_flags + owner * MAX_ROWS, number)
                box = boxes[RANK] + NUM_RANKS * SENDER_BYTES
                here = _rows_of(box, row, STRIDE, DTYPE)
                total = tl.load(here + i, mask=mask, other=0.0, cache_modifier=".cg")
                total = total.to(tl.float32)
            tl.store(numbers + row, number)
            base = row.to(tl.int64) * N
            y = total
            if HAS_RESIDUAL:
                y = rounded(total + more.to(tl.float32), DTYPE)
                tl.store(hidden + base + i, y.to(DTYPE), mask=mask)
            if FORM is not None:
                y = scaled(y * tl.rsqrt(mean_square(y, N) + eps), w.to(tl.float32), FORM, DTYPE)
            tl.store(out + base + i, y.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "lag", "num_tasks"])
def two_shot_kernel(  # type: ignore[no-untyped-def]
    partial, out, boxes, flags, numbers, residual, hidden, weight, eps, row_stride,
    residual_stride, num_rows, lag, num_tasks,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr, SENDER_BYTES: tl.constexpr, IS_PERSISTENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The results of :func:`.peer_memory.all_reduce_norm_kernel`, or of ``all_reduce_kernel``
    without a FORM, and their bits.

    Grid: ``(num_tasks,)``, or fewer if IS_PERSISTENT. There are ``(units + 2 * lag) * (NUM_RANKS -
    1 + NUM_RANKS * ROWS)`` tasks.

    Shapes: partial, residual, out and hidden ``[num_rows, N]``, the last two contiguous, weight
    ``[N]``. boxes: a tuple with the address of each rank's memory: ``NUM_RANKS * SENDER_BYTES`` for
    parts, by sender, then rows of sums. flags: likewise, int32 ``[NUM_RANKS, MAX_ROWS]``, by
    sender. numbers: int32 ``[MAX_ROWS]``, this rank's own: how often each row was in a call.
    """
    overlap(PDL, LATE_TRIGGER=True)
    if IS_PERSISTENT:
        for step in range(0, num_tasks - tl.program_id(0), tl.num_programs(0)):
            _run_task(
                tl.program_id(0) + step,
                partial, out, boxes, flags, numbers, residual, hidden, weight, eps, row_stride,
                residual_stride, num_rows, lag, N, BLOCK, ROWS, FORM, HAS_RESIDUAL, RANK,
                NUM_RANKS, MAX_ROWS, SENDER_BYTES,
            )  # fmt: skip
    else:
        _run_task(
            tl.program_id(0),
            partial, out, boxes, flags, numbers, residual, hidden, weight, eps, row_stride,
            residual_stride, num_rows, lag, N, BLOCK, ROWS, FORM, HAS_RESIDUAL, RANK, NUM_RANKS,
            MAX_ROWS, SENDER_BYTES,
        )  # fmt: skip


@triton.jit
def few_rows_two_shot_kernel(  # type: ignore[no-untyped-def]
    partial, out, boxes, ended, numbers, residual, hidden, weight, eps, row_stride,
    residual_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The results of :func:`.peer_memory.few_rows_norm_kernel`, in the same memory, and their bits.

    Grid: ``(rows,)``. Row i belongs to rank ``i % NUM_RANKS``. Its part of call n + 1 reaches each
    rank only after all ranks have ended call n. So a half of a box may be used again in call n + 2,
    whichever of the two kernels serves these calls (``spec/sentinel.py``).
    """
    DTYPE: tl.constexpr = partial.dtype.element_ty
    BITS: tl.constexpr = tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32
    i = tl.arange(0, BLOCK)
    mask = i < N
    w = tl.load(weight + i, mask=mask, other=0.0)
    overlap(PDL, LATE_TRIGGER=True)
    row = tl.program_id(0)
    owner = row % NUM_RANKS
    number = tl.load(numbers + row)
    half = (number & 1) * NUM_RANKS
    part = tl.load(partial + row.to(tl.int64) * row_stride + i, mask=mask, other=0.0)
    more = tl.zeros((BLOCK,), DTYPE)
    if HAS_RESIDUAL:
        place = residual + row.to(tl.int64) * residual_stride
        more = tl.load(place + i, mask=mask, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    if owner == RANK:
        for peer in tl.static_range(NUM_RANKS):
            if peer != RANK:
                at = boxes[RANK] + ((half + peer) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
                here = tl.multiple_of(at.to(tl.pointer_type(BITS)), 16) + i
                term = arrived(here, mask, ended).to(DTYPE, bitcast=True).to(tl.float32)
            else:
                term = part.to(tl.float32)
            # x_0 itself, not 0 + x_0, which would lose the sign of a zero.
            total = term if peer == 0 else total + term
        total = rounded(total, DTYPE)
        bits = bits_of(total.to(DTYPE))
        for peer in tl.static_range(NUM_RANKS):
            if peer != RANK:
                at = boxes[peer] + ((half + RANK) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
                tl.store(tl.multiple_of(at.to(tl.pointer_type(BITS)), 16) + i, bits, mask=mask)
    else:
        sent = ((half + RANK) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
        at = _of_rank(boxes, owner, NUM_RANKS) + sent
        there = tl.multiple_of(at.to(tl.pointer_type(BITS)), 16)
        tl.store(there + i, bits_of(part), mask=mask)
        at = boxes[RANK] + ((half + owner) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES
        here = tl.multiple_of(at.to(tl.pointer_type(BITS)), 16) + i
        total = arrived(here, mask, ended).to(DTYPE, bitcast=True).to(tl.float32)
    tl.store(numbers + row, number + 1)  # all threads have read it: they synchronised since
    base = row.to(tl.int64) * N
    h = total
    if HAS_RESIDUAL:
        h = rounded(total + more.to(tl.float32), DTYPE)
        tl.store(hidden + base + i, h.to(DTYPE), mask=mask)
    y = scaled(h * tl.rsqrt(mean_square(h, N) + eps), w.to(tl.float32), FORM, DTYPE)
    tl.store(out + base + i, y.to(DTYPE), mask=mask)
