"""Head norms, RoPE and KV store of one attention call as a Triton kernel.

A program serves one token and a tile of heads, all of them queries, keys or values. Everything that
determines the order of additions (tile, warps) follows from the shapes of the model.
Multiplications and additions are never contracted, as in :mod:`.rms_norm`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import RopeInputs
from ..device import overlap_options
from ..overlap import overlap
from .e4m3_store import is_e4m3, store_vectors
from .rounding import rounded, scaled

_TILE = 1024  # elements per program, 8 per thread: one 16-byte load in bfloat16


@triton.constexpr_function
def heads_at_once(num_heads, d_pad):  # type: ignore[no-untyped-def]
    """Heads per program, for up to ``num_heads`` of ``d_pad`` elements; a power of two."""
    return min(max(_TILE // d_pad, 1), triton.next_power_of_2(num_heads))


@triton.jit
def partners_of(offsets, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """The index of the element that is rotated together with that at ``offsets``: the same beyond
    the first R.

    Each element also needs its partner. A second load, which hits the L1 cache, is simpler than an
    exchange between threads.
    """
    HALF: tl.constexpr = R // 2
    partners = tl.where(offsets < HALF, offsets + HALF, offsets - HALF)
    return tl.where(offsets < R, partners, offsets)


class HeadNorm(NamedTuple):
    """Operands of the RMSNorm of heads, if the constant FORM is not "".

    ``weight``, and ``partners``, the weights of the elements' partners, are ``[M or 1, D_PAD]``, as
    loaded; undefined without FORM.
    """

    weight: Any
    partners: Any
    eps: Any
    FORM: Any


@triton.jit
def norm_and_rotate(  # type: ignore[no-untyped-def]
    x, y, norm, c, s, offsets, D: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads ``x [M, D_PAD]``, normalised if ``norm.FORM`` and rotated, in DTYPE.

    All kernels compute the same bits if they are compiled without contraction and the sum over D
    has the same order, which follows from the layout of x.

    Args:
        y: the partners of x. norm: :class:`HeadNorm`.
        c, s: ``[M or 1, D_PAD]``. All in the dtypes in which they are stored. offsets: of a head,
            ``[D_PAD]``.
    """
    HALF: tl.constexpr = R // 2
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if norm.FORM != "":
        r = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / D) + norm.eps)[:, None]
        x = scaled(x * r, norm.weight.to(tl.float32), norm.FORM, DTYPE)
        y = scaled(y * r, norm.partners.to(tl.float32), norm.FORM, DTYPE)
    y = tl.where((offsets < HALF)[None, :], -y, y)
    result = rounded(x * c.to(tl.float32), DTYPE)
    result += rounded(y * s.to(tl.float32), DTYPE)
    result = tl.where((offsets < R)[None, :], rounded(result, DTYPE), x)
    return result.to(DTYPE)


@triton.jit
def _norm_and_rotate_heads(  # type: ignore[no-untyped-def]
    source, target, weight, cos, sin, eps, head_stride, offsets, heads,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr,
    slot, PAGE: tl.constexpr,
):  # fmt: skip
    """``[heads, D]`` of one token, normalised if FORM and rotated, from source to target. With
    PAGE, the target is a slot of a cache of planes. cos and sin: pointers to D_PAD elements."""
    partners = partners_of(offsets, R)
    mask = (heads < H)[:, None] & (offsets < D)[None, :]
    start = source + heads[:, None] * head_stride
    x = tl.load(start + offsets[None, :], mask=mask, other=0.0)
    y = tl.load(start + partners[None, :], mask=mask, other=0.0)
    w, w_partner = x, y
    if FORM != "":
        w = tl.load(weight + offsets, mask=offsets < D, other=0.0)[None, :]
        w_partner = tl.load(weight + partners, mask=offsets < D, other=0.0)[None, :]
    c = tl.load(cos, mask=offsets < R, other=0.0)[None, :]
    s = tl.load(sin, mask=offsets < R, other=0.0)[None, :]
    result = norm_and_rotate(x, y, HeadNorm(w, w_partner, eps, FORM), c, s, offsets, D, R, DTYPE)
    if PAGE > 0:
        slots = slot + tl.zeros_like(heads)
        store_vectors(target, slots, heads, result, offsets, heads < H, H, D, PAGE)
    else:
        tl.store(target + heads[:, None] * D + offsets[None, :], result, mask=mask)


@triton.jit
def copy_heads(  # type: ignore[no-untyped-def]
    source, target, head_stride, offsets, heads, H: tl.constexpr, D: tl.constexpr,
    slot, PAGE: tl.constexpr,
):  # fmt: skip
    """Copy ``[heads, D]`` of one token from source to target. With PAGE, the target is a slot of a
    cache of planes."""
    mask = (heads < H)[:, None] & (offsets < D)[None, :]
    pointers = source + heads[:, None] * head_stride + offsets[None, :]
    if PAGE > 0:
        x = tl.load(pointers, mask=mask, other=0.0)
        slots = slot + tl.zeros_like(heads)
        store_vectors(target, slots, heads, x, offsets, heads < H, H, D, PAGE)
    else:
        x = tl.load(pointers, mask=mask)
        tl.store(target + heads[:, None] * D + offsets[None, :], x, mask=mask)


@triton.jit(
    # Sizes and alignments that depend on the batch must not recompile the kernel. Strides of q, k
    # and v are those of a merged matmul, and fixed by the model.
    do_not_specialize=["cos_stride", "cos_step", "sin_stride", "sin_step"],
    do_not_specialize_on_alignment=["cos", "sin", "slot_mapping"],
)
def _norm_rope_store_kernel(  # type: ignore[no-untyped-def]
    query, key, value, cos, sin, q_weight, k_weight, out, k_cache, v_cache, slot_mapping, eps,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, cos_stride, cos_step,
    sin_stride, sin_step,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    TABLE: tl.constexpr, FORM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``rope(norm(q))`` to ``out``, ``rope(norm(k))`` and ``v`` to their slots in the caches, with
    ``norm(x) = x / sqrt(mean(x**2) + eps) * weight`` and ``rope(x) = x * cos + rotate_half(x) *
    sin``.

    Grid: ``(T * tiles,)``, tiles of heads of queries, keys and values. Shapes: query and out
    ``[T, HQ, D]``, key ``[T, HKV, D]``, value ``[T, HKV, DV]``, cos and sin ``[T, TABLE]``, caches
    ``[blocks, PAGE, HKV, D or DV]`` or planes of :mod:`..e4m3`, slot_mapping ``[T]``.
    """
    overlap(PDL)
    DTYPE: tl.constexpr = out.dtype.element_ty
    # Slots per block of planes; else 0, and a token's heads are contiguous.
    PLANES: tl.constexpr = PAGE if is_e4m3(k_cache.dtype.element_ty) else 0
    K_WIDTH: tl.constexpr = 0 if PLANES else HKV * D
    V_WIDTH: tl.constexpr = 0 if PLANES else HKV * DV
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    DV_PAD: tl.constexpr = triton.next_power_of_2(DV)
    HEADS: tl.constexpr = heads_at_once(max(HQ, HKV), D_PAD)
    V_HEADS: tl.constexpr = heads_at_once(HKV, DV_PAD)
    Q_TILES: tl.constexpr = (HQ + HEADS - 1) // HEADS
    K_TILES: tl.constexpr = (HKV + HEADS - 1) // HEADS
    V_TILES: tl.constexpr = (HKV + V_HEADS - 1) // V_HEADS
    TILES: tl.constexpr = Q_TILES + K_TILES + V_TILES
    tile = tl.program_id(0) % TILES
    token = (tl.program_id(0) // TILES).to(tl.int64)
    offsets = tl.arange(0, D_PAD)
    lane = tl.arange(0, HEADS)
    cos += token * cos_stride + offsets % TABLE * cos_step
    sin += token * sin_stride + offsets % TABLE * sin_step
    slot = tl.load(slot_mapping + token)

    # No variables inside the branches: Triton would require the same types in all of them.
    if tile < Q_TILES:
        _norm_and_rotate_heads(
            query + token * q_stride, out + token * HQ * D, q_weight, cos, sin, eps, q_head_stride,
            offsets, tile * HEADS + lane, HQ, D, R, FORM, DTYPE, slot, 0,
        )  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        _norm_and_rotate_heads(
            key + token * k_stride, k_cache + slot * K_WIDTH, k_weight, cos, sin, eps,
            k_head_stride, offsets, (tile - Q_TILES) * HEADS + lane, HKV, D, R, FORM, DTYPE,
            slot, PLANES,
        )  # fmt: skip
    else:
        copy_heads(
            value + token * v_stride, v_cache + slot * V_WIDTH, v_head_stride,
            tl.arange(0, DV_PAD),
            (tile - Q_TILES - K_TILES) * V_HEADS + tl.arange(0, V_HEADS), HKV, DV, slot, PLANES,
        )  # fmt: skip


def norm_rope_store(
    inputs: RopeInputs,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Same as :func:`.dispatch.norm_rope_store`; no synchronisation.

    The contents of the null block, where many tokens write, are undefined.
    """
    query, key, value, cos, sin, rotary_dim, q_weight, k_weight, eps, form = inputs
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, v_dim = value.shape[1:]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    heads = heads_at_once(max(num_heads, num_kv_heads), triton.next_power_of_2(dim))
    v_heads = heads_at_once(num_kv_heads, triton.next_power_of_2(v_dim))
    num_tiles = (
        triton.cdiv(num_heads, heads)
        + triton.cdiv(num_kv_heads, heads)
        + triton.cdiv(num_kv_heads, v_heads)
    )
    _norm_rope_store_kernel[(num_tokens * num_tiles,)](
        query, key, value, cos, sin, query if q_weight is None else q_weight,
        query if k_weight is None else k_weight, out, k_cache, v_cache, slot_mapping, eps,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), cos.stride(1), cos.stride(2), sin.stride(1), sin.stride(2),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=dim,
        DV=v_dim,
        R=rotary_dim,
        TABLE=cos.shape[2],
        FORM="" if q_weight is None else form,
        PAGE=k_cache.shape[1],
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(query.device),
    )  # fmt: skip
    return out
