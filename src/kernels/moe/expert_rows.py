"""Permute rows of tokens into the order of their experts, and sum over a token's experts, including
a shared one. For few tokens, one launch also adds the residual and computes the norm of the next
layer.

The kernels for many tokens have one program per token and part of its width. A program loops over
the token's experts. The inverse permutation of :func:`.sort_by_expert.sort_by_expert` gives the
place of each expert's row. So a token's hidden state is read once and its result is written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import as_rows, overlap_options, triggers_dependents_late
from ..fused import dispatch as fused
from ..fused.rms_norm import mean_square, num_warps
from ..fused.rounding import rounded, scaled, sigmoid
from ..overlap import overlap

MAX_TOP_K = 16
"""Most experts per token of these kernels, whose loops over them are unrolled."""

# Elements of a row per program and its warps, by the number of tokens: 16 bytes of bfloat16 per
# thread, and for few tokens enough programs for all multiprocessors.
_TILES = ((256, 1, 64), (1024, 4, 1 << 40))


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    tokens, inverse, out, token_stride,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[inverse[t * K + j]] = tokens[t]``. Grid: ``(tokens * ceil(H / BLOCK),)``."""
    overlap(PDL)
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    i = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(tokens + token * token_stride + i, mask=i < H)
    places = ()
    for j in tl.static_range(K):
        places += (tl.load(inverse + token * K + j),)  # type: ignore[assignment]
    for j in tl.static_range(K):
        tl.store(out + places[j] * H + i, x, mask=i < H)


@triton.jit
def _sum_of_experts(  # type: ignore[no-untyped-def]
    rows, weights, inverse, shared, gate, gate_stride, token, i, mask,
    H: tl.constexpr, K: tl.constexpr, PRODUCT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The sum over a token's experts, in their order, and a shared one, as float32. Weighted rows
    are rounded to ``PRODUCT``, the sum to ``DTYPE``. The same for few tokens and many."""
    places = ()
    factors = ()
    for j in tl.static_range(K):
        places += (tl.load(inverse + token * K + j),)  # type: ignore[assignment]
        factors += (tl.load(weights + token * K + j),)  # type: ignore[assignment]
    if shared is not None:
        added = tl.load(shared + token * H + i, mask=mask, other=0.0)
        if gate is not None:
            logit = tl.load(gate + token * gate_stride)
    # All places are loaded before any load is waited for, then the rows. Without the barrier, ptxas
    # would save registers and wait for each place in turn; it does not move loads after a barrier.
    tl.debug_barrier()
    parts = ()
    for j in tl.static_range(K):
        parts += (tl.load(rows + places[j] * H + i, mask=mask, other=0.0),)  # type: ignore[assignment]
    total = tl.zeros(i.shape, tl.float32)
    for j in tl.static_range(K):
        total += rounded(parts[j].to(tl.float32) * factors[j].to(tl.float32), PRODUCT)
    total = rounded(rounded(total, PRODUCT), DTYPE)
    if shared is not None:
        added = added.to(tl.float32)
        if gate is not None:
            added = rounded(rounded(sigmoid(logit.to(tl.float32)), DTYPE) * added, DTYPE)
        total = rounded(total + added, DTYPE)
    return total


@triton.jit(do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=["weights", "gate"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    rows, weights, inverse, shared, gate, out, gate_stride,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of rows[inverse[t * K + j]] * weights[t * K + j]``, plus
    ``sigmoid(gate[t]) * shared[t]`` if there is a shared expert; each summand is rounded to
    ``PRODUCT``. Grid: ``(tokens * ceil(H / BLOCK),)``."""
    overlap(PDL)
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    i = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = out.dtype.element_ty
    total = _sum_of_experts(
        rows, weights, inverse, shared, gate, gate_stride, token, i, i < H, H, K, PRODUCT, DTYPE
    )
    tl.store(out + token * H + i, total.to(DTYPE), mask=i < H)


def spread_rows(tokens: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Each token's row once per expert, in the order of the experts.

    Args:
        tokens: ``[T, H]``.
        inverse: int64 ``[T * top_k]``, a permutation: element ``t * top_k + j`` is the destination
            of the row of token t and its j-th expert.

    Returns:
        ``[T * top_k, H]``, equal to ``tokens[order // top_k]``, where ``inverse`` is the inverse of
        ``order``.
    """
    tokens = as_rows(tokens)
    hidden_size = tokens.shape[1]
    out = tokens.new_empty(len(inverse), hidden_size)
    num_tokens = len(inverse) // top_k
    if not num_tokens:
        return out
    block, num_warps = _tile(num_tokens)
    _spread_kernel[(num_tokens * triton.cdiv(hidden_size, block),)](
        tokens, inverse, out, tokens.stride(0),
        H=hidden_size,
        K=top_k,
        BLOCK=block,
        num_warps=num_warps,
        **overlap_options(tokens.device),
    )  # fmt: skip
    return out


def combine_experts(
    rows: Tensor,
    weights: Tensor,
    inverse: Tensor,
    top_k: int,
    dtype: torch.dtype,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """The weighted sum over each token's experts, plus a shared expert's result if there is one.

    Roundings are those of the torch operations: weighted rows are rounded to the dtype of ``rows *
    weights``, and their float32 sum once to the same dtype. The sum, the gate, its multiplication
    and the addition of the shared expert are then rounded to ``dtype``. The sum has the order of j,
    so a token's bits do not depend on other tokens.

    Args:
        rows: ``[T * top_k, H]``, in the order of the experts.
        weights: ``[T * top_k]``, in the order of the tokens.
        inverse: int64 ``[T * top_k]``, see :func:`spread_rows`.
        shared: ``[..., H]`` of T rows and of ``dtype``: the result of a shared expert.
        gate: ``[..., 1]`` of T rows and of ``dtype``: logits whose sigmoids multiply ``shared``.

    Returns:
        ``[T, H]`` of ``dtype``.
    """
    rows, weights = rows.contiguous(), weights.contiguous()
    hidden_size = rows.shape[1]
    num_tokens = len(inverse) // top_k
    out = torch.empty(num_tokens, hidden_size, dtype=dtype, device=rows.device)
    if not num_tokens:
        return out
    block, num_warps = _tile(num_tokens)
    shared = None if shared is None else shared.contiguous()
    logits, gate_stride = _gate_column(gate)
    _combine_kernel[(num_tokens * triton.cdiv(hidden_size, block),)](
        rows, weights, inverse, shared, logits, out, gate_stride,
        H=hidden_size,
        K=top_k,
        BLOCK=block,
        PRODUCT=_product_dtype(rows, weights),
        num_warps=num_warps,
        enable_fp_fusion=False,  # a summand is rounded before it is added
        **overlap_options(rows.device),
    )  # fmt: skip
    return out


def _gate_column(gate: Tensor | None) -> tuple[Tensor | None, int]:
    """The logits of a gate in the form that a kernel takes, and the stride between two tokens: they
    may be a column of a merged matmul's result."""
    column = None if gate is None else gate.reshape(-1)
    return column, 0 if column is None else column.stride(0)


def _product_dtype(rows: Tensor, weights: Tensor) -> tl.dtype:
    """The dtype of ``rows * weights``."""
    found: tl.dtype = getattr(tl, str(torch.promote_types(rows.dtype, weights.dtype))[6:])
    return found


def _tile(num_tokens: int) -> tuple[int, int]:
    """(elements of a row per program, warps)."""
    return next(tile[:2] for tile in _TILES if num_tokens <= tile[2])


MAX_FEW_TOKENS = 64
"""Most tokens for which there is one launch."""


@triton.jit(
    do_not_specialize=["gate_stride"],
    do_not_specialize_on_alignment=["weights", "inverse", "gate"],
)
def _combine_norm_kernel(  # type: ignore[no-untyped-def]
    rows, weights, inverse, shared, gate, residual, norm_weight, out, hidden, gate_stride, eps,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
    FORM: tl.constexpr, LATE_TRIGGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``_combine_kernel`` followed by ``_norm_kernel`` of :mod:`..fused.rms_norm`, with the bits of
    both. All values are rounded where these kernels round. A row has the same number of warps and
    16 bytes per thread at once, which gives the mean the same order of additions.
    :func:`_has_one_launch` checks the resulting bounds. Grid: ``(tokens,)``."""
    overlap(PDL, LATE_TRIGGER)
    DTYPE: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < H
    before = tl.load(residual + token * H + i, mask=mask, other=0.0)
    scale = tl.load(norm_weight + i, mask=mask, other=0.0)
    h = _sum_of_experts(
        rows, weights, inverse, shared, gate, gate_stride, token, i, mask, H, K, PRODUCT, DTYPE
    )
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
        rows, weights, inverse, top_k, shared, gate: see :func:`combine_experts`.
        residual: ``[..., H]`` of T rows. The sum over the experts is rounded to its dtype.
        norm_weight, eps, form: see :func:`.dispatch.add_rms_norm`.

    Returns:
        Both have the shape and dtype of ``residual``.
    """
    hidden_size = residual.shape[-1]
    num_tokens = len(inverse) // top_k
    loaded = (rows, residual, norm_weight, *(() if shared is None else (shared,)))
    if not (0 < num_tokens <= MAX_FEW_TOKENS and _has_one_launch(loaded)):
        combined = combine_experts(rows, weights, inverse, top_k, residual.dtype, shared, gate)
        return fused.add_rms_norm(combined.view(residual.shape), residual, norm_weight, eps, form)
    weights = weights.contiguous()
    out, hidden = torch.empty_like(residual), torch.empty_like(residual)
    logits, gate_stride = _gate_column(gate)
    block = triton.next_power_of_2(hidden_size)
    _combine_norm_kernel[(num_tokens,)](
        rows, weights, inverse, shared, logits, residual, norm_weight, out, hidden, gate_stride,
        eps,
        H=hidden_size,
        K=top_k,
        BLOCK=block,
        PRODUCT=_product_dtype(rows, weights),
        FORM=form,
        LATE_TRIGGER=triggers_dependents_late(num_tokens),
        num_warps=num_warps(block),
        enable_fp_fusion=False,  # a summand is rounded before it is added
        **overlap_options(rows.device),
    )  # fmt: skip
    return out, hidden


def _has_one_launch(loaded: Sequence[Tensor]) -> bool:
    """Whether all rows are loaded as the separate norm loads them: contiguous, of one dtype, in
    whole units."""
    return all(
        x.dtype == loaded[0].dtype
        and x.shape[-1] % 16 == 0
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        for x in loaded
    )
