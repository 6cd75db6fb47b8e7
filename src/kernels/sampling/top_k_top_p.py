"""Top-k, top-p and min-p as kernels without a sort or a synchronisation: sampling, and the scores
that a row is sampled from ("processed" log-probabilities).

One program per row. :mod:`.top_k_top_p_threshold` finds the tokens that the row keeps. From these a
group is drawn, then a token of the group, as in :mod:`.sampler`. Passes read fixed tiles in a fixed
order, so the bits of a row do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_functions import (
    Results,
    Rows,
    arguments_of,
    first_of_best,
    noise_of,
    places_of,
    source_of,
    store_token,
)
from .sampler import GROUP
from .top_k_top_p_threshold import (
    CUT_FIELDS,
    find_threshold,
    keep_mask,
    largest_logit,
    token_keys,
)

# The fastest on an H100 (docs/notes/sampling.md).
_TILE = 4096
_NUM_WARPS = 32
_LOOKUP = 1024
TRUNCATED_FIELDS = 1 + CUT_FIELDS
"""int32 fields of a row to sample, each an array ``[S]``: its place, then ``CUT_FIELDS``."""


@triton.jit(
    do_not_specialize=["num_rows", "masks_stride"],
    do_not_specialize_on_alignment=["fields", "sources", "numbers"],
)
def _truncated_kernel(  # type: ignore[no-untyped-def]
    logits, fields, sources, numbers, masks, temperatures, seeds, positions, sampled, results,
    result_row, logits_stride, masks_stride, results_stride, num_rows,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Draw one token per row from the tokens that top-k, top-p and min-p keep, by the Gumbel-max
    trick.

    Grid: ``(rows,)``. Shapes: logits ``[.., VOCAB]``.
    """
    row = tl.program_id(0)
    place = tl.load(fields + row)
    if place >= 0:
        temperature = tl.load(temperatures + place)
        # A greedy token is the first of the most likely tokens.
        most = tl.where(temperature > 0.0, VOCAB, 1)
        temperature = tl.where(temperature > 0.0, temperature, 1.0)
        base = logits + source_of(sources, row, place) * logits_stride
        words = None
        if masks is not None:
            words = masks + tl.load(numbers + row).to(tl.int64) * masks_stride
        top = largest_logit(base, words, VOCAB, TILE)
        limit, num_at_threshold, is_tied = find_threshold(
            base, words, top, temperature, fields + num_rows, row, num_rows, most, VOCAB, TILE
        )

        seed = tl.load(seeds + place)
        position = tl.load(positions + place)
        num_seen = limit * 0
        # Per group, one row per tile: the weight of the kept tokens, and the number at ``limit``.
        tiles = tl.arange(0, NUM_TILES)[:, None]
        groups = tiles * (TILE // GROUP) + tl.arange(0, TILE // GROUP)[None, :]
        weights = groups.to(tl.float32) * 0.0
        num_at = groups * 0
        for first in range(0, VOCAB, TILE):
            key = token_keys(base, words, first, top, temperature, VOCAB, TILE)
            is_kept, num_seen = keep_mask(key, limit, num_at_threshold, is_tied, num_seen)
            is_tile = tiles == first // TILE
            weight = tl.where(is_kept, tl.exp(-key.to(tl.float32, bitcast=True)), 0.0)
            sums = tl.sum(tl.reshape(weight, [TILE // GROUP, GROUP]), 1)
            weights = tl.where(is_tile, sums[None, :], weights)
            if is_tied:
                is_at = tl.reshape((key == limit).to(tl.int32), [TILE // GROUP, GROUP])
                num_at = tl.where(is_tile, tl.sum(is_at, 1)[None, :], num_at)
        score = tl.log(weights) + noise_of(seed, position, groups, 1)
        score = tl.where(weights > 0.0, score, float("-inf"))
        # Without a finite logit no token is kept, and the first token is chosen.
        group = first_of_best(score, groups)
        ids = group * GROUP + tl.arange(0, GROUP)
        key = token_keys(base, words, group * GROUP, top, temperature, VOCAB, GROUP)
        num_seen = tl.sum(tl.where(groups < group, num_at, 0))
        is_kept, num_seen = keep_mask(key, limit, num_at_threshold, is_tied, num_seen)
        score = noise_of(seed, position, ids, 0) - key.to(tl.float32, bitcast=True)
        score = tl.where(is_kept, score, float("-inf"))
        token = first_of_best(score, ids)
        store_token(token, place, sampled, results, result_row, results_stride)


def sample_truncated(
    logits: Tensor,
    fields: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sampled: Tensor,
    results: Results | None = None,
    rows: Rows | None = None,
    *,
    tile: int = _TILE,
    num_warps: int = _NUM_WARPS,
) -> None:
    """Write one token for each of some rows into ``sampled``; can be captured.

    Args:
        logits: ``[N, V]``, any float dtype, rows contiguous, V at most 1023 tiles.
        fields: int32, in the order of :data:`TRUNCATED_FIELDS`, of S rows. A place is a row of
            ``logits``; a place below 0 is skipped.
        temperatures: float32 ``[>= N]``, 0 for greedy. seeds, positions: int64 ``[>= N]``.
        sampled: int64 ``[>= N]``, written at these places. results: also written there.
        rows: the same rows, if they have sources or masks. Its places equal those of the fields.
        tile: number of tokens read at once, a power of two and at least a group.
    """
    num_rows = len(fields) // TRUNCATED_FIELDS
    tokens, result_row, results_stride = places_of(results)
    vocab_size = logits.shape[1]
    _, sources, numbers, masks, masks_stride = arguments_of(rows)
    _truncated_kernel[(num_rows,)](
        logits, fields, sources, numbers, masks, temperatures, seeds, positions, sampled, tokens,
        result_row, logits.stride(0), masks_stride, results_stride, num_rows,
        VOCAB=vocab_size,
        TILE=tile,
        NUM_TILES=triton.next_power_of_2(triton.cdiv(vocab_size, tile)),
        GROUP=GROUP,
        num_warps=num_warps,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_truncated"],
    do_not_specialize_on_alignment=["places", "truncated", "sources"],
)
def _processed_kernel(  # type: ignore[no-untyped-def]
    logits, places, sources, truncated, temperatures, scores, logits_stride, num_truncated,
    VOCAB: tl.constexpr, TILE: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """Scores ``[n, VOCAB]`` of some rows of logits: (logit - largest) / temperature, -inf where
    top_k, top_p or min_p drops the token. A greedy row has temperature 1 and keeps all. Grid:
    ``(n,)``."""
    row = tl.program_id(0)
    place = tl.load(places + row)
    own = place * 0 - 1  # for a row that is not truncated
    for first in range(0, num_truncated, LOOKUP):
        at = first + tl.arange(0, LOOKUP)
        is_own = tl.load(truncated + at, mask=at < num_truncated, other=-1) == place
        own += tl.sum(tl.where(is_own, at + 1, 0), 0)
    temperature = tl.load(temperatures + place)
    temperature = tl.where(temperature > 0.0, temperature, 1.0)
    base = logits + source_of(sources, row, place) * logits_stride
    top = largest_logit(base, None, VOCAB, TILE)
    cuts = truncated + num_truncated
    limit, num_at_threshold, is_tied = find_threshold(
        base, None, top, temperature, cuts, own, num_truncated, VOCAB, VOCAB, TILE
    )
    num_seen = limit * 0
    for first in range(0, VOCAB, TILE):
        ids = first + tl.arange(0, TILE)
        key = token_keys(base, None, first, top, temperature, VOCAB, TILE)
        is_kept, num_seen = keep_mask(key, limit, num_at_threshold, is_tied, num_seen)
        score = tl.where(is_kept, -key.to(tl.float32, bitcast=True), float("-inf"))
        tl.store(scores + row.to(tl.int64) * VOCAB + ids, score, mask=ids < VOCAB)


def processed_scores(
    logits: Tensor,
    places: Tensor,
    truncated: Tensor,
    temperatures: Tensor,
    sources: Tensor | None = None,
) -> Tensor:
    """float32 ``[n, V]`` for the rows of a step at ``places [n]``, int32.

    Args:
        logits: ``[N, V]``. sources: int32 ``[n]``, their rows of the logits; None: the places.
        truncated: int32, in the order of ``TRUNCATED_FIELDS``, of the m rows that use top_k, top_p
            or min_p. temperatures: float32 ``[>= N]``, 0 for greedy.
    """
    num_rows, vocab_size = len(places), logits.shape[1]
    scores = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    _processed_kernel[(num_rows,)](
        logits, places, sources, truncated, temperatures, scores, logits.stride(0),
        len(truncated) // TRUNCATED_FIELDS,
        VOCAB=vocab_size,
        TILE=_TILE,
        LOOKUP=_LOOKUP,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return scores
