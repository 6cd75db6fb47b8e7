"""Head norms, RoPE and KV store of one attention call as a Triton kernel.

A program serves a tile of heads, all of them queries, keys or values, of one token; or of a few if
there are many. Everything that determines the order of additions (heads per tile, warps) follows
from the shapes of the model.
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
from ..e4m3 import are_planes
from ..overlap import overlap
from .e4m3_store import is_e4m3, store_vectors
from .rounding import rounded, scaled

_TILE = 1024  # elements per token, 8 per thread: one 16-byte load in bfloat16
_AT_ONCE = tl.constexpr(8)
_TOKENS_AT_ONCE = 2
_MANY_TOKENS = 512


@triton.constexpr_function
def heads_at_once(num_heads, d_pad):  # type: ignore[no-untyped-def]
    """Heads per program, for up to ``num_heads`` of ``d_pad`` elements; a power of two."""
    return min(max(_TILE // d_pad, 1), triton.next_power_of_2(num_heads))


def tokens_at_once(num_elements: int, cos: Tensor, sin: Tensor, cache: Tensor) -> int:
    """Tokens per program, if the heads of a token that a program serves have ``num_elements``.

    With many tokens, programs of one token are limited by their startup. More tokens only add rows
    to the tile. That must not change the elements of a row that a thread has, and so the order of
    additions: threads already have 8 elements, and no store takes 16 (the one to planes does). Each
    row loads its angles, 16 bytes at once.
    """
    if cos.shape[1] < _MANY_TOKENS or num_elements < _TILE or are_planes(cache):
        return 1
    is_aligned = all(
        x.stride(2) == 1
        and x.stride(1) % _AT_ONCE.value == 0
        and x.shape[2] % _AT_ONCE.value == 0
        and x.data_ptr() % 16 == 0
        for x in (cos, sin)
    )
    return _TOKENS_AT_ONCE if is_aligned else 1


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


class Heads(NamedTuple):
    """The rows of a program's tile, ``[M]`` each.

    heads: int32. tokens, slots: int64; ``[1]`` if the tile is of one token. is_token: whether that
    token exists, likewise. mask: whether the head of that token exists.
    """

    heads: Any
    tokens: Any
    slots: Any
    is_token: Any
    mask: Any


@triton.jit
def store_heads(  # type: ignore[no-untyped-def]
    target, x, at, offsets, H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    TO_SLOTS: tl.constexpr,
):  # fmt: skip
    """Store ``x [M, D_PAD]`` as heads of ``target [tokens or slots, H, D]``; with PAGE, of a cache
    of planes with PAGE slots per block."""
    if PAGE > 0:
        slots = at.slots + tl.zeros_like(at.heads)
        store_vectors(target, slots, at.heads, x, offsets, at.mask, H, D, PAGE)
    else:
        rows = at.slots if TO_SLOTS else at.tokens
        places = rows * (H * D) + at.heads * D
        mask = at.mask[:, None] & (offsets < D)[None, :]
        tl.store(target + places[:, None] + offsets[None, :], x, mask=mask)


@triton.jit
def _norm_and_rotate_heads(  # type: ignore[no-untyped-def]
    source, target, weight, cos, sin, eps, token_stride, head_stride, cos_stride, cos_step,
    sin_stride, sin_step, at, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr,
    PAGE: tl.constexpr, TO_SLOTS: tl.constexpr,
):  # fmt: skip
    """Heads normalised if FORM and rotated, from source to target (:func:`store_heads`)."""
    offsets = tl.arange(0, triton.next_power_of_2(D))
    partners = partners_of(offsets, R)
    mask = at.mask[:, None] & (offsets < D)[None, :]
    is_angle = at.is_token[:, None] & (offsets < R)[None, :]
    start = source + (at.tokens * token_stride + at.heads * head_stride)[:, None]
    x = tl.load(start + offsets[None, :], mask=mask, other=0.0)
    y = tl.load(start + partners[None, :], mask=mask, other=0.0)
    w, w_partner = x, y
    if FORM != "":
        w = tl.load(weight + offsets, mask=offsets < D, other=0.0)[None, :]
        w_partner = tl.load(weight + partners, mask=offsets < D, other=0.0)[None, :]
    cos += at.tokens[:, None] * cos_stride + (offsets % TABLE * cos_step)[None, :]
    sin += at.tokens[:, None] * sin_stride + (offsets % TABLE * sin_step)[None, :]
    if ALIGNED:
        cos = tl.multiple_of(tl.max_contiguous(cos, (1, _AT_ONCE)), (1, 16))
        sin = tl.multiple_of(tl.max_contiguous(sin, (1, _AT_ONCE)), (1, 16))
    c = tl.load(cos, mask=is_angle, other=0.0)
    s = tl.load(sin, mask=is_angle, other=0.0)
    result = norm_and_rotate(x, y, HeadNorm(w, w_partner, eps, FORM), c, s, offsets, D, R, DTYPE)
    store_heads(target, result, at, offsets, H, D, PAGE, TO_SLOTS)


@triton.jit
def copy_heads(  # type: ignore[no-untyped-def]
    source, target, token_stride, head_stride, at, H: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Copy heads from source to their slots of target (:func:`store_heads`)."""
    offsets = tl.arange(0, triton.next_power_of_2(D))
    # The stride of heads may grow with the batch.
    start = source + (at.tokens * token_stride + at.heads.to(tl.int64) * head_stride)[:, None]
    mask = at.mask[:, None] & (offsets < D)[None, :]
    x = tl.load(start + offsets[None, :], mask=mask, other=0.0)
    store_heads(target, x, at, offsets, H, D, PAGE, True)


@triton.jit
def heads_of_tile(  # type: ignore[no-untyped-def]
    tile, first_token, num_tokens, slot_mapping, H: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """:class:`Heads` of the ``tile``-th HEADS of H heads, of TOKENS tokens."""
    row = tl.arange(0, TOKENS * HEADS)
    heads = tile * HEADS + row % HEADS
    token_rows = row // HEADS if TOKENS > 1 else tl.arange(0, 1)
    tokens = first_token + token_rows
    is_token = tokens < num_tokens
    slots = tl.load(slot_mapping + tokens, mask=is_token, other=0)
    return Heads(heads, tokens, slots, is_token, (heads < H) & is_token)


@triton.jit(
    # Sizes and alignments that depend on the batch must not recompile the kernel. Strides of q, k
    # and v are those of a merged matmul, and fixed by the model.
    do_not_specialize=["num_tokens", "cos_stride", "cos_step", "sin_stride", "sin_step"],
    do_not_specialize_on_alignment=["cos", "sin", "slot_mapping"],
)
def _norm_rope_store_kernel(  # type: ignore[no-untyped-def]
    query, key, value, cos, sin, q_weight, k_weight, out, k_cache, v_cache, slot_mapping, eps,
    num_tokens, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    cos_stride, cos_step, sin_stride, sin_step,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    TABLE: tl.constexpr, FORM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``rope(norm(q))`` to ``out``, ``rope(norm(k))`` and ``v`` to their slots in the caches, with
    ``norm(x) = x / sqrt(mean(x**2) + eps) * weight`` and ``rope(x) = x * cos + rotate_half(x) *
    sin``.

    Grid: ``(ceil(T / TOKENS) * tiles,)``, tiles of heads of queries, keys and values. Shapes: query
    and out ``[T, HQ, D]``, key ``[T, HKV, D]``, value ``[T, HKV, DV]``, cos and sin ``[T, TABLE]``,
    caches ``[blocks, PAGE, HKV, D or DV]`` or planes of :mod:`..e4m3`, slot_mapping ``[T]``.
    """
    overlap(PDL)
    DTYPE: tl.constexpr = out.dtype.element_ty
    # Slots per block of planes; else 0, and a token's heads are contiguous.
    PLANES: tl.constexpr = PAGE if is_e4m3(k_cache.dtype.element_ty) else 0
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    DV_PAD: tl.constexpr = triton.next_power_of_2(DV)
    HEADS: tl.constexpr = heads_at_once(max(HQ, HKV), D_PAD)
    V_HEADS: tl.constexpr = heads_at_once(HKV, DV_PAD)
    Q_TILES: tl.constexpr = (HQ + HEADS - 1) // HEADS
    K_TILES: tl.constexpr = (HKV + HEADS - 1) // HEADS
    V_TILES: tl.constexpr = (HKV + V_HEADS - 1) // V_HEADS
    TILES: tl.constexpr = Q_TILES + K_TILES + V_TILES
    tile = tl.program_id(0) % TILES
    first = (tl.program_id(0) // TILES).to(tl.int64) * TOKENS

    # No variables inside the branches: Triton would require the same types in all of them.
    if tile < Q_TILES:
        _norm_and_rotate_heads(
            query, out, q_weight, cos, sin, eps, q_stride, q_head_stride, cos_stride, cos_step,
            sin_stride, sin_step,
            heads_of_tile(tile, first, num_tokens, slot_mapping, HQ, HEADS, TOKENS),
            HQ, D, R, TABLE, TOKENS > 1, FORM, DTYPE, 0, False,
        )  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        _norm_and_rotate_heads(
            key, k_cache, k_weight, cos, sin, eps, k_stride, k_head_stride, cos_stride, cos_step,
            sin_stride, sin_step,
            heads_of_tile(tile - Q_TILES, first, num_tokens, slot_mapping, HKV, HEADS, TOKENS),
            HKV, D, R, TABLE, TOKENS > 1, FORM, DTYPE, PLANES, True,
        )  # fmt: skip
    else:
        copy_heads(
            value, v_cache, v_stride, v_head_stride,
            heads_of_tile(
                tile - Q_TILES - K_TILES, first, num_tokens, slot_mapping, HKV, V_HEADS, TOKENS
            ),
            HKV, DV, PLANES,
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
    tokens = tokens_at_once(heads * triton.next_power_of_2(dim), cos, sin, k_cache)
    num_tiles = (
        triton.cdiv(num_heads, heads)
        + triton.cdiv(num_kv_heads, heads)
        + triton.cdiv(num_kv_heads, v_heads)
    )
    _norm_rope_store_kernel[(triton.cdiv(num_tokens, tokens) * num_tiles,)](
        query, key, value, cos, sin, query if q_weight is None else q_weight,
        query if k_weight is None else k_weight, out, k_cache, v_cache, slot_mapping, eps,
        num_tokens, query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), cos.stride(1), cos.stride(2), sin.stride(1), sin.stride(2),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=dim,
        DV=v_dim,
        R=rotary_dim,
        TABLE=cos.shape[2],
        FORM="" if q_weight is None else form,
        PAGE=k_cache.shape[1],
        TOKENS=tokens,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap_options(query.device),
    )  # fmt: skip
    return out
