"""Device functions of a draw by the Gumbel-max trick: logits, noise, and the best of their sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_logits(base, ids, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits as float32; -inf for NaN, which can be no maximum, and beyond the vocabulary."""
    logit = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.maximum(logit, float("-inf"))


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


@triton.jit
def noise_of(seed, position, index, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gumbel noise, float32, of tokens (KIND 0) or groups (KIND 1); ``index`` is a block of ids."""
    quad = (index // 4).to(tl.uint32)
    zero = quad * 0
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + low, zero + high, zero + KIND)
    even = tl.where(index % 4 == 0, w0, w2)
    odd = tl.where(index % 4 == 1, w1, w3)
    return _gumbel(tl.where(index % 2 == 0, even, odd))


@triton.jit
def first_of_best(score, ids):  # type: ignore[no-untyped-def]
    """The lowest of the ids whose score is the largest."""
    return tl.min(tl.where(score == tl.max(score), ids, 0x7FFFFFFF))
