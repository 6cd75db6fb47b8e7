"""The router of a mixture of experts: softmax over the experts, top-k and division, in one launch.

One warp per token, which holds all of its experts' probabilities in registers and finds the chosen
ones by as many rounds of a maximum. In torch this is a conversion, a softmax, a selection, a sort,
a sum, a division and a conversion back, each a launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..device import as_rows, has_dependent_launch
from ..fused.rounding import EMULATE, rounded
from ..jit.parallel_build import may_skip_launches

MAX_EXPERTS = 1024
"""Experts whose probabilities a warp holds in registers, 32 per thread."""
MAX_TOP_K = 16
"""Experts per token; the rounds that find them are unrolled."""


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, weights, ids, token_stride,
    E: tl.constexpr, E_BLOCK: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr,
    IS_NORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The K largest of a token's E probabilities, largest first, and whose they are; of equal ones
    the lowest id comes first. Grid: ``(tokens,)``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, E_BLOCK)
    j = tl.arange(0, K_BLOCK)
    x = tl.load(logits + token * token_stride + i, mask=i < E, other=float("-inf")).to(tl.float32)
    x = x - tl.max(x, 0)
    # tl.exp is the fast one of the hardware; torch calls the library's. The interpreter has none.
    if EMULATE:
        x = tl.exp(x)
    else:
        x = libdevice.exp(x)
    probabilities = tl.div_rn(x, tl.sum(x, 0))
    # Bits of numbers that are not negative are ordered as they are, and a warp finds the largest
    # integer in one instruction. NaN is the largest, as in torch: every id is one of an expert.
    left = probabilities.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    left = tl.where(i < E, left, -1)
    chosen = tl.zeros((K_BLOCK,), tl.int32)
    found = tl.zeros((K_BLOCK,), tl.int32)
    total = 0.0
    for rank in tl.static_range(K):
        largest = tl.max(left, 0)
        expert = tl.min(tl.where(left == largest, i, E), 0)
        left = tl.where(i == expert, -1, left)
        total += largest.to(tl.float32, bitcast=True)
        chosen = tl.where(j == rank, largest, chosen)
        found = tl.where(j == rank, expert, found)
    weight = chosen.to(tl.float32, bitcast=True)
    if IS_NORMALISED:
        weight = tl.div_rn(weight, total)
    weight = rounded(weight, weights.dtype.element_ty).to(weights.dtype.element_ty)
    tl.store(weights + token * K + j, weight, mask=j < K)
    tl.store(ids + token * K + j, found.to(tl.int64), mask=j < K)


def route(
    logits: Tensor, top_k: int, is_normalised: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest of each row's softmax, and which experts they are.

    All is float32 up to the weights' one rounding; sums have an order of their own, which no other
    row changes.

    Args:
        logits: ``[..., E]``, of up to :data:`MAX_EXPERTS` experts.
        top_k: up to :data:`MAX_TOP_K` and E.
        is_normalised: whether weights are divided by their sum.
        dtype: of the weights.

    Returns:
        weights of ``dtype`` and ids int64, both ``[..., top_k]``, in descending order of the
        weights, equal ones in ascending order of the ids.
    """
    rows = as_rows(logits)
    num_tokens, num_experts = rows.shape
    weights = torch.empty(num_tokens, top_k, dtype=dtype, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    shape = (*logits.shape[:-1], top_k)
    if may_skip_launches():  # other kernels read at what this one has not written
        ids.zero_()
    if num_tokens:
        pdl = has_dependent_launch(logits.device)
        _route_kernel[(num_tokens,)](
            rows, weights, ids, rows.stride(0),
            E=num_experts,
            E_BLOCK=triton.next_power_of_2(num_experts),
            K=top_k,
            K_BLOCK=triton.next_power_of_2(top_k),
            IS_NORMALISED=is_normalised,
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )  # fmt: skip
    return weights.view(shape), ids.view(shape)
