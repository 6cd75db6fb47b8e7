"""The router of a mixture of experts, the sort by expert and the copy of rows to the experts, in
one launch for few tokens.

At one token, the separate kernels wait for each other and do very little work. Here every program
computes the experts of all tokens and the destinations of their rows, which takes less time than
waiting for another program. Then it copies its part of the hidden size. The last program stores the
weights and the destination of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import as_rows, overlap_options
from ..fused.rounding import rounded
from ..jit.parallel_build import may_skip_launches
from ..overlap import overlap
from . import expert_rows
from .route import Normalisation, route, top_experts
from .sort_by_expert import sort_by_expert

MAX_FEW_ROWS = 128
"""Most rows of experts (both tokens and experts per token padded to powers of two) for which there
is one launch: a program compares each row with each."""
_BLOCK = 128  # elements of a row per program
_EXPERTS = 128  # experts whose ends are counted at once
_MAX_WARPS = 8


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["weights", "num_real_tokens"],
)
def _route_rows_kernel(  # type: ignore[no-untyped-def]
    logits, tokens, weights, rows, inverse, offs, num_tokens, num_real_tokens,
    logits_stride, token_stride,
    H: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, K: tl.constexpr,
    T_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    NORMALISATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Same as :func:`route_rows`. Grid: ``(ceil(H / BLOCK) + 1,)``; the last program has no
    rows."""
    overlap(PDL)
    S: tl.constexpr = T_BLOCK * K_BLOCK
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    # All loads are issued at once: the logits of each token (beyond the last token, its own again,
    # never uninitialised memory) and the program's part of the row of each of the S tokens.
    token = tl.arange(0, T_BLOCK)[:, None]
    i = tl.arange(0, E_BLOCK)[None, :]
    at = tl.minimum(token, num_tokens - 1).to(tl.int64)
    x = tl.load(logits + at * logits_stride + i, mask=i < E, other=float("-inf")).to(tl.float32)
    num_real = num_tokens
    if num_real_tokens is not None:
        num_real = tl.load(num_real_tokens)
    s = tl.arange(0, S)[:, None]
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_part = (s // K_BLOCK < num_tokens) & (s % K_BLOCK < K) & (h < H)
    part = tl.load(tokens + (s // K_BLOCK).to(tl.int64) * token_stride + h, mask=is_part)

    j = tl.arange(0, K_BLOCK)[None, :]
    weight, found = top_experts(x, i, j, E, K, NORMALISATION)
    # Sort keys of the rows: by expert, within an expert by token; then padding, as one more expert;
    # last, entries that are not rows.
    is_row = (token < num_tokens) & (j < K)
    expert = tl.where(is_row, tl.where(token < num_real, found, E), E + 1)
    keys = tl.reshape(expert * S + token * K_BLOCK + j, (S,))
    if tl.program_id(0) < PARTS:
        place = tl.sum((keys[None, :] < keys[:, None]).to(tl.int32), 1)
        tl.store(rows + place[:, None].to(tl.int64) * H + h, part, mask=is_part)
    else:
        DTYPE: tl.constexpr = weights.dtype.element_ty
        tl.store(weights + token * K + j, rounded(weight, DTYPE).to(DTYPE), mask=is_row)
        # Summed along the other dimension, so that sums are within a thread as far as possible.
        places = tl.sum((keys[:, None] < keys[None, :]).to(tl.int32), 0)
        s_line = tl.arange(0, S)
        is_place = (s_line // K_BLOCK < num_tokens) & (s_line % K_BLOCK < K)
        target = inverse + s_line // K_BLOCK * K + s_line % K_BLOCK
        tl.store(target, places.to(tl.int64), mask=is_place)
        for first in range(0, E, EXPERTS):
            last = first + tl.arange(0, EXPERTS)
            ends = tl.sum((keys[:, None] < (last[None, :] + 1) * S).to(tl.int32), 0)
            tl.store(offs + last, ends, mask=last < E)


def route_rows(
    logits: Tensor,
    tokens: Tensor,
    top_k: int,
    normalisation: Normalisation,
    dtype: torch.dtype,
    query_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copy each token's row once for each expert that the router selects, in the order of the
    experts.

    Results equal those of :func:`.route.route`, :func:`.sort_by_expert.sort_by_expert` and
    :func:`.expert_rows.spread_rows`, bit for bit. Those functions serve larger numbers of tokens.

    Args:
        logits: ``[T, E]``; ``top_k``, ``normalisation`` and ``dtype``: see :func:`.route.route`.
        tokens: ``[T, H]``.
        query_starts: see :func:`.sort_by_expert.sort_by_expert`.

    Returns:
        rows ``[T * top_k, H]``; weights of ``dtype`` ``[T, top_k]``; inverse int64 ``[T * top_k]``,
        the place of each token's and expert's row; offs int32 ``[E]``, the end of each expert's
        rows.
    """
    num_tokens, num_experts = logits.shape
    t_block = triton.next_power_of_2(max(num_tokens, 1))
    k_block = triton.next_power_of_2(top_k)
    if num_tokens == 0 or t_block * k_block > MAX_FEW_ROWS:
        weights, ids = route(logits, top_k, normalisation, dtype)
        _, _, inverse, offs = sort_by_expert(ids.view(-1), num_experts, top_k, query_starts)
        return expert_rows.spread_rows(tokens, inverse, top_k), weights, inverse, offs
    logits, tokens = as_rows(logits), as_rows(tokens)
    hidden_size, device = tokens.shape[1], logits.device
    rows = tokens.new_empty(num_tokens * top_k, hidden_size)
    weights = torch.empty(num_tokens, top_k, dtype=dtype, device=device)
    inverse = torch.empty(num_tokens * top_k, dtype=torch.int64, device=device)
    offs = torch.empty(num_experts, dtype=torch.int32, device=device)
    if may_skip_launches():  # other kernels read data that this kernel has not written
        inverse.zero_()
        offs.zero_()
    _route_rows_kernel[(triton.cdiv(hidden_size, _BLOCK) + 1,)](
        logits, tokens, weights, rows, inverse, offs, num_tokens,
        None if query_starts is None else query_starts[-1:],
        logits.stride(0), tokens.stride(0),
        H=hidden_size,
        E=num_experts,
        E_BLOCK=triton.next_power_of_2(num_experts),
        K=top_k,
        T_BLOCK=t_block,
        K_BLOCK=k_block,
        BLOCK=_BLOCK,
        EXPERTS=min(_EXPERTS, triton.next_power_of_2(num_experts)),
        NORMALISATION=normalisation,
        num_warps=min(t_block, _MAX_WARPS),
        enable_fp_fusion=False,
        **overlap_options(device),
    )  # fmt: skip
    return rows, weights, inverse, offs
