"""Batch-invariant online softmax: device functions that all attention kernels share.

Online softmax over tiles of keys (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023), with
splits of the keys combined at the end (Flash-Decoding, Dao et al. 2023). Batch invariance as in
He 2025, "Defeating Nondeterminism in LLM Inference". What makes the result of
a query independent of how it was scheduled (decode, extend, prefill; alone or with others):

- tiles of ``BLOCK_N`` positions and splits begin at fixed positions of the sequence, wherever the
  query's program begins and ends. Splits hold ``NEAR_SPLIT`` positions up to position
  ``SPLIT_CHANGE``, so that few short sequences still make many programs, and ``FAR_SPLIT`` beyond.
  A tile or a split in which a query sees nothing leaves its state as it was, to the bit;
- every split has fresh accumulators, and splits are folded into the total one by one in order of
  position, whether by the program that read them or by the last of several to arrive;
- no sum depends on a layout: scores, weighted values and the sum of the weights (a matmul with
  ones) come from ``tl.dot``, each output element of which is one chain over the tile in order of
  position. Maxima are exact in any order;
- where the compiler could contract a product and a sum or not, ``tl.fma`` says which.

State of a split or a total: ``row_max [M]``, the largest score so far; ``row_sum [M, W]``, the sum
of the weights exp(score - row_max), the same in all W columns; ``acc [M, DV]``, the sum of weighted
values. All float32. ``factor`` turns scores into logarithms to base 2.

Of caches of e4m3 numbers :mod:`.e4m3_tiles` takes the same steps.

Bundles of arguments (:class:`Splits`, :class:`Scoring`, ...) are gone when a kernel is compiled:
the PTX is that of separate arguments. Kernels themselves take no tuples: Triton ignores
``do_not_specialize`` for a tuple's elements, and the forms of kernels that are compiled ahead
(:mod:`..jit`) are JSON, which keeps no tuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..fused.e4m3_store import SCALE_BYTES, is_e4m3
from .tiling import ALL_SPLITS


@triton.jit
def head_pages(  # type: ignore[no-untyped-def]
    k_cache, v_cache, table, head, part,
    HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """:class:`HeadPages` of a KV head, its values from element ``part`` on."""
    pages = HeadPages(k_cache + head * DK, v_cache + head * DV + part, table, 0, 0)
    if is_e4m3(k_cache.dtype.element_ty):
        pages = HeadPages(
            k_cache + head * (PAGE * DK),
            v_cache + (head * (PAGE * DV) + part),
            table,
            HKV * PAGE * DK + head * (PAGE * (SCALE_BYTES - DK)),
            HKV * PAGE * DV + head * (PAGE * (SCALE_BYTES - DV)) - part,
        )
    return pages


class Splits(NamedTuple):
    """Where the splits of a sequence begin: constants."""

    NEAR_SPLIT: Any  # positions of a split up to SPLIT_CHANGE
    FAR_SPLIT: Any  # positions of a split beyond
    SPLIT_CHANGE: Any


class Scoring(NamedTuple):
    """How scores are masked, scaled and capped."""

    window: Any  # or None
    factor: Any  # turns scores into logarithms to base 2; of e4m3 keys, one a line
    cap_in: Any  # of a softcap, or None
    cap_out: Any
    PRECISION: Any  # of tl.dot
    unit: Any = None  # of e4m3 keys, what products with them are in units of, one a line


class TileShape(NamedTuple):
    """Sizes of a tile of keys and values: constants."""

    DK: Any
    DV: Any
    DK_PAD: Any
    DV_PAD: Any
    K_WIDTH: Any  # elements from a slot of the cache to the next in its block
    V_WIDTH: Any
    K_BLOCK: Any  # elements from a block to the next
    V_BLOCK: Any
    PAGE: Any
    BLOCK_N: Any


class HeadPages(NamedTuple):
    """Pointers to the pages of one KV head, in the first block, and to the row's block table."""

    k_cache: Any
    v_cache: Any
    table: Any
    k_scales: Any  # bytes from k_cache to the head's scales, of e4m3 caches
    v_scales: Any


LOG2E = tl.constexpr(1.4426950408889634)
MIN_DOT = 16  # smallest side of a matrix instruction
ONES = tl.constexpr(MIN_DOT)  # columns of the matrix of ones that sums the weights


@triton.constexpr_function
def dot_size(size):  # type: ignore[no-untyped-def]
    """``size``, padded to what ``tl.arange`` and a matrix instruction take."""
    return max(MIN_DOT, triton.next_power_of_2(size))


@triton.constexpr_function
def head_size(size, IS_E4M3):  # type: ignore[no-untyped-def]
    """:func:`dot_size` of a head, of whose e4m3 numbers each half is an operand."""
    return 2 * dot_size((size + 1) // 2) if IS_E4M3 else dot_size(size)


@triton.constexpr_function
def dot_precision(dtype):  # type: ignore[no-untyped-def]
    """``input_precision`` of matmuls: float32 operands are multiplied as such, not as TF32."""
    return "ieee" if dtype == tl.float32 else "tf32"


@triton.jit
def split_of(position, splits):  # type: ignore[no-untyped-def]
    """Number of the split that holds ``position``."""
    return tl.where(
        position < splits.SPLIT_CHANGE,
        position // splits.NEAR_SPLIT,
        splits.SPLIT_CHANGE // splits.NEAR_SPLIT
        + (position - splits.SPLIT_CHANGE) // splits.FAR_SPLIT,
    )


@triton.jit
def split_begin(split, splits):  # type: ignore[no-untyped-def]
    """First position of a split."""
    return tl.where(
        split < splits.SPLIT_CHANGE // splits.NEAR_SPLIT,
        split * splits.NEAR_SPLIT,
        splits.SPLIT_CHANGE + (split - splits.SPLIT_CHANGE // splits.NEAR_SPLIT) * splits.FAR_SPLIT,
    )


@triton.jit
def begins_split(start, splits):  # type: ignore[no-untyped-def]
    """Whether a split begins at ``start``, where a tile does."""
    size = tl.where(start < splits.SPLIT_CHANGE, splits.NEAR_SPLIT, splits.FAR_SPLIT)
    return start & (size - 1) == 0


@triton.jit
def ends_split(end, splits):  # type: ignore[no-untyped-def]
    """Whether a split ends in front of ``end``, where a tile does."""
    size = tl.where(end <= splits.SPLIT_CHANGE, splits.NEAR_SPLIT, splits.FAR_SPLIT)
    return end & (size - 1) == 0


@triton.jit
def empty_state(M: tl.constexpr, W: tl.constexpr, DV: tl.constexpr):  # type: ignore[no-untyped-def]
    """``row_max``, ``row_sum`` and ``acc`` of M rows that have seen nothing."""
    row_max = tl.full((M,), float("-inf"), tl.float32)
    return row_max, tl.zeros((M, W), tl.float32), tl.zeros((M, DV), tl.float32)


@triton.jit
def splits_in_first(  # type: ignore[no-untyped-def]
    position,
    splits,
    FIRST_SPLITS: tl.constexpr,
    UNSPLIT_BELOW: tl.constexpr,
    LONG_CONTEXT: tl.constexpr,
):
    """Splits in the first segment of a context that ends at ``position``."""
    num_first = tl.full((), FIRST_SPLITS, tl.int32)
    if UNSPLIT_BELOW > 0:
        num_first = tl.where(position < UNSPLIT_BELOW, ALL_SPLITS, num_first)
    if LONG_CONTEXT > 0:
        num_first = tl.where(
            position >= LONG_CONTEXT - 1,
            max(FIRST_SPLITS, splits.SPLIT_CHANGE // splits.NEAR_SPLIT),
            num_first,
        )
    return num_first


@triton.jit
def segments_of(position, window, num_first, splits):  # type: ignore[no-untyped-def]
    """First position in view, and the first and last segment of a query at ``position``.

    Args:
        num_first: splits in the first segment.
    """
    low = tl.zeros_like(position)
    if window is not None:
        low = tl.maximum(position - window + 1, 0)
    first_segment = tl.maximum(split_of(low, splits) - (num_first - 1), 0)
    last_segment = tl.maximum(split_of(position, splits) - (num_first - 1), 0)
    return low, first_segment, last_segment


@triton.jit
def segment_begin(segment, low, num_first, splits, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """First tile in view of a segment."""
    begin = tl.where(segment == 0, 0, split_begin(segment + (num_first - 1), splits))
    return tl.maximum(begin, low // BLOCK_N * BLOCK_N)


@triton.jit
def capped(scores, cap_in, cap_out):  # type: ignore[no-untyped-def]
    """Softcap: ``cap_out * tanh(scores * cap_in)``."""
    # tanh x = 1 - 2 / (e^2x + 1), right at both ends where e^2x is 0 or infinite.
    power = tl.exp2(scores * (cap_in * (2.0 * LOG2E)))
    return tl.fma(-2.0, 1.0 / (power + 1.0), 1.0) * cap_out


@triton.jit
def score(q, k, scoring):  # type: ignore[no-untyped-def]
    """``[M, N]``: queries ``q [M, DK]`` with the keys of a tile, ``k [N, DK]``."""
    scores = tl.dot(q, tl.trans(k), input_precision=scoring.PRECISION)
    if scoring.cap_in is not None:
        scores = capped(scores, scoring.cap_in, scoring.cap_out)
    return scores


@triton.jit
def add_tile(scores, v, ones, row_max, row_sum, acc, factor, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state with one more tile: ``scores [M, N]``, -inf where unseen, and ``v [N, DV]``."""
    new_row_max = tl.maximum(row_max, tl.max(scores, 1))
    # Rows that have seen nothing yet: without this, -inf - -inf.
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(tl.fma(scores, factor, -(base * factor)[:, None]))
    rescale = tl.exp2((row_max - base) * factor)
    weights = weights.to(v.dtype)
    row_sum = tl.dot(weights, ones, row_sum * rescale[:, None], input_precision=PRECISION)
    acc = tl.dot(weights, v, acc * rescale[:, None], input_precision=PRECISION)
    return new_row_max, row_sum, acc


@triton.jit
def fold(total_row_max, total_row_sum, total_acc, row_max, row_sum, acc, factor):  # type: ignore[no-untyped-def]
    """Fold a split into the total of the splits before it."""
    new_row_max = tl.maximum(total_row_max, row_max)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    a = tl.exp2((total_row_max - base) * factor)[:, None]
    b = tl.exp2((row_max - base) * factor)[:, None]
    total_row_sum = tl.fma(row_sum, b, total_row_sum * a)
    total_acc = tl.fma(acc, b, total_acc * a)
    return new_row_max, total_row_sum, total_acc


@triton.jit
def finish(row_max, row_sum, acc, sinks, heads, mask, factor):  # type: ignore[no-untyped-def]
    """The output ``[M, DV]`` of a total; ``heads [M]`` are query heads, ``mask`` says which."""
    weight = tl.max(row_sum, 1)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32)
        weight += tl.exp2(tl.fma(-row_max, factor, sink * LOG2E))
    return acc * (1.0 / weight)[:, None]


@triton.jit
def block_ids(table, start, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block ids of the tile at ``start``: one if a tile lies in one block, else ``[BLOCK_N]``.

    Positions beyond ``last`` stand for ``last``: the unused ends of tables are not looked at.
    """
    if PAGE >= BLOCK_N:
        positions = tl.minimum(start, last)
    else:
        positions = tl.minimum(start + tl.arange(0, BLOCK_N), last)
    return tl.load(table + positions.to(tl.uint32) // PAGE)


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    cache, blocks, start, last,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N, D_PAD]`` of one KV head, zeros beyond D, and beyond ``last`` if ZEROED.

    ``cache`` points to that head; WIDTH are the elements from a slot to the next, BLOCK those from
    a block to the next. The kernels are bound by instructions where they are not by memory: what
    can be a constant of the loop is one.
    """
    dims = tl.arange(0, D_PAD)
    offsets = tl.arange(0, BLOCK_N)
    base = cache + blocks.to(tl.int64) * BLOCK
    if PAGE >= BLOCK_N:
        rows = base + (start & (PAGE - 1)) * WIDTH + (offsets * WIDTH)[:, None]
    else:  # the tile begins where a block begins
        rows = base[:, None] + ((offsets & (PAGE - 1)) * WIDTH)[:, None]
    pointers = rows + dims[None, :]
    if ZEROED:
        exists = (offsets <= last - start)[:, None]
        mask = exists if D == D_PAD else exists & (dims < D)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif D == D_PAD:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
    return tile


@triton.jit
def load_tile(pages, blocks, start, last, shape):  # type: ignore[no-untyped-def]
    """Keys ``[BLOCK_N, DK_PAD]`` and values ``[BLOCK_N, DV_PAD]`` of the tile at ``start``."""
    # Keys of unused slots, NaN perhaps, are masked as scores. Values have to be numbers.
    k = load_rows(
        pages.k_cache, blocks, start, last,
        shape.DK, shape.DK_PAD, shape.K_WIDTH, shape.K_BLOCK, shape.PAGE, shape.BLOCK_N, False,
    )  # fmt: skip
    v = load_rows(
        pages.v_cache, blocks, start, last,
        shape.DV, shape.DV_PAD, shape.V_WIDTH, shape.V_BLOCK, shape.PAGE, shape.BLOCK_N, True,
    )  # fmt: skip
    return k, v


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    q, pages, blocks, begin, end, last, positions, scoring, splits, shape,
    FOLD: tl.constexpr,
):  # fmt: skip
    """The decode kernel's loop over the tiles that begin in ``[begin, end)``: the total of the
    splits that end there, and the state of one that does not. ``begin`` is a multiple of BLOCK_N.

    Args:
        q: ``[M, DK_PAD]``. pages: :class:`HeadPages`.
        blocks: the :func:`block_ids` of ``begin``, loaded early.
        last: last position any of the queries sees.
        positions: of the queries, ``[M]``.
        scoring, splits, shape: the bundles of that name.
        FOLD: False if all tiles are of one split, which is then left to the caller to fold.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    offsets = tl.arange(0, BLOCK_N)
    ones = tl.full((BLOCK_N, ONES), 1.0, pages.v_cache.dtype.element_ty)
    total_row_max, total_row_sum, total_acc = empty_state(BLOCK_M, ONES, shape.DV_PAD)
    row_max, row_sum, acc = total_row_max, total_row_sum, total_acc
    for start in tl.range(begin, end, BLOCK_N):
        k, v = load_tile(pages, blocks, start, last, shape)
        # One tile ahead: an address must not wait for the load of its block id.
        blocks = block_ids(pages.table, start + BLOCK_N, last, shape.PAGE, BLOCK_N)
        visible = (start + offsets)[None, :] <= positions[:, None]
        if scoring.window is not None:
            visible &= (start + offsets)[None, :] > positions[:, None] - scoring.window
        scores = score(q, k, scoring)
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, acc = add_tile(
            scores, v, ones, row_max, row_sum, acc, scoring.factor, scoring.PRECISION
        )
        if FOLD:  # noqa: SIM102 (one is known when compiling, the other is not)
            if ends_split(start + BLOCK_N, splits):
                total_row_max, total_row_sum, total_acc = fold(
                    total_row_max, total_row_sum, total_acc, row_max, row_sum, acc, scoring.factor
                )
                row_max, row_sum, acc = empty_state(BLOCK_M, ONES, shape.DV_PAD)
    return total_row_max, total_row_sum, total_acc, row_max, row_sum, acc


@triton.jit
def count_at_most(  # type: ignore[no-untyped-def]
    starts, count, bound, STEP: tl.constexpr, INDEXED: tl.constexpr, WIDTH: tl.constexpr
):
    """How many i < count have ``starts[i] // STEP + (i if INDEXED) <= bound``; WIDTH at a time."""
    total = 0
    for first in range(0, count, WIDTH):
        i = first + tl.arange(0, WIDTH)
        keys = tl.load(starts + i, mask=i < count, other=0) // STEP
        if INDEXED:
            keys += i
        total += tl.sum(((keys <= bound) & (i < count)).to(tl.int32))
    return total
