"""The weighted sum over a token's experts, the addition of a shared expert and of the residual, and
the norm of the next layer: for few tokens in one launch.

Bits are those of :mod:`.expert_rows` and :mod:`..fused.rms_norm` one after the other: all is
rounded where they round, and a row is spread over as many warps as there, 16 bytes per thread at
once, which gives the mean the same order of additions. Hence the bounds (:func:`_has_one_launch`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import has_dependent_launch, triggers_dependents_late
from ..fused import dispatch as fused
from ..fused.rms_norm import mean_square, num_warps
from ..fused.rounding import rounded, scaled
from .expert_rows import TRITON_DTYPES, combine_experts, gate_column, with_shared

MAX_FEW_TOKENS = 64
"""Tokens up to which there is one launch."""


@triton.jit(
    do_not_specialize=["gate_stride"],
    do_not_specialize_on_alignment=["weights", "inverse", "gate"],
)
def _combine_norm_kernel(  # type: ignore[no-untyped-def]
    rows, weights, inverse, shared, gate, residual, norm_weight, out, hidden, gate_stride, eps,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
    FORM: tl.constexpr, LATE_TRIGGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``_combine_kernel`` of :mod:`.expert_rows`, then ``_norm_kernel`` of :mod:`.rms_norm`.
    Grid: ``(tokens,)``."""
    if PDL:
        if not LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < H
    # All places are asked for before the first is waited for, then the rows (:mod:`.expert_rows`).
    places = ()
    factors = ()
    for j in tl.static_range(K):
        places += (tl.load(inverse + token * K + j),)  # type: ignore[assignment]
        factors += (tl.load(weights + token * K + j),)  # type: ignore[assignment]
    before = tl.load(residual + token * H + i, mask=mask, other=0.0)
    scale = tl.load(norm_weight + i, mask=mask, other=0.0)
    if HAS_SHARED:
        added = tl.load(shared + token * H + i, mask=mask, other=0.0)
        logit = tl.load(gate + token * gate_stride) if HAS_GATE else 0.0
    tl.debug_barrier()
    parts = ()
    for j in tl.static_range(K):
        parts += (tl.load(rows + places[j] * H + i, mask=mask, other=0.0),)  # type: ignore[assignment]
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        total += rounded(parts[j].to(tl.float32) * factors[j].to(tl.float32), PRODUCT)
    h = rounded(rounded(total, PRODUCT), DTYPE)
    if HAS_SHARED:
        h = with_shared(h, added, logit, HAS_GATE, DTYPE)
    h = rounded(h + before.to(tl.float32), DTYPE)
    tl.store(hidden + token * H + i, h.to(DTYPE), mask=mask)
    y = scaled(h * tl.rsqrt(mean_square(h, H) + eps), scale.to(tl.float32), FORM, DTYPE)
    tl.store(out + token * H + i, y.to(DTYPE), mask=mask)


def combine_add_rms_norm(
    rows: Tensor,
    weights: Tensor,
    inverse: Tensor,
    top_k: int,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    form: fused.NormForm,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of h, h) with h = ``residual + combine_experts(...)``.

    Args:
        rows, weights, inverse, top_k, shared, gate: as of :func:`.expert_rows.combine_experts`.
        residual: ``[..., H]`` of T rows, whose dtype the sum over the experts is rounded to.
        norm_weight, eps, form: as of :func:`.dispatch.add_rms_norm`.

    Returns:
        Both of the shape and dtype of ``residual``.
    """
    hidden_size = residual.shape[-1]
    num_tokens = len(inverse) // top_k
    loaded = (rows, residual, norm_weight, *(() if shared is None else (shared,)))
    if not (0 < num_tokens <= MAX_FEW_TOKENS and _has_one_launch(loaded)):
        combined = combine_experts(rows, weights, inverse, top_k, residual.dtype, shared, gate)
        return fused.add_rms_norm(combined.view(residual.shape), residual, norm_weight, eps, form)
    weights = weights.contiguous()
    out, hidden = torch.empty_like(residual), torch.empty_like(residual)
    logits, gate_stride = gate_column(gate, rows)
    block = triton.next_power_of_2(hidden_size)
    pdl = has_dependent_launch(rows.device)
    _combine_norm_kernel[(num_tokens,)](
        rows, weights, inverse, rows if shared is None else shared, logits, residual, norm_weight,
        out, hidden, gate_stride, eps,
        H=hidden_size,
        K=top_k,
        BLOCK=block,
        PRODUCT=TRITON_DTYPES[torch.promote_types(rows.dtype, weights.dtype)],
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        FORM=form,
        LATE_TRIGGER=triggers_dependents_late(num_tokens),
        PDL=pdl,
        num_warps=num_warps(block),
        enable_fp_fusion=False,  # all is rounded before it is added
        launch_pdl=pdl,
    )  # fmt: skip
    return out, hidden


def _has_one_launch(loaded: Sequence[Tensor]) -> bool:
    """Whether all rows are loaded as the norm alone loads them: contiguous, of one dtype, whole
    units."""
    return all(
        x.dtype == loaded[0].dtype
        and x.shape[-1] % 16 == 0
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        for x in loaded
    )
