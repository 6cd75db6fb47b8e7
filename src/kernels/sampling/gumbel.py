"""Greedy and temperature sampling by the Gumbel-max trick, as two kernels inside a CUDA graph.

:mod:`.sampler` says how a token is chosen: first its group, then the token in the
group. One kernel reads the logits and weighs every group, with one exponential a token and no
random numbers, so that it waits for memory alone. The other, one program a row, draws a group, and
a token of that group. A group is weighed in one fixed order whatever the batch; greedy rows take
the same way without noise. Of equal scores the lowest id wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampler import GROUP

_STRETCH = 4096
"""Tokens a program weighs."""


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


@triton.jit
def store_token(token, row, sampled, results, result_row, results_stride):  # type: ignore[no-untyped-def]
    """Store a row's token for the next step, and for the host if there are ``results``."""
    tl.store(sampled + row, token.to(tl.int64))
    if results is not None:
        tl.store(results + tl.load(result_row) * results_stride + row, token.to(tl.int64))


@triton.jit
def _load(base, ids, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits as float32; -inf for NaN, which can be no maximum, and beyond the vocabulary."""
    logit = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.maximum(logit, float("-inf"))


@triton.jit(do_not_specialize=["num_groups"])
def _weigh_kernel(  # type: ignore[no-untyped-def]
    logits, temperatures, largest, sums, logits_stride, num_groups,
    VOCAB: tl.constexpr,
    STRETCH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The largest logit of each group, and the sum of exp((logit - largest) / temperature)."""
    stretch = tl.program_id(0)
    row = tl.program_id(1)
    group = stretch * (STRETCH // GROUP) + tl.arange(0, STRETCH // GROUP)
    base = logits + row.to(tl.int64) * logits_stride
    logit = _load(base, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], VOCAB)
    top = tl.max(logit, 1)
    # log2(e) / temperature; never 0, which -inf must not meet.
    scale = tl.maximum(1.4426950408889634 / tl.load(temperatures + row), 1e-30)
    # The minimum makes 0 of what has no value: infinity less infinity, and 0 of an infinite scale.
    exponent = tl.minimum((logit - top[:, None]) * scale, 0.0)
    place = row * num_groups + group
    tl.store(largest + place, top, mask=group < num_groups)
    tl.store(sums + place, tl.sum(tl.exp2(exponent), 1), mask=group < num_groups)


@triton.jit(do_not_specialize=["num_groups"])
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits, temperatures, seeds, positions, largest, sums, sampled, results, result_row,
    logits_stride, results_stride, num_groups,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """A token per row: the argmax of ``log p + Gumbel noise`` over groups, then within the group;
    greedy rows without noise. Grid: ``(rows,)``. Shapes: logits ``[rows, VOCAB]``, largest and sums
    ``[rows, num_groups]``.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)

    groups = tl.arange(0, PADDED)
    tops = tl.load(
        largest + row * num_groups + groups, mask=groups < num_groups, other=float("-inf")
    )
    total = tl.load(sums + row * num_groups + groups, mask=groups < num_groups, other=1.0)
    top = tl.max(tops, 0)
    distance = tl.where(tops == top, 0.0, (top - tops) / temperature)
    score = tl.log(total) - distance + noise_of(seed, position, groups, 1)
    score = tl.where(tops > float("-inf"), score, float("-inf"))
    score = tl.where(temperature > 0.0, score, tops)
    group = first_of_best(score, groups)

    ids = group * GROUP + tl.arange(0, GROUP)
    logit = _load(logits + row.to(tl.int64) * logits_stride, ids, VOCAB)
    top = tl.max(logit, 0)
    distance = tl.where(logit == top, 0.0, (top - logit) / temperature)
    score = noise_of(seed, position, ids, 0) - distance
    score = tl.where(logit > float("-inf"), score, float("-inf"))
    score = tl.where(temperature > 0.0, score, logit)
    store_token(first_of_best(score, ids), row, sampled, results, result_row, results_stride)


@dataclass(frozen=True, slots=True)
class Results:
    """Where the host reads tokens. A kernel stores them there itself: a copy behind it would stand
    between it and the next step.

    Attributes:
        tokens: int64 ``[steps, >= S]``, in memory of the host that the device writes to (pinned).
        row: int32 ``[1]``, on the device: which of them this step's are.
    """

    tokens: Tensor
    row: Tensor


def places_of(results: Results | None) -> tuple[Tensor | None, Tensor | None, int]:
    """What :func:`store_token` takes of them: tokens, row, and elements from step to step."""
    if results is None:
        return None, None, 0
    return results.tokens, results.row, results.tokens.stride(0)


def sample_simple(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sampled: Tensor,
    results: Results | None = None,
) -> None:
    """Write one token a row into ``sampled``; for rows without top_k, top_p and min_p.

    Args:
        logits: ``[S, V]``, any float dtype, rows contiguous, S at most 65,535.
        temperatures: float32 ``[>= S]``, 0 for greedy. seeds, positions: int64 ``[>= S]``.
        sampled: int64 ``[>= S]``, written. results: written, too.
    """
    num_rows, vocab_size = logits.shape
    tokens, result_row, results_stride = places_of(results)
    num_groups = triton.cdiv(vocab_size, GROUP)
    largest = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(largest)
    _weigh_kernel[(triton.cdiv(vocab_size, _STRETCH), num_rows)](
        logits, temperatures, largest, sums, logits.stride(0), num_groups,
        VOCAB=vocab_size,
        STRETCH=_STRETCH,
        GROUP=GROUP,
        num_warps=4,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        logits, temperatures, seeds, positions, largest, sums, sampled, tokens, result_row,
        logits.stride(0), results_stride, num_groups,
        VOCAB=vocab_size,
        GROUP=GROUP,
        PADDED=triton.next_power_of_2(num_groups),
        num_warps=8,
    )  # fmt: skip
