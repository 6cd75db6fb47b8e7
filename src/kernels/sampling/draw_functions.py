"""Device functions of a Gumbel-max draw: logits masked by allowed tokens, noise, the maximum of
their sums, and the store of the token for the next step and for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_token(token, row, sampled, results, result_row, results_stride):  # type: ignore[no-untyped-def]
    """Store a row's token for the next step, and for the host if there are ``results``."""
    tl.store(sampled + row, token.to(tl.int64))
    if results is not None:
        tl.store(results + tl.load(result_row) * results_stride + row, token.to(tl.int64))


class Results(NamedTuple):
    """Where the host reads tokens. A kernel stores them there itself, because a copy after it would
    delay the next step.

    Attributes:
        tokens: int64 ``[steps, >= S]``, in pinned host memory that the device writes to.
        row: int32 ``[1]``, on the device: the index of this step's row of ``tokens``.
    """

    tokens: Tensor
    row: Tensor


def places_of(results: Results | None) -> tuple[Tensor | None, Tensor | None, int]:
    """The arguments of :func:`store_token`: tokens, row, and the stride between steps."""
    return (None, None, 0) if results is None else (*results, results.tokens.stride(0))


class Rows(NamedTuple):
    """Rows of a step to sample separately.

    Attributes:
        places: int32 ``[n]``, among the step's rows: the places of their parameters and tokens.
        sources: int32 ``[n]``, their rows of the logits; None: the places.
        numbers: int32 ``[n]``, indices of their masks; None: all ids are allowed.
        masks: int32 ``[.., >= ceil(V / 32)]``, rows contiguous: a bit for each id.
    """

    places: Tensor
    sources: Tensor | None = None
    numbers: Tensor | None = None
    masks: Tensor | None = None


def arguments_of(
    rows: Rows | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int]:
    """The arguments of kernels: places, sources, numbers, masks, and the stride between masks."""
    if rows is None:
        return None, None, None, None, 0
    return *rows, 0 if rows.masks is None else rows.masks.stride(0)


@triton.jit
def source_of(sources, row, place):  # type: ignore[no-untyped-def]
    """The row of the logits for a row to sample."""
    source = place
    if sources is not None:
        source = tl.load(sources + row)
    return source.to(tl.int64)


@triton.jit
def allowed(  # type: ignore[no-untyped-def]
    logit, words, first, VOCAB: tl.constexpr, SIZE: tl.constexpr
):
    """Logits ``[SIZE]`` of the ids from ``first`` on, a multiple of 32: -inf where the bit of the
    mask ``words`` is 0. Unchanged without a mask (None).

    A word is loaded once. The load of the logits determines how threads hold them.
    """
    if words is not None:
        at = first // 32 + tl.arange(0, SIZE // 32)
        word = tl.load(words + at, mask=at < (VOCAB + 31) // 32, other=0)
        bits = tl.reshape(word[:, None] >> tl.arange(0, 32)[None, :], [SIZE])
        logit = tl.where((bits & 1) != 0, logit, float("-inf"))
    return logit


@triton.jit
def load_logits(base, ids, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits as float32; -inf for NaN, which cannot be a maximum, and beyond the vocabulary."""
    logit = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.maximum(logit, float("-inf"))


@triton.jit
def _gumbel(word):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise of uint32 words: -log(-log(u)), u = (word + 0.5) / 2^32.

    Winners have u close to 1, where float32 has no precision left; 1 - u is exact.
    """
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = tl.minimum(rest, 0.99999994)
    # log1p(-rest): a series where rest is small, else the logarithm of 1 - rest.
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
    """The lowest of the ids with the largest score."""
    return tl.min(tl.where(score == tl.max(score), ids, 0x7FFFFFFF))
