"""Combine step of split-KV decode: the last program of a group to arrive folds all segments.

The last-block reduction of CUDA's threadFenceReduction sample for Flash-Decoding (Dao et al. 2023):
an atomic counter per unit and KV head elects the program, so that no second kernel is needed.

How long that takes is a matter of latency: the loads of one chunk are under way together, and the
next chunk's wait for the folds of this one. So a chunk is as large as the registers of the decode
kernel allow; of few segments, a smaller one, since also segments that do not exist are folded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import finish, fold
from .results import results_at, store_lines


@triton.jit
def _fold_segments(  # type: ignore[no-untyped-def]
    partial, stats, index, first, num_segments, total_row_max, total_row_sum, total_acc, factor,
    DV: tl.constexpr, DV_PAD: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The total with segments ``first`` to ``first + CHUNK``, loaded together and folded in order.

    Beyond the last segment there are empty ones, which change nothing.
    """
    dims = tl.arange(0, DV_PAD)
    for i in tl.static_range(CHUNK):
        segment = tl.zeros((GROUP,), tl.int32) + (first + i)
        here = index + segment
        some = segment < num_segments
        # From L2, where other programs put them.
        acc = tl.load(
            partial + here[:, None] * DV + dims[None, :],
            mask=some[:, None] & (dims < DV)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        row_max = tl.load(stats + here * 2, mask=some, other=float("-inf"), cache_modifier=".cg")
        row_sum = tl.load(stats + here * 2 + 1, mask=some, other=0.0, cache_modifier=".cg")
        total_row_max, total_row_sum, total_acc = fold(
            total_row_max, total_row_sum, total_acc, row_max, row_sum[:, None], acc, factor
        )
    return total_row_max, total_row_sum, total_acc


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    partial, stats, out, scales, num_tokens, sinks, unit, token, head, num_segments, max_segments,
    factor,
    HQ: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, FEW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Fold the segments of the query heads of one unit and KV head, and store the outputs.

    Args:
        partial, stats, out, scales: as of :func:`.decode.decode_kernel`.
        CHUNK: segments loaded at once. FEW: those loaded at once if there are no more; else twice
            as many, if those suffice. DTYPE: the model's.
    """
    in_group = tl.arange(0, GROUP)
    is_head = in_group < G
    # Beyond the group its last head again, whose row_sum is not 0.
    heads = head * G + tl.minimum(in_group, G - 1)
    index = (unit.to(tl.int64) * HQ + heads) * max_segments
    row_max = tl.full((GROUP,), float("-inf"), tl.float32)
    row_sum = tl.zeros((GROUP, 1), tl.float32)
    acc = tl.zeros((GROUP, DV_PAD), tl.float32)
    MORE: tl.constexpr = min(2 * FEW, CHUNK)
    if num_segments <= FEW:
        row_max, row_sum, acc = _fold_segments(
            partial, stats, index, 0, num_segments, row_max, row_sum, acc, factor,
            DV, DV_PAD, GROUP, FEW,
        )  # fmt: skip
    elif num_segments <= MORE:
        row_max, row_sum, acc = _fold_segments(
            partial, stats, index, 0, num_segments, row_max, row_sum, acc, factor,
            DV, DV_PAD, GROUP, MORE,
        )  # fmt: skip
    else:
        for first in range(0, num_segments, CHUNK):
            row_max, row_sum, acc = _fold_segments(
                partial, stats, index, first, num_segments, row_max, row_sum, acc, factor,
                DV, DV_PAD, GROUP, CHUNK,
            )  # fmt: skip
    result = finish(row_max, row_sum, acc, sinks, heads, is_head, factor)
    results = results_at(
        out, scales, num_tokens, token.to(tl.int64), heads, is_head, 0, DV_PAD, HQ, DV
    )
    store_lines(result, results, DTYPE, scales is not None)


@triton.jit
def is_last_arrival(counter, expected):  # type: ignore[no-untyped-def]
    """Whether this program is the last of ``expected`` to call this; the counter is 0 again then.

    What the others stored before can be loaded from L2 after it (``cache_modifier=".cg"``): the
    barrier puts the stores of all threads before the one atomic, which releases them to the whole
    card and acquires those of the others.

    Args:
        counter: pointer to an int32, 0 before the first of them arrives.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
    return is_last
