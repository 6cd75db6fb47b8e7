"""Greedy and temperature sampling by the Gumbel-max trick, as two kernels inside a CUDA graph.

A token is chosen as in :mod:`.sampler`: first its group, then the token within the group. One
kernel reads the logits and computes the weight of every group, with one exponential per token and
no random numbers, so memory bandwidth limits it. The other, one program per row, draws a group and
a token of that group. The weight of a group is computed in one fixed order whatever the batch.
Greedy rows use the same path without noise. Of equal scores the lowest id wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_functions import (
    Results,
    Rows,
    allowed,
    arguments_of,
    first_of_best,
    load_logits,
    noise_of,
    places_of,
    source_of,
    store_token,
)
from .sampler import GROUP, VocabShard

_STRETCH = 4096
"""Tokens per program of the first kernel."""


_OF_ROWS = {
    "do_not_specialize": ["num_groups", "masks_stride"],
    "do_not_specialize_on_alignment": ["places", "sources", "numbers"],
}


@triton.jit(**_OF_ROWS)
def _weigh_kernel(  # type: ignore[no-untyped-def]
    logits, places, sources, numbers, masks, temperatures, weights,
    logits_stride, masks_stride, num_groups,
    VOCAB: tl.constexpr, STRETCH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The largest logit of each group, and the sum of exp((logit - largest) / temperature), as a
    pair in ``weights [rows, num_groups, 2]``. Without ``places``, a row's place is its index."""
    stretch = tl.program_id(0)
    row = tl.program_id(1)
    words = None
    if masks is not None:
        words = masks + tl.load(numbers + row).to(tl.int64) * masks_stride
    place = row
    if places is not None:
        place = tl.load(places + row)
    group = stretch * (STRETCH // GROUP) + tl.arange(0, STRETCH // GROUP)
    base = logits + source_of(sources, row, place) * logits_stride
    logit = load_logits(base, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], VOCAB)
    if words is not None:
        flat = allowed(tl.reshape(logit, [STRETCH]), words, stretch * STRETCH, VOCAB, STRETCH)
        logit = tl.reshape(flat, [STRETCH // GROUP, GROUP])
    top = tl.max(logit, 1)
    # log2(e) / temperature. Never 0, because 0 times -inf would be NaN.
    scale = tl.maximum(1.4426950408889634 / tl.load(temperatures + place), 1e-30)
    # The minimum maps NaN to 0: infinity minus infinity, and 0 times an infinite scale.
    exponent = tl.minimum((logit - top[:, None]) * scale, 0.0)
    target = weights + 2 * (row * num_groups + group)
    tl.store(target, top, mask=group < num_groups)
    tl.store(target + 1, tl.sum(tl.exp2(exponent), 1), mask=group < num_groups)


@triton.jit
def _choose_group(  # type: ignore[no-untyped-def]
    weights, num_groups, row, temperature, seed, position, PADDED: tl.constexpr
):
    """The argmax of ``log p + Gumbel noise`` over groups; without noise for a greedy row."""
    groups = tl.arange(0, PADDED)
    place = weights + 2 * (row * num_groups + groups)
    tops = tl.load(place, mask=groups < num_groups, other=float("-inf"))
    total = tl.load(place + 1, mask=groups < num_groups, other=1.0)
    top = tl.max(tops, 0)
    distance = tl.where(tops == top, 0.0, (top - tops) / temperature)
    score = tl.log(total) - distance + noise_of(seed, position, groups, 1)
    score = tl.where(tops > float("-inf"), score, float("-inf"))
    score = tl.where(temperature > 0.0, score, tops)
    return first_of_best(score, groups)


@triton.jit
def _choose_token(  # type: ignore[no-untyped-def]
    logits, words, group, first_id, temperature, seed, position,
    VOCAB: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same over the tokens of a group. The first of the logits belongs to ``first_id``."""
    ids = group * GROUP + tl.arange(0, GROUP)
    logit = load_logits(logits, ids - first_id, VOCAB)
    logit = allowed(logit, words, group * GROUP - first_id, VOCAB, GROUP)
    top = tl.max(logit, 0)
    distance = tl.where(logit == top, 0.0, (top - logit) / temperature)
    score = noise_of(seed, position, ids, 0) - distance
    score = tl.where(logit > float("-inf"), score, float("-inf"))
    score = tl.where(temperature > 0.0, score, logit)
    return first_of_best(score, ids)


@triton.jit(**_OF_ROWS)
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits, places, sources, numbers, masks, temperatures, seeds, positions, weights,
    sampled, results, result_row,
    logits_stride, masks_stride, results_stride, num_groups,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, FIRST_ID: tl.constexpr,
):  # fmt: skip
    """A token per row. Grid: ``(rows,)``. Shapes: logits ``[rows, VOCAB]``, weights
    ``[rows, num_groups, 2]``.

    With a ``FIRST_ID``, the weights are those of all ranks' groups, and the logits those of this
    rank, from that id on. The token is -1 if another rank has it.
    """
    row = tl.program_id(0)
    words = None
    if masks is not None:
        words = masks + tl.load(numbers + row).to(tl.int64) * masks_stride
    place = row
    if places is not None:
        place = tl.load(places + row)
    temperature = tl.load(temperatures + place)
    seed = tl.load(seeds + place)
    position = tl.load(positions + place)
    group = _choose_group(weights, num_groups, row, temperature, seed, position, PADDED)
    base = logits + source_of(sources, row, place) * logits_stride
    if FIRST_ID is None:
        token = _choose_token(base, words, group, 0, temperature, seed, position, VOCAB, GROUP)
        store_token(token, place, sampled, results, result_row, results_stride)
    else:
        token = -1
        if (group * GROUP >= FIRST_ID) & (group * GROUP < FIRST_ID + VOCAB):
            token = _choose_token(
                base, words, group, FIRST_ID, temperature, seed, position, VOCAB, GROUP
            )
        tl.store(sampled + place, token)


@triton.jit
def _store_found_kernel(  # type: ignore[no-untyped-def]
    found, sampled, results, result_row, results_stride, last_id, NUM_RANKS: tl.constexpr
):
    """Store the token that one of the ranks found. Grid: ``(rows,)``. found ``[rows, NUM_RANKS]``.

    If a rank was lost, found may contain any value. It is clamped to ``0 .. last_id``: the next
    step is already queued, and an embedding asserts on other ids, which makes the GPU unusable for
    the rest of the process.
    """
    row = tl.program_id(0)
    token = tl.load(found + row * NUM_RANKS)
    for rank in tl.static_range(1, NUM_RANKS):
        token = tl.maximum(token, tl.load(found + row * NUM_RANKS + rank))
    token = tl.minimum(tl.maximum(token, 0), last_id)
    store_token(token, row, sampled, results, result_row, results_stride)


def sample_simple(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sampled: Tensor,
    results: Results | None = None,
    shard: VocabShard | None = None,
    rows: Rows | None = None,
) -> None:
    """Write one token per row into ``sampled``; for rows without top_k, top_p and min_p.

    Args:
        logits: ``[S, V]``, any float dtype, rows contiguous, S at most 65,535.
        temperatures: float32 ``[>= S]``, 0 for greedy. seeds, positions: int64 ``[>= S]``.
        sampled: int64 ``[>= S]``, written. results: also written.
        shard: the tokens that these logits belong to, if not all. Then ranks exchange the groups'
            weights and the chosen tokens, but not the logits. All ranks write the same tokens:
            those that one rank would choose from the same logits.
        rows: sample only these rows; without a shard.
    """
    num_rows, vocab_size = logits.shape
    places, sources, numbers, masks, masks_stride = arguments_of(rows)
    if places is not None:
        num_rows = len(places)
    num_groups = triton.cdiv(vocab_size, GROUP)
    weights = torch.empty(num_rows, num_groups, 2, dtype=torch.float32, device=logits.device)
    _weigh_kernel[(triton.cdiv(vocab_size, _STRETCH), num_rows)](
        logits, places, sources, numbers, masks, temperatures, weights,
        logits.stride(0), masks_stride, num_groups,
        VOCAB=vocab_size, STRETCH=_STRETCH, GROUP=GROUP, num_warps=4,
    )  # fmt: skip
    target, first_id = sampled, None
    tokens, result_row, results_stride = of_results = places_of(results)
    if shard is not None:
        sizes = [2 * triton.cdiv(size, GROUP) for size in shard.sizes]
        weights = shard.communicator.all_gather(weights.view(num_rows, -1), sizes)
        num_groups, first_id = sum(sizes) // 2, shard.first_id
        target = torch.empty(num_rows, 1, dtype=torch.int32, device=logits.device)
        tokens = result_row = None
    _choose_kernel[(num_rows,)](
        logits, places, sources, numbers, masks, temperatures, seeds, positions, weights,
        target, tokens, result_row,
        logits.stride(0), masks_stride, results_stride, num_groups,
        VOCAB=vocab_size, GROUP=GROUP, PADDED=triton.next_power_of_2(num_groups),
        FIRST_ID=first_id, num_warps=8,
    )  # fmt: skip
    if shard is not None:
        num_ranks = len(shard.sizes)
        found = shard.communicator.all_gather(target, [1] * num_ranks)
        _store_found_kernel[(num_rows,)](
            found, sampled, *of_results, shard.last_id, NUM_RANKS=num_ranks
        )
