"""Batch-invariant online softmax: device functions that all attention kernels share.

Online softmax over tiles of keys (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023), with
splits of the keys combined at the end (Flash-Decoding, Dao et al. 2023). Batch invariance as in He
2025, "Defeating Nondeterminism in LLM Inference". A query's result does not depend on its schedule
(decode, extend or prefill, alone or with others), because:

- Tiles of ``BLOCK_N`` positions and splits begin at fixed positions of the sequence, wherever the
  query's program begins and ends. Splits have ``NEAR_SPLIT`` positions up to position
  ``SPLIT_CHANGE``, so that a few short sequences still give many programs, and ``FAR_SPLIT``
  positions beyond. A tile or split in which a query sees nothing leaves its state unchanged, to the
  bit.
- Every split has new accumulators. Splits are folded into the total one by one in order of
  position, by the program that read them or by the last of several programs to arrive.
- No sum depends on a layout: scores, weighted values and the sum of the weights (a matmul with
  ones) come from ``tl.dot``. Each output element is one chain over the tile in order of position.
  Maxima are exact in any order.
- Where the compiler may or may not contract a multiplication and an addition, ``tl.fma`` fixes the
  choice.

The state of a split or a total is a tuple ``(row_max [M], row_sum [M, W], acc [M, DV])``, all
float32, of M *lines* (one query and head each): the largest score so far; the sum of the weights
exp(score - row_max), the same in all W columns; and the sum of weighted values, perhaps in two
tensors with one half each. In a *turned* (transposed) state, lines are columns: ``row_sum [W, M]``,
``acc [DV, M]``. ``factor`` converts scores to base-2 logarithms.

:mod:`.e4m3_tiles` computes the same steps for e4m3 caches.

Bundles of arguments (:class:`Splits`, :class:`Scoring`, ...) do not exist in compiled code: the PTX
is that of separate arguments. Kernels themselves take no tuples, for two reasons. Triton ignores
``do_not_specialize`` for a tuple's elements. The signatures of ahead-of-time compiled kernels
(:mod:`..jit`) are stored as JSON, which has no tuples.
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
    """:class:`HeadPages` of a KV head, with values from element ``part`` on."""
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
    """Constants: where the splits of a sequence begin."""

    NEAR_SPLIT: Any  # positions of a split up to SPLIT_CHANGE
    FAR_SPLIT: Any  # positions of a split beyond
    SPLIT_CHANGE: Any


class Scoring(NamedTuple):
    """How scores are masked, scaled and capped."""

    window: Any  # size of the window, or None
    factor: Any  # converts scores to base-2 logarithms; for e4m3 keys, one per line
    cap_in: Any  # factors of a softcap, or None
    cap_out: Any
    unit: Any = None  # for e4m3 keys, the unit of their scores, one per line


class TileShape(NamedTuple):
    """Sizes of a tile of keys and values: constants."""

    DK: Any
    DV: Any
    DK_PAD: Any
    DV_PAD: Any
    K_WIDTH: Any  # elements from a slot of the cache to the next slot of its block
    V_WIDTH: Any
    K_BLOCK: Any  # elements from a block to the next block
    V_BLOCK: Any
    PAGE: Any
    BLOCK_N: Any


class HeadPages(NamedTuple):
    """Pointers to the pages of one KV head (in the first block) and to the row's block table."""

    k_cache: Any
    v_cache: Any
    table: Any
    k_scales: Any  # for e4m3 caches, bytes from k_cache to the head's scales
    v_scales: Any


LOG2E = tl.constexpr(1.4426950408889634)
MIN_DOT = 16  # smallest side of a matrix instruction
ONES = tl.constexpr(MIN_DOT)  # columns of the matrix of ones that sums the weights


@triton.constexpr_function
def dot_size(size):  # type: ignore[no-untyped-def]
    """``size``, padded to a size that ``tl.arange`` and matrix instructions support."""
    return max(MIN_DOT, triton.next_power_of_2(size))


@triton.constexpr_function
def head_size(size, IS_E4M3):  # type: ignore[no-untyped-def]
    """:func:`dot_size` of a head. For e4m3 elements, each half is an operand."""
    return 2 * dot_size((size + 1) // 2) if IS_E4M3 else dot_size(size)


@triton.constexpr_function
def dot_precision(dtype):  # type: ignore[no-untyped-def]
    """``input_precision`` of matmuls: float32 operands are multiplied in float32, not TF32."""
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
    """Whether a split begins at ``start``, the start of a tile."""
    size = tl.where(start < splits.SPLIT_CHANGE, splits.NEAR_SPLIT, splits.FAR_SPLIT)
    return start & (size - 1) == 0


@triton.jit
def ends_split(end, splits):  # type: ignore[no-untyped-def]
    """Whether a split ends before ``end``, the end of a tile."""
    size = tl.where(end <= splits.SPLIT_CHANGE, splits.NEAR_SPLIT, splits.FAR_SPLIT)
    return end & (size - 1) == 0


@triton.jit
def per_line(x, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """``x [M]`` as a column for a state, or as a row for a turned state."""
    return x[None, :] if TURNED else x[:, None]


@triton.jit
def empty_state(  # type: ignore[no-untyped-def]
    M: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr = 1,
    TURNED: tl.constexpr = False,
):  # fmt: skip
    """The state of M lines that have seen no key, with values in PARTS of DV elements."""
    acc = tl.zeros((DV, M) if TURNED else (M, DV), tl.float32)
    row_sum = tl.zeros((W, M) if TURNED else (M, W), tl.float32)
    state = (tl.full((M,), float("-inf"), tl.float32), row_sum, acc)
    if PARTS == 2:
        state = state + (acc,)  # type: ignore[assignment]  # noqa: RUF005 (no star in Triton)
    return state


@triton.jit
def splits_in_first(  # type: ignore[no-untyped-def]
    position, splits, FIRST_SPLITS: tl.constexpr, UNSPLIT_BELOW: tl.constexpr,
    LONG_CONTEXT: tl.constexpr,
):  # fmt: skip
    """Number of splits in the first segment of a context that ends at ``position``."""
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
    """First position in view, and first and last segment, of a query at ``position``.

    Args:
        num_first: number of splits in the first segment.
    """
    low = tl.zeros_like(position)
    if window is not None:
        low = tl.maximum(position - window + 1, 0)
    first_segment = tl.maximum(split_of(low, splits) - (num_first - 1), 0)
    last_segment = tl.maximum(split_of(position, splits) - (num_first - 1), 0)
    return low, first_segment, last_segment


@triton.jit
def segment_begin(segment, low, num_first, splits, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """First tile of a segment that is in view."""
    begin = tl.where(segment == 0, 0, split_begin(segment + (num_first - 1), splits))
    return tl.maximum(begin, low // BLOCK_N * BLOCK_N)


@triton.jit
def capped(scores, cap_in, cap_out):  # type: ignore[no-untyped-def]
    """Softcap: ``cap_out * tanh(scores * cap_in)``."""
    # tanh x = 1 - 2 / (e^2x + 1), also correct where e^2x is 0 or infinite.
    power = tl.exp2(scores * (cap_in * (2.0 * LOG2E)))
    return tl.fma(-2.0, 1.0 / (power + 1.0), 1.0) * cap_out


@triton.jit
def score(q, k, scoring):  # type: ignore[no-untyped-def]
    """``[M, N]``: queries ``q [M, DK]`` with the keys of a tile, ``k [N, DK]``."""
    scores = tl.dot(q, tl.trans(k), input_precision=dot_precision(q.dtype))
    if scoring.cap_in is not None:
        scores = capped(scores, scoring.cap_in, scoring.cap_out)
    return scores


@triton.jit
def visible_in(start, positions, window, BLOCK_N: tl.constexpr, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which positions of the tile at ``start`` the lines at ``positions [M]`` see: ``[M, N]``,
    turned ``[N, M]``."""
    keys = per_line(start + tl.arange(0, BLOCK_N), not TURNED)
    visible = keys <= per_line(positions, TURNED)
    if window is not None:
        visible &= keys > per_line(positions, TURNED) - window
    return visible


@triton.jit
def dot(a, b, acc, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """``a [M, K] @ b [K, N] + acc``; if turned, all three are transposed."""
    if TURNED:
        a, b = b, a
    return tl.dot(a, b, acc, input_precision=dot_precision(a.dtype))


@triton.jit
def add_tile(scores, v, ones, state, factor, TURNED: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """The state with one more tile: ``scores [M, N]``, -inf where unseen, and ``v [N, DV]``. If
    turned, all are transposed."""
    row_max, row_sum, acc = state
    new_row_max = tl.maximum(row_max, tl.max(scores, 0 if TURNED else 1))
    # For lines that have seen no key: without this, -inf - -inf would be NaN.
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    weights = tl.exp2(tl.fma(scores, factor, per_line(-(base * factor), TURNED)))
    if TURNED:  # a matmul reads them from shared memory, so they are stored at once
        weights = weights.to(v.dtype)
    rescale = per_line(tl.exp2((row_max - base) * factor), TURNED)
    weights = weights.to(v.dtype)
    row_sum = dot(weights, ones, row_sum * rescale, TURNED)
    acc = dot(weights, v, acc * rescale, TURNED)
    return new_row_max, row_sum, acc


@triton.jit
def fold(total, state, factor, TURNED: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Fold a split into the total of the splits before it."""
    row_max = tl.maximum(total[0], state[0])
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    a = per_line(tl.exp2((total[0] - base) * factor), TURNED)
    b = per_line(tl.exp2((state[0] - base) * factor), TURNED)
    folded = (row_max,)
    for i in tl.static_range(1, len(state)):
        part = tl.fma(state[i], b, total[i] * a)
        folded = folded + (part,)  # type: ignore[assignment]  # noqa: RUF005 (no star in Triton)
    return folded


@triton.jit
def finish(state, sinks, heads, mask, factor):  # type: ignore[no-untyped-def]
    """The output ``[M, DV]`` of a total; ``heads [M]`` are query heads, masked by ``mask``."""
    row_max, row_sum, acc = state
    weight = tl.max(row_sum, 1)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32)
        weight += tl.exp2(tl.fma(-row_max, factor, sink * LOG2E))
    return acc * (1.0 / weight)[:, None]


@triton.jit
def block_ids(table, start, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block ids of the tile at ``start``: one if one block contains the tile, else ``[BLOCK_N]``.

    Positions beyond ``last`` are replaced by ``last``: unused entries of tables are not read.
    """
    if PAGE >= BLOCK_N:
        positions = tl.minimum(start, last)
    else:
        positions = tl.minimum(start + tl.arange(0, BLOCK_N), last)
    return tl.load(table + positions.to(tl.uint32) // PAGE)


@triton.jit
def slot_pointers(  # type: ignore[no-untyped-def]
    cache, blocks, start,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    TURNED: tl.constexpr = False,
):  # fmt: skip
    """Pointers to one head's vectors in the tile at ``start``: ``[BLOCK_N, 1]``, or turned
    ``[1, BLOCK_N]``.

    ``cache`` points to that head. WIDTH is the number of elements from a slot to the next, BLOCK
    from a block to the next. The kernels are bound by instructions or by memory, so everything that
    can be constant in the loop is.
    """
    offsets = tl.arange(0, BLOCK_N)
    base = cache + blocks.to(tl.int64) * BLOCK
    if PAGE >= BLOCK_N:
        pointers = base + (start & (PAGE - 1)) * WIDTH + per_line(offsets * WIDTH, TURNED)
    else:  # the tile begins where a block begins
        pointers = per_line(base, TURNED) + per_line((offsets & (PAGE - 1)) * WIDTH, TURNED)
    return pointers


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    cache, blocks, start, last,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ZEROED: tl.constexpr, TURNED: tl.constexpr = False,
):  # fmt: skip
    """``[BLOCK_N, D_PAD]`` of one KV head, or its transpose if turned, with zeros beyond D, and
    beyond ``last`` if ZEROED; arguments as in :func:`slot_pointers`."""
    dims = per_line(tl.arange(0, D_PAD), not TURNED)
    pointers = slot_pointers(cache, blocks, start, WIDTH, BLOCK, PAGE, BLOCK_N, TURNED) + dims
    if ZEROED:
        exists = per_line(tl.arange(0, BLOCK_N) <= last - start, TURNED)
        mask = exists if D == D_PAD else exists & (dims < D)
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif D == D_PAD:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=dims < D, other=0.0)
    return tile


@triton.jit
def offsets_of(WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """0, 1, ... WIDTH - 1. Gluon kernels replace this by a version with a layout."""
    return tl.arange(0, WIDTH)


@triton.jit
def count_at_most(  # type: ignore[no-untyped-def]
    starts, last, bound, TIMES: tl.constexpr, STEP: tl.constexpr, INDEXED: tl.constexpr,
    WIDTH: tl.constexpr, OFFSETS: tl.constexpr = offsets_of,
):  # fmt: skip
    """The number of i up to ``last`` with ``starts[i] * TIMES // STEP + (i if INDEXED) <= bound``;
    reads WIDTH entries at a time."""
    total = 0
    for first in range(0, last + 1, WIDTH):
        i = first + OFFSETS(WIDTH)
        keys = tl.load(starts + i, mask=i <= last, other=0) * TIMES // STEP
        if INDEXED:
            keys += i
        total += tl.sum(((keys <= bound) & (i <= last)).to(tl.int32), 0)
    return total
