"""Rows of tokens brought into the order of their experts, and the sum over a token's experts, a
shared one among them.

Both kernels have one program per token and part of its width. It walks over the token's experts,
each of whose rows lies where the inverse of :func:`.sort_by_expert.sort_by_expert` says, so a
token's hidden state is read once and its result written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import as_rows, has_dependent_launch
from ..fused.rounding import rounded, sigmoid

MAX_TOP_K = 16
"""Experts per token of these kernels, whose loops over them are unrolled."""

# Elements of a row per program and its warps, up to how many tokens there are: 16 bytes of
# bfloat16 per thread, and programs enough for all multiprocessors where tokens are few.
_TILES = ((256, 1, 64), (1024, 4, 1 << 40))


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    tokens, inverse, out, token_stride,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[inverse[t * K + j]] = tokens[t]``. Grid: ``(tokens * ceil(H / BLOCK),)``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
def with_shared(  # type: ignore[no-untyped-def]
    total, shared, gate, HAS_GATE: tl.constexpr, DTYPE: tl.constexpr
):
    """``total + sigmoid(gate) * shared``, or without the factor, as float32; each operation is
    rounded to DTYPE, as ``total`` is. The same for few tokens (:mod:`.combine_norm`) and many."""
    shared = shared.to(tl.float32)
    if HAS_GATE:
        shared = rounded(rounded(sigmoid(gate.to(tl.float32)), DTYPE) * shared, DTYPE)
    return rounded(total + shared, DTYPE)


@triton.jit(do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=["weights", "gate"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    rows, weights, inverse, shared, gate, out, gate_stride,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of rows[inverse[t * K + j]] * weights[t * K + j]``, plus
    ``sigmoid(gate[t]) * shared[t]`` if there is a shared expert; products are rounded to PRODUCT.
    Grid: ``(tokens * ceil(H / BLOCK),)``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    i = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    # All places are asked for before the first is waited for, then the rows. The assembler would
    # save registers and wait for each place in turn; it does not move loads behind a barrier.
    places = ()
    factors = ()
    for j in tl.static_range(K):
        places += (tl.load(inverse + token * K + j),)  # type: ignore[assignment]
        factors += (tl.load(weights + token * K + j),)  # type: ignore[assignment]
    if HAS_SHARED:
        added = tl.load(shared + token * H + i, mask=i < H, other=0.0)
        logit = tl.load(gate + token * gate_stride) if HAS_GATE else 0.0
    tl.debug_barrier()
    parts = ()
    for j in tl.static_range(K):
        parts += (tl.load(rows + places[j] * H + i, mask=i < H, other=0.0),)  # type: ignore[assignment]
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        total += rounded(parts[j].to(tl.float32) * factors[j].to(tl.float32), PRODUCT)
    # The sum has the dtype of the products, then that of the result.
    DTYPE: tl.constexpr = out.dtype.element_ty
    total = rounded(rounded(total, PRODUCT), DTYPE)
    if HAS_SHARED:
        total = with_shared(total, added, logit, HAS_GATE, DTYPE)
    tl.store(out + token * H + i, total.to(DTYPE), mask=i < H)


def spread_rows(tokens: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Each token's row once per expert, in the order of the experts.

    Args:
        tokens: ``[T, H]``.
        inverse: int64 ``[T * top_k]``, a permutation: where the row of token t and its j-th expert
            goes, at ``t * top_k + j``.

    Returns:
        ``[T * top_k, H]``, equal to ``tokens[order // top_k]`` with the order that ``inverse``
        undoes.
    """
    tokens = as_rows(tokens)
    hidden_size = tokens.shape[1]
    out = tokens.new_empty(len(inverse), hidden_size)
    num_tokens = len(inverse) // top_k
    if not num_tokens:
        return out
    block, num_warps = _tile(num_tokens)
    pdl = has_dependent_launch(tokens.device)
    _spread_kernel[(num_tokens * triton.cdiv(hidden_size, block),)](
        tokens, inverse, out, tokens.stride(0),
        H=hidden_size,
        K=top_k,
        BLOCK=block,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
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

    Rounded as torch's operations: products to the dtype that ``rows * weights`` has, their float32
    sum once to the same, then to ``dtype``, as the gate, its product and the addition of the shared
    expert are. The sum is taken in the order of j, so a token's bits depend on no other token.

    Args:
        rows: ``[T * top_k, H]``, in the order of the experts.
        weights: ``[T * top_k]``, in the order of the tokens.
        inverse: int64 ``[T * top_k]``, as of :func:`spread_rows`.
        shared: ``[..., H]`` of T rows and of ``dtype``: what a shared expert gives.
        gate: ``[..., 1]`` of T rows and of ``dtype``: logits whose sigmoids ``shared`` is
            multiplied by.

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
    pdl = has_dependent_launch(rows.device)
    logits, gate_stride = gate_column(gate, rows)
    _combine_kernel[(num_tokens * triton.cdiv(hidden_size, block),)](
        rows, weights, inverse, rows if shared is None else shared.contiguous(), logits, out,
        gate_stride,
        H=hidden_size,
        K=top_k,
        BLOCK=block,
        PRODUCT=TRITON_DTYPES[torch.promote_types(rows.dtype, weights.dtype)],
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        PDL=pdl,
        num_warps=num_warps,
        enable_fp_fusion=False,  # a product is rounded before it is added
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def gate_column(gate: Tensor | None, unread: Tensor) -> tuple[Tensor, int]:
    """The logits of a gate as a kernel takes them, and the stride between two tokens: they may be a
    column of a merged matmul's result. ``unread`` stands for them where there are none."""
    if gate is None:
        return unread, 0
    column = gate.reshape(-1)
    return column, column.stride(0)


TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def _tile(num_tokens: int) -> tuple[int, int]:
    """(elements of a row per program, warps)."""
    return next(tile[:2] for tile in _TILES if num_tokens <= tile[2])
