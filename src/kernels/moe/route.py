"""The router of a mixture of experts in one launch: softmax over the experts, top-k and division;
or top-k of the logits and softmax over the selected experts.

A program is one warp per token. It holds the probabilities or logits of all experts in registers
and finds the selected ones in as many rounds of a maximum. In torch this takes a conversion, a
softmax, a selection, a sort, a sum, a division and a conversion back, each as a separate launch.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import as_rows, overlap_options
from ..fused.rounding import exp, rounded
from ..jit.parallel_build import may_skip_launches
from ..overlap import overlap

MAX_EXPERTS = 1024
"""Most experts: a warp holds their probabilities in registers, 32 per thread."""
MAX_TOP_K = 16
"""Most experts per token; the rounds that find them are unrolled."""

Normalisation = Literal["all", "renormalised", "chosen"]
"""Definition of the weights: the softmax over all experts (Qwen2-MoE, OLMoE); that softmax divided
by its sum over the selected experts (Qwen3-MoE, Mixtral); or the softmax over the logits of the
selected experts (Granite, GPT-OSS). The last two are mathematically equal, but not as floats:
probabilities of unequal logits may be equal, or zero."""


@triton.jit
def exact_sum(x):  # type: ignore[no-untyped-def]
    """The sum of each row ``[T, E]`` of float32 from 0 to 1, at most :data:`MAX_EXPERTS` elements:
    truncated after 40 binary places and added as integers. So there is no order of additions that a
    layout could change, and a warp adds in one instruction. NaN if a row contains one."""
    SCALE: tl.constexpr = 1048576.0
    is_nan = tl.max((x != x).to(tl.int32), 1) > 0
    x = tl.where(x == x, x, 0.0) * SCALE
    high = x.to(tl.int32)
    low = ((x - high.to(tl.float32)) * SCALE).to(tl.int32)
    total = tl.sum(low, 1).to(tl.float32) * (1.0 / SCALE) + tl.sum(high, 1).to(tl.float32)
    return tl.where(is_nan, float("nan"), total * (1.0 / SCALE))


@triton.jit
def softmax(x):  # type: ignore[no-untyped-def]
    """Softmax of each row ``[T, E]`` of float32, whose sum has no order (:func:`exact_sum`)."""
    x = exp(x - tl.max(x, 1)[:, None])
    return tl.div_rn(x, exact_sum(x)[:, None] + tl.zeros_like(x))


@triton.jit
def _flip_negative(bits):  # type: ignore[no-untyped-def]
    """Convert bits of floats to integers in the same order, and back: for negative floats, whose
    magnitude grows with their bits, all bits but the sign are inverted."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def top_experts(  # type: ignore[no-untyped-def]
    x, i, j, E: tl.constexpr, K: tl.constexpr, NORMALISATION: tl.constexpr
):
    """Weights and ids of the K experts that each token's router selects, float32 and int32 ``[T,
    K_BLOCK]``, from float32 logits ``x [T, E_BLOCK]``, -inf beyond E. Largest first; of equal
    probabilities (or logits, if those are compared) the lowest id comes first. i: 0, 1, ... ``[1,
    E_BLOCK]``. j: ``[1, K_BLOCK]``. NORMALISATION: :data:`Normalisation`."""
    # A warp finds the largest integer in one instruction. NaN is the largest, as in torch, and
    # every id is that of an expert.
    if NORMALISATION == "chosen":
        # Zeros are equal, whatever their sign.
        left = _flip_negative(tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True))
        left = tl.where(x == x, left, 0x7FFFFFFF)
    else:
        # The bits of non-negative floats already have their order.
        left = softmax(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    NONE: tl.constexpr = -0x80000000
    left = tl.where(i < E, left, NONE)
    chosen = tl.zeros((x.shape[0], j.shape[1]), tl.int32)
    found = tl.zeros((x.shape[0], j.shape[1]), tl.int32)
    total = tl.zeros((x.shape[0],), tl.float32)
    for rank in tl.static_range(K):
        largest = tl.max(left, 1)
        expert = tl.min(tl.where(left == largest[:, None], i, E), 1)
        left = tl.where(i == expert[:, None], NONE, left)
        if NORMALISATION == "renormalised":
            total += largest.to(tl.float32, bitcast=True)
        chosen = tl.where(j == rank, largest[:, None], chosen)
        found = tl.where(j == rank, expert[:, None], found)
    if NORMALISATION == "chosen":
        logits = _flip_negative(chosen).to(tl.float32, bitcast=True)
        weight = softmax(tl.where(j < K, logits, float("-inf")))
    else:
        weight = chosen.to(tl.float32, bitcast=True)
        if NORMALISATION == "renormalised":
            weight = tl.div_rn(weight, total[:, None] + tl.zeros_like(weight))
    return weight, found


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, weights, ids, token_stride,
    E: tl.constexpr, E_BLOCK: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr,
    NORMALISATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """:func:`top_experts` for one token. Grid: ``(tokens,)``."""
    overlap(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, E_BLOCK)[None, :]
    j = tl.arange(0, K_BLOCK)[None, :]
    x = tl.load(logits + token * token_stride + i, mask=i < E, other=float("-inf")).to(tl.float32)
    weight, found = top_experts(x, i, j, E, K, NORMALISATION)
    DTYPE: tl.constexpr = weights.dtype.element_ty
    tl.store(weights + token * K + j, rounded(weight, DTYPE).to(DTYPE), mask=j < K)
    tl.store(ids + token * K + j, found.to(tl.int64), mask=j < K)


def route(
    logits: Tensor, top_k: int, normalisation: Normalisation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weights of each row's ``top_k`` largest experts, and their ids.

    All values are float32 up to the one rounding of the weights, except the sum of the softmax
    (:func:`exact_sum`). A row's results depend only on its logits.

    Args:
        logits: ``[..., E]``, of up to :data:`MAX_EXPERTS` experts.
        top_k: up to :data:`MAX_TOP_K` and E.
        normalisation: definition of the weights. The largest are those of the softmax over all
            experts, or of the logits for "chosen".
        dtype: of the weights.

    Returns:
        weights of ``dtype`` and ids int64, both ``[..., top_k]``, in descending order of the
        compared values, then ascending order of ids.
    """
    rows = as_rows(logits)
    num_tokens, num_experts = rows.shape
    weights = torch.empty(num_tokens, top_k, dtype=dtype, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    shape = (*logits.shape[:-1], top_k)
    if may_skip_launches():  # other kernels read data that this kernel has not written
        ids.zero_()
    if num_tokens:
        _route_kernel[(num_tokens,)](
            rows, weights, ids, rows.stride(0),
            E=num_experts,
            E_BLOCK=triton.next_power_of_2(num_experts),
            K=top_k,
            K_BLOCK=triton.next_power_of_2(top_k),
            NORMALISATION=normalisation,
            num_warps=1,
            enable_fp_fusion=False,
            **overlap_options(logits.device),
        )  # fmt: skip
    return weights.view(shape), ids.view(shape)
