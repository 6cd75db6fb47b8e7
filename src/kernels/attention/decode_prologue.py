"""The RoPE prologue of decode attention: norms, rotation and KV store inside the decode kernel.

One launch normalises, rotates and stores, as :mod:`..fused.norm_rope_store` does, and then attends.
It reads q, k and v as the merged matmul stores them. A decode program

- normalises and rotates its own queries, again in every worker: a few hundred operations;
- stores, before it attends, the new keys and values of its own segments: those from its row's first
  new token up to its own token. In a decode step that is one token, and worker 0 stores it, because
  worker 0 has the last segment. If a row has several new tokens (which the shapes of a step do not
  show), each program stores everything that it will read, so that no program reads data that
  another has yet to store. Several programs then store the same bits.

At least a token's own program stores the token; worker 0 stores padding tokens. Blocks that
requests share contain only settled tokens and are not written, so no program reads a slot that
another program writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import vector_strides
from ..fused import norm_rope_store
from ..fused.e4m3_store import is_e4m3, store_vectors
from ..fused.norm_rope_store import norm_and_rotate
from .e4m3_tiles import num_lines
from .online_softmax import slot_pointers, split_of

_KEYS = 16  # new tokens per tile of keys: as many rows as a tile of queries has


@triton.constexpr_function
def keys_at_once(ARE_PLANES, DK_PAD):  # type: ignore[no-untyped-def]
    """Height of the tile of new keys. For e4m3 keys, at most 8 elements per thread. With more, a
    thread would store 16 adjacent elements at once and also load 16 at once. Then squares would be
    added in another order than in :mod:`..fused.norm_rope_store` (:func:`fits`)."""
    return max(1, min(_KEYS, 1024 // DK_PAD)) if ARE_PLANES else _KEYS


@triton.jit
def load_weights(  # type: ignore[no-untyped-def]
    weight, dims, partners, size, M: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr
):
    """``[M, D_PAD]``: the first ``size`` weights of a norm and those of their partners, repeated M
    times; zeros without FORM.

    There is one row per head or token, so each thread reads what it needs without an exchange.
    """
    own = tl.zeros((M, dims.shape[0]), DTYPE)
    others = own
    if FORM != "":
        rows = weight + tl.zeros((M,), tl.int32)[:, None]
        mask = (dims < size)[None, :]
        own = tl.load(rows + dims[None, :], mask=mask, other=0.0)
        others = tl.load(rows + partners[None, :], mask=mask, other=0.0)
    return own, others


class Angles(NamedTuple):
    """Pointers to cos and sin, and strides of their rows (in units of ANGLES) and elements.

    Constants: the first R elements of a head are rotated by TABLE angles, and ANGLES of these are
    read at once.
    """

    cos: Any
    sin: Any
    cos_stride: Any
    cos_step: Any
    sin_stride: Any
    sin_step: Any
    R: Any
    TABLE: Any
    ANGLES: Any


class NewTokens(NamedTuple):
    """Pointers to the keys, values and slots of a step, with their strides in units of STEP (a
    constant). The tokens ``first_new`` to ``end_new`` are to be stored."""

    key: Any
    value: Any
    slot_mapping: Any
    first_new: Any
    end_new: Any
    k_token_stride: Any
    k_head_stride: Any
    v_token_stride: Any
    v_head_stride: Any
    STEP: Any


class WorkerShare(NamedTuple):
    """The segments of a context that belong to a program; ``num_first``: splits in the first
    segment."""

    num_first: Any
    last_segment: Any
    worker: Any
    num_workers: Any


@triton.jit
def load_angles(angles, tokens, mask, dims):  # type: ignore[no-untyped-def]
    """cos and sin of ``tokens [M]``, each ``[M, D_PAD]``; 0 except where ``mask [M]`` holds and
    dims < R."""
    c = _load_table(angles.cos, tokens, mask, dims, angles.cos_stride, angles.cos_step, angles)
    s = _load_table(angles.sin, tokens, mask, dims, angles.sin_stride, angles.sin_step, angles)
    return c, s


@triton.jit
def _load_table(table, tokens, mask, dims, stride, step, angles):  # type: ignore[no-untyped-def]
    rows = table + (tokens * angles.ANGLES)[:, None] * stride
    at = dims % angles.TABLE
    if angles.ANGLES == 1:
        at = at * step
    return tl.load(rows + at[None, :], mask=mask[:, None] & (dims < angles.R)[None, :], other=0.0)


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Prefetch into L2 the 128-byte lines that the pointers address."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_tile(  # type: ignore[no-untyped-def]
    cache, blocks, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Prefetch a tile of a cache into L2; arguments as in :func:`.online_softmax.load_rows`.

    The prefetch reads no values, so the data may be written later.
    """
    LINE: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth  # 128 bytes
    lines = tl.arange(0, triton.next_power_of_2((D + LINE - 1) // LINE)) * LINE
    rows = slot_pointers(cache, blocks, start, WIDTH, BLOCK, PAGE, BLOCK_N)
    prefetch(rows + lines[None, :])


@triton.jit
def store_new(  # type: ignore[no-untyped-def]
    new, angles, norm, k_cache, v_cache, head,
    HKV: tl.constexpr,
    token, position, share, dims, partners, splits, shape,
):  # fmt: skip
    """Store those of the tokens ``first_new`` to ``end_new`` that belong to this program's
    segments.

    The test is by segment, not by window: values of hidden slots are multiplied by zero, so they
        must be finite.

    Args:
        new, angles, norm, share, splits, shape: :class:`NewTokens` (the first is the first new
            token of the row), :class:`Angles`, :class:`.norm_rope_store.HeadNorm`,
            :class:`WorkerShare`, :class:`.online_softmax.Splits` and ``TileShape``.
        position: of ``token``, 0 for padding.
        dims, partners: of a head, ``[DK_PAD]``.
    """
    DTYPE: tl.constexpr = new.key.dtype.element_ty
    KEYS: tl.constexpr = keys_at_once(is_e4m3(k_cache.dtype.element_ty), shape.DK_PAD)
    v_dims = tl.arange(0, shape.DV_PAD)
    for first in range(new.first_new, new.end_new, KEYS):
        tokens = first + tl.arange(0, KEYS)
        segment = split_of(tl.maximum(position - (token - tokens), 0), splits)
        behind = share.last_segment - tl.maximum(segment - (share.num_first - 1), 0)
        mine = (tokens <= token) & (behind % share.num_workers == share.worker)
        wide = tokens.to(tl.int64)
        slots = tl.load(new.slot_mapping + wide, mask=mine, other=0)
        k_mask = mine[:, None] & (dims < shape.DK)[None, :]
        k_rows = new.key + wide[:, None] * (new.k_token_stride * new.STEP)
        k_rows += head * (new.k_head_stride * new.STEP)
        x = tl.load(k_rows + dims[None, :], mask=k_mask, other=0.0)
        y = tl.load(k_rows + partners[None, :], mask=k_mask, other=0.0)
        c, s = load_angles(angles, wide, mine, dims)
        v_mask = mine[:, None] & (v_dims < shape.DV)[None, :]
        v_rows = new.value + wide[:, None] * (new.v_token_stride * new.STEP)
        v_rows += head * (new.v_head_stride * new.STEP)
        new_value = tl.load(v_rows + v_dims[None, :], mask=v_mask, other=0.0)
        new_key = norm_and_rotate(x, y, norm, c, s, dims, shape.DK, angles.R, DTYPE)
        if is_e4m3(k_cache.dtype.element_ty):
            store_vectors(k_cache, slots, head, new_key, dims, mine, HKV, shape.DK, shape.PAGE)
            store_vectors(v_cache, slots, head, new_value, v_dims, mine, HKV, shape.DV, shape.PAGE)
        else:
            k_slots = k_cache + (slots * HKV + head)[:, None] * shape.DK
            v_slots = v_cache + (slots * HKV + head)[:, None] * shape.DV
            tl.store(k_slots + dims[None, :], new_key, mask=k_mask)
            tl.store(v_slots + v_dims[None, :], new_value, mask=v_mask)


def fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    has_norm: bool,
    are_planes: bool = False,
    quantizes: bool = False,
) -> bool:
    """Whether one launch gives the same bits as two launches, for caches of the model's dtype or
    FP8, with or without quantised outputs. The answer depends only on shapes, strides and dtypes.

    - The compiler uses other instructions for float32 matmuls where contraction is off, as it is
      here.
    - A norm adds its squares in an order that follows from how Triton distributes a tile over
      threads. First come adjacent elements that one thread loads at once (16 bytes, if the strides
      allow it and the tile has that many elements for each of its 128 threads), then lanes of a
      warp. The tile here has another height than that of :mod:`..fused.norm_rope_store`. With heads
      of few elements, or in models of few heads, its distribution may differ. It also differs if
      outputs are quantised and a thread has more than 16 bytes of the queries: the thread would
      store 16 outputs at once, and load as many.
    """
    _, num_heads, dim = query.shape
    padded = triton.next_power_of_2(dim)
    if query.dtype == torch.float32 or padded < _KEYS * (1 + are_planes):
        return False
    if not has_norm:
        return True
    if vector_strides(query, key, value)[-1] == 1:
        return False
    group = triton.next_power_of_2(num_heads // key.shape[1])
    theirs = norm_rope_store.heads_at_once(max(num_heads, key.shape[1]), padded) * padded
    at_once = 16 // query.element_size()
    lines = num_lines(group, padded, True) if are_planes or quantizes else max(_KEYS, group)
    if quantizes and lines * padded > 128 * at_once:
        return False
    ours = (lines * padded, keys_at_once(are_planes, padded) * padded)
    return all(min(at_once, n // 128) == min(at_once, theirs // 128) for n in ours)
