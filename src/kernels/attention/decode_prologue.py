"""What decode attention does before it walks, where it takes q, k and v as a product leaves them.

One launch then normalises, rotates and stores, as :mod:`.norm_rope_store` does, and
attends. A decode program

- normalises and rotates its own queries, once more in every lane: a few hundred operations;
- stores, before it walks, the new keys and values that its own pieces look at: those of its row
  from the row's first new token up to its own. In a decode step that is one token, and lane 0,
  which walks the last piece, has it. Where a row has several new tokens (the shapes of a step
  cannot tell), each program stores all that it will read, so that none reads what another has yet
  to store. Several store the same bits then, which harms nobody.

Every token is stored by its own program at least, those of padding too (by lane 0). Blocks that
requests share are full of settled tokens and not written to, so no program looks at a slot that
another writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import vector_strides
from ..fused import norm_rope_store
from ..fused.norm_rope_store import turned
from .online_softmax import split_of

_KEYS = 16  # new tokens whose keys are made at once: rows of a tile as high as that of the queries
KEYS = tl.constexpr(_KEYS)


@triton.jit
def load_weights(  # type: ignore[no-untyped-def]
    weight, dims, partners, size, M: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr
):
    """``[M, D_PAD]``, M times the first ``size`` weights of a norm and those of their partners;
    zeros without FORM.

    A row for each head or token, so that each thread reads what it needs: no exchange.
    """
    own = tl.zeros((M, dims.shape[0]), DTYPE)
    others = own
    if FORM != "":
        rows = weight + tl.zeros((M,), tl.int32)[:, None]
        mask = (dims < size)[None, :]
        own = tl.load(rows + dims[None, :], mask=mask, other=0.0)
        others = tl.load(rows + partners[None, :], mask=mask, other=0.0)
    return own, others


@triton.jit
def load_angles(  # type: ignore[no-untyped-def]
    table,
    tokens,
    mask,
    dims,
    stride,
    step,
    R: tl.constexpr,
    TABLE: tl.constexpr,
    ANGLES: tl.constexpr,
):
    """``[M, D_PAD]`` of cos or sin of ``tokens [M]``, zeros but where ``mask [M]`` and dims < R."""
    rows = table + (tokens * ANGLES)[:, None] * stride
    at = dims % TABLE
    if ANGLES > 1:
        pointers = rows + at[None, :]
    else:
        pointers = rows + (at * step)[None, :]
    return tl.load(pointers, mask=mask[:, None] & (dims < R)[None, :], other=0.0)


@triton.jit
def ask(  # type: ignore[no-untyped-def]
    cache,
    blocks,
    start,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Ask for a tile of a cache in L2; arguments as of :func:`triton_softmax.load_rows`.

    Reads nothing, so that what it asks for may be written later.
    """
    LINE: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth  # 128 bytes
    lines = tl.arange(0, triton.next_power_of_2((D + LINE - 1) // LINE)) * LINE
    offsets = tl.arange(0, BLOCK_N)
    base = cache + blocks.to(tl.int64) * (PAGE * WIDTH)
    if PAGE >= BLOCK_N:
        rows = base + (start & (PAGE - 1)) * WIDTH + (offsets * WIDTH)[:, None]
    else:
        rows = base[:, None] + ((offsets & (PAGE - 1)) * WIDTH)[:, None]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(rows + lines[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_new(  # type: ignore[no-untyped-def]
    key,
    value,
    cos,
    sin,
    weight,
    weight_partner,
    k_cache,
    v_cache,
    slot_mapping,
    eps,
    first_new,
    end_new,
    token,
    position,
    num_first,
    last_segment,
    worker,
    num_workers,
    head,
    dims,
    partners,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cos_stride,
    cos_step,
    sin_stride,
    sin_step,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    R: tl.constexpr,
    TABLE: tl.constexpr,
    ANGLES: tl.constexpr,
    NEAR_SPLIT: tl.constexpr,
    FAR_SPLIT: tl.constexpr,
    SPLIT_CHANGE: tl.constexpr,
    FORM: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Store what this program's pieces hold of the tokens ``first_new`` to ``end_new``.

    By piece, not by what the window shows: values of hidden slots are multiplied by zero.

    Args:
        position: of ``token``, 0 for padding. first_new: the first token of its row.
        num_first: splits in the first piece of the row.
    """
    DTYPE: tl.constexpr = k_cache.dtype.element_ty
    v_dims = tl.arange(0, DV_PAD)
    for first in range(first_new, end_new, KEYS):
        tokens = first + tl.arange(0, KEYS)
        segment = split_of(
            tl.maximum(position - (token - tokens), 0), NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE
        )
        behind = last_segment - tl.maximum(segment - (num_first - 1), 0)
        mine = (tokens <= token) & (behind % num_workers == worker)
        wide = tokens.to(tl.int64)
        slots = tl.load(slot_mapping + wide, mask=mine, other=0)
        k_mask = mine[:, None] & (dims < DK)[None, :]
        k_rows = key + wide[:, None] * (k_token_stride * K_STEP) + head * (k_head_stride * K_STEP)
        x = tl.load(k_rows + dims[None, :], mask=k_mask, other=0.0)
        y = tl.load(k_rows + partners[None, :], mask=k_mask, other=0.0)
        c = load_angles(cos, wide, mine, dims, cos_stride, cos_step, R, TABLE, ANGLES)
        s = load_angles(sin, wide, mine, dims, sin_stride, sin_step, R, TABLE, ANGLES)
        v_mask = mine[:, None] & (v_dims < DV)[None, :]
        v_rows = value + wide[:, None] * (v_token_stride * V_STEP) + head * (v_head_stride * V_STEP)
        new_value = tl.load(v_rows + v_dims[None, :], mask=v_mask, other=0.0)
        new_key = turned(x, y, weight, weight_partner, c, s, dims, eps, DK, R, FORM, DTYPE, EMULATE)
        k_slots = k_cache + (slots * HKV + head)[:, None] * DK
        v_slots = v_cache + (slots * HKV + head)[:, None] * DV
        tl.store(k_slots + dims[None, :], new_key, mask=k_mask)
        tl.store(v_slots + v_dims[None, :], new_value, mask=v_mask)


def fits(query: Tensor, key: Tensor, has_norm: bool) -> bool:
    """Whether one launch gives the bits of two: by shapes, strides and dtypes alone.

    - float32 products are compiled to other instructions where contraction is off, as it is here.
    - A norm adds up its squares in an order that follows from how Triton spreads a tile over the
      threads: neighbours that one thread loads at once (16 bytes, if the strides allow it and the
      tile has as many elements for each of its 128 threads), then lanes. The tile here has another
      height than that of :mod:`triton_rope`; with heads of few elements or in models of few heads
      it may not be spread alike.
    """
    _, num_heads, dim = query.shape
    padded = triton.next_power_of_2(dim)
    if query.dtype == torch.float32 or padded < _KEYS:
        return False
    if not has_norm:
        return True
    if vector_strides(query)[2] == 1 or vector_strides(key)[2] == 1:
        return False
    group = triton.next_power_of_2(num_heads // key.shape[1])
    theirs = norm_rope_store.heads_at_once(max(num_heads, key.shape[1]), padded) * padded
    at_once = 16 // query.element_size()
    ours = (max(_KEYS, group) * padded, _KEYS * padded)
    return all(min(at_once, n // 128) == min(at_once, theirs // 128) for n in ours)
