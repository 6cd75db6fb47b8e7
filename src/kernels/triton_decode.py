"""Attention of single queries over pages: split-KV decode that merges its splits in one launch.

A program serves one token, one KV head with its G query heads, and some of the *pieces* of the
context. The first piece is the first ``FIRST`` splits, folded by the program; each later split is
a piece. Programs beside each other take pieces ``lane``, ``lane + num_lanes``, ...; if a context
has more than one, their states go to ``partial`` and ``stats``, and the program that arrives last
folds them in order. All choices of ``FIRST`` and ``num_lanes``, and all orders of arrival, give
the same bits (:mod:`pagespec.kernels.triton_softmax`), so the choices may follow the size of the
batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagespec.kernels.triton_arrive import arrives_last
from pagespec.kernels.triton_softmax import (
    block_ids,
    count_at_most,
    finish,
    fold,
    piece_begin,
    pieces_of,
    split_begin,
    walk,
)


@triton.jit
def _token_of(starts, contexts, num_rows, unit, BY_TOKEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, token, position) of a unit; position -1 if there is nothing to do.

    A unit is a token if BY_TOKEN (then at most B units), else a row, served if it has one query.
    """
    if BY_TOKEN:
        row = unit
        token = unit
        begin = tl.load(starts + unit)
        end = tl.load(starts + unit + 1)
        context = tl.load(contexts + unit)
        if (begin != unit) | (end != unit + 1):  # not the usual batch of one query each
            row = count_at_most(starts + 1, num_rows, unit, 1, False)
            end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
            context = tl.load(contexts + row, mask=row < num_rows, other=0)
        position = tl.where(row < num_rows, context - (end - token), -1)
    else:
        row = unit
        token = tl.load(starts + unit)
        is_single = tl.load(starts + unit + 1) - token == 1
        context = tl.load(contexts + unit)
        position = tl.where(is_single, context - 1, -1)
    return row, token, position


@triton.jit(
    # What follows the batch must not make new versions of the kernel.
    do_not_specialize=[
        "window",
        "q_token_stride",
        "q_head_stride",
        "table_stride",
        "num_rows",
        "num_lanes",
        "max_pieces",
    ],
    do_not_specialize_on_alignment=["starts", "contexts", "tables"],
)
def decode_kernel(  # type: ignore[no-untyped-def]
    query,
    k_cache,
    v_cache,
    out,
    partial,  # float32 [units, HQ, max_pieces, DV]
    stats,  # float32 [units, HQ, max_pieces, 2]: peak and mass
    arrived,  # int32 [units * HKV], zeros, and zeros again at the end
    starts,
    contexts,
    tables,
    sinks,
    factor,
    cap_in,
    cap_out,
    window,
    q_token_stride,  # in units of Q_STEP elements
    q_head_stride,
    table_stride,
    num_rows,
    num_lanes,
    max_pieces,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    Q_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    KNEE: tl.constexpr,
    FIRST: tl.constexpr,
    PAGE: tl.constexpr,
    ONES: tl.constexpr,
    GROUP: tl.constexpr,  # G, padded to a power of two
    CHUNK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    G: tl.constexpr = HQ // HKV
    unit = tl.program_id(1)
    head = tl.program_id(0) % HKV
    lane = tl.program_id(0) // HKV
    # The batch's own tensors are written by the first kernel of a step, which lets none start
    # before it has ended. So where to look is read already.
    row, token, position = _token_of(starts, contexts, num_rows, unit, BY_TOKEN)
    seen = tl.maximum(position, 0)  # of padding, which has a table all the same
    low, first_piece, last_piece = pieces_of(seen, window, SHORT, LONG, KNEE, FIRST, HAS_WINDOW)
    table = tables + tl.minimum(row, num_rows - 1).to(tl.int64) * table_stride
    begin = piece_begin(first_piece + lane, low, SHORT, LONG, KNEE, FIRST, BLOCK_N)
    blocks = block_ids(table, begin, seen, PAGE, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()

    in_group = tl.arange(0, BLOCK_M)
    heads = head * G + in_group
    dims = tl.arange(0, DV_PAD)
    is_head = in_group < G
    mask = is_head[:, None] & (dims < DV)[None, :]
    target = out + (token.to(tl.int64) * HQ + heads)[:, None] * DV + dims[None, :]
    if position < 0:
        if BY_TOKEN:  # padding; every lane writes it
            tl.store(target, tl.zeros((BLOCK_M, DV_PAD), out.dtype.element_ty), mask=mask)
        return

    if first_piece + lane > last_piece:
        return
    k_dims = tl.arange(0, DK_PAD)
    q = tl.load(
        query
        + token.to(tl.int64) * (q_token_stride * Q_STEP)
        + heads.to(tl.int64)[:, None] * (q_head_stride * Q_STEP)
        + k_dims[None, :],
        mask=is_head[:, None] & (k_dims < DK)[None, :],
        other=0.0,
    )
    positions = tl.zeros((BLOCK_M,), tl.int32) + position
    for piece in range(first_piece + lane, last_piece + 1, num_lanes):
        next_begin = piece_begin(piece + num_lanes, low, SHORT, LONG, KNEE, FIRST, BLOCK_N)
        next_blocks = block_ids(table, next_begin, position, PAGE, BLOCK_N)
        end = split_begin(piece + FIRST, SHORT, LONG, KNEE)
        total_peak, total_mass, total_acc, peak, mass, acc = walk(
            q,
            k_cache + head * DK,
            v_cache + head * DV,
            table,
            blocks,
            begin,
            tl.minimum(end, position + 1),
            position,
            positions,
            window,
            factor,
            cap_in,
            cap_out,
            HKV,
            DK,
            DV,
            DK_PAD,
            DV_PAD,
            BLOCK_M,
            BLOCK_N,
            SHORT,
            LONG,
            KNEE,
            PAGE,
            ONES,
            FIRST > 1,
            HAS_WINDOW,
            HAS_SOFTCAP,
            PRECISION,
        )
        begin = next_begin
        blocks = next_blocks
        # The last split of the piece, if its end was not reached; else empty, which is harmless.
        total_peak, total_mass, total_acc = fold(
            total_peak, total_mass, total_acc, peak, mass, acc, factor
        )
        if first_piece == last_piece:
            result = finish(
                total_peak, total_mass, total_acc, sinks, heads, is_head, factor, HAS_SINKS
            )
            tl.store(target, result.to(out.dtype.element_ty), mask=mask)
        else:
            index = (unit.to(tl.int64) * HQ + heads) * max_pieces + (piece - first_piece)
            tl.store(partial + index[:, None] * DV + dims[None, :], total_acc, mask=mask)
            tl.store(stats + index * 2, total_peak, mask=is_head)
            tl.store(stats + index * 2 + 1, tl.max(total_mass, 1), mask=is_head)

    if first_piece == last_piece:
        return
    num_pieces = last_piece - first_piece + 1
    # Lanes without a piece have returned above.
    if arrives_last(arrived + unit * HKV + head, tl.minimum(num_lanes, num_pieces)):
        _merge(
            partial,
            stats,
            out,
            sinks,
            unit,
            token,
            head,
            num_pieces,
            max_pieces,
            factor,
            HQ,
            G,
            DV,
            DV_PAD,
            GROUP,
            CHUNK,
            HAS_SINKS,
        )


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    partial,
    stats,
    out,
    sinks,
    unit,
    token,
    head,
    num_pieces,
    max_pieces,
    factor,
    HQ: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Fold the pieces of the query heads of one unit and KV head, and store the outputs."""
    in_group = tl.arange(0, GROUP)
    is_head = in_group < G
    # Beyond the group its last head again, whose mass is not 0.
    heads = head * G + tl.minimum(in_group, G - 1)
    dims = tl.arange(0, DV_PAD)
    index = (unit.to(tl.int64) * HQ + heads) * max_pieces
    total_peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total_mass = tl.zeros((GROUP, 1), tl.float32)
    total_acc = tl.zeros((GROUP, DV_PAD), tl.float32)
    # A chunk's loads are under way together; beyond the last piece, empty ones change nothing.
    # From L2, where other programs put them.
    for first in range(0, num_pieces, CHUNK):
        for i in tl.static_range(CHUNK):
            piece = tl.zeros((GROUP,), tl.int32) + (first + i)
            here = index + piece
            some = piece < num_pieces
            acc = tl.load(
                partial + here[:, None] * DV + dims[None, :],
                mask=some[:, None] & (dims < DV)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            peak = tl.load(stats + here * 2, mask=some, other=float("-inf"), cache_modifier=".cg")
            mass = tl.load(stats + here * 2 + 1, mask=some, other=0.0, cache_modifier=".cg")
            total_peak, total_mass, total_acc = fold(
                total_peak, total_mass, total_acc, peak, mass[:, None], acc, factor
            )
    result = finish(total_peak, total_mass, total_acc, sinks, heads, is_head, factor, HAS_SINKS)
    target = out + (token.to(tl.int64) * HQ + heads)[:, None] * DV + dims[None, :]
    mask = is_head[:, None] & (dims < DV)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
