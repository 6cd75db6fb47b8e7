"""Greedy and plain random sampling as two small kernels, for use inside a CUDA graph.

Scores are logit / temperature + Gumbel noise, the noise of a token from Philox keyed by the
request's seed with position and token id as counter (:mod:`pagespec.kernels.sampling` says why);
at temperature 0, the logit alone. Each program takes a fixed stretch of the vocabulary, a second
kernel the best of the stretches; of equal scores the lowest token id wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STRETCH = 4096
_TILE = 1024


@triton.jit
def _gumbel(word):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise of uint32 words: -log(-log(u)), u = (word + 0.5) / 2^32.

    The winners have u close to 1, where float32 has no digits left; 1 - u has them all.
    """
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = tl.minimum(rest, 0.99999994)
    # log1p(-rest): the series where rest is small, else the logarithm of 1 - rest.
    series = -rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * 0.25)))
    log_u = tl.where(rest < 0.01, series, tl.log(1.0 - rest))
    return -tl.log(-log_u)


@triton.jit(do_not_specialize=["num_stretches"])
def _stretch_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    seeds,
    positions,
    best_scores,
    best_ids,
    logits_stride,
    num_stretches,
    VOCAB: tl.constexpr,
    STRETCH: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    stretch = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    base = logits + row.to(tl.int64) * logits_stride
    # One contest a lane, and one among the lanes at the end.
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = stretch * STRETCH + tl.arange(0, TILE)
    end = tl.minimum((stretch + 1) * STRETCH, VOCAB)
    if temperature > 0.0:
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        low = (position & 0xFFFFFFFF).to(tl.uint32)
        high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        for first in range(stretch * STRETCH, end, TILE):
            quads = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
            zero = quads * 0
            w0, w1, w2, w3 = tl.philox(seed, quads, zero + low, zero + high, zero)
            words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
            ids = first + tl.arange(0, TILE)
            logit = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
            score = logit / temperature + _gumbel(words)
            best_id = tl.where(score > best, ids, best_id)
            best = tl.maximum(best, score)
    else:
        for first in range(stretch * STRETCH, end, TILE):
            ids = first + tl.arange(0, TILE)
            logit = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
            best_id = tl.where(logit > best, ids, best_id)
            best = tl.maximum(best, logit)
    top = tl.max(best, 0)
    top_id = tl.min(tl.where(best == top, best_id, VOCAB), 0)
    tl.store(best_scores + row * num_stretches + stretch, top)
    tl.store(best_ids + row * num_stretches + stretch, tl.minimum(top_id, VOCAB - 1))


@triton.jit(do_not_specialize=["num_stretches"])
def _best_kernel(best_scores, best_ids, sampled, num_stretches, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    i = tl.arange(0, PADDED)
    mask = i < num_stretches
    scores = tl.load(best_scores + row * num_stretches + i, mask=mask, other=float("-inf"))
    _, at = tl.max(scores, 0, return_indices=True)
    tl.store(sampled + row, tl.load(best_ids + row * num_stretches + at).to(tl.int64))


def sample_simple(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, sampled: Tensor
) -> None:
    """Write one token a row into ``sampled``; for rows without top_k, top_p and min_p.

    Args:
        logits: ``[S, V]``, any float dtype, rows contiguous.
        temperatures: float32 ``[>= S]``, 0 for greedy. seeds, positions: int64 ``[>= S]``.
        sampled: int64 ``[>= S]``, written.
    """
    num_rows, vocab_size = logits.shape
    num_stretches = triton.cdiv(vocab_size, _STRETCH)
    best_scores = torch.empty(num_rows, num_stretches, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=logits.device)
    _stretch_kernel[(num_rows, num_stretches)](
        logits,
        temperatures,
        seeds,
        positions,
        best_scores,
        best_ids,
        logits.stride(0),
        num_stretches,
        VOCAB=vocab_size,
        STRETCH=_STRETCH,
        TILE=_TILE,
        num_warps=4,
    )
    _best_kernel[(num_rows,)](
        best_scores,
        best_ids,
        sampled,
        num_stretches,
        PADDED=triton.next_power_of_2(num_stretches),
        num_warps=1,
    )
