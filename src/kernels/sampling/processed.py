"""The distribution that a row is sampled from, as float32 scores: "processed" log-probabilities.

A score is (logit - largest) / temperature, -inf where top_k, top_p or min_p drop the token; of a
greedy row the temperature is 1, and all is kept. One program per row, fixed tiles in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_functions import source_of
from .top_k_top_p import TRUNCATED_FIELDS
from .top_k_top_p_threshold import find_threshold, keep_mask, largest_logit, token_keys

_TILE = 4096
_LOOKUP = 1024


@triton.jit(
    do_not_specialize=["num_truncated"],
    do_not_specialize_on_alignment=["places", "truncated", "sources"],
)
def _processed_kernel(  # type: ignore[no-untyped-def]
    logits, places, sources, truncated, temperatures, scores, logits_stride, num_truncated,
    VOCAB: tl.constexpr, TILE: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """Scores ``[n, VOCAB]`` of some rows of logits. Grid: ``(n,)``."""
    row = tl.program_id(0)
    place = tl.load(places + row)
    own = place * 0 - 1  # of a row that is not among the truncated ones
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
    """float32 ``[n, V]``, of the rows of a step at ``places [n]``, int32.

    Args:
        logits: ``[N, V]``. sources: int32 ``[n]``, their rows of the logits; None: the places.
        truncated: int32, what ``TRUNCATED_FIELDS`` lists of the m rows that use top_k, top_p or
            min_p. temperatures: float32 ``[>= N]``, 0 for greedy.
    """
    num_rows, vocab_size = len(places), logits.shape[1]
    scores = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    _processed_kernel[(num_rows,)](
        logits, places, sources, truncated, temperatures, scores, logits.stride(0),
        len(truncated) // TRUNCATED_FIELDS,
        VOCAB=vocab_size,
        TILE=_TILE,
        LOOKUP=_LOOKUP,
        num_warps=32,
    )  # fmt: skip
    return scores
