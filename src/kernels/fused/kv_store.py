"""The KV store as a Triton kernel: one program copies one token's key and value to its slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device import has_dependent_launch, vector_strides
from .e4m3_store import is_e4m3, store_vectors


@triton.jit(
    # What follows the batch must not make new versions of the kernel: strides of tensors whose
    # outer dimension is the head grow with it, and metadata may lie anywhere in a staging buffer.
    do_not_specialize=["k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_kernel(  # type: ignore[no-untyped-def]
    key, value, k_cache, v_cache, slot_mapping,
    k_token_stride,  # all in units of STEP elements
    k_head_stride,
    v_token_stride,
    v_head_stride,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, HKV: tl.constexpr, STEP: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``k_cache[slot_mapping[t]] = key[t]``, values alike. Grid: ``(T,)``.

    Shapes: key ``[T, HKV, K_DIM]``, value ``[T, HKV, V_DIM]``, caches ``[slots, WIDTH]`` or planes
    of :mod:`..e4m3` in blocks of PAGE slots, slot_mapping ``[T]``.
    """
    K_WIDTH: tl.constexpr = HKV * K_DIM  # elements of one token in the cache
    V_WIDTH: tl.constexpr = HKV * V_DIM
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if is_e4m3(k_cache.dtype.element_ty):
        first = key + token * (k_token_stride * STEP)
        _store_heads(first, k_head_stride * STEP, k_cache, slot, K_DIM, HKV, PAGE)
        first = value + token * (v_token_stride * STEP)
        _store_heads(first, v_head_stride * STEP, v_cache, slot, V_DIM, HKV, PAGE)
    else:
        i = tl.arange(0, triton.next_power_of_2(K_WIDTH))
        first = key + token * (k_token_stride * STEP)
        source = first + (i // K_DIM).to(tl.int64) * (k_head_stride * STEP) + i % K_DIM
        tl.store(k_cache + slot * K_WIDTH + i, tl.load(source, mask=i < K_WIDTH), mask=i < K_WIDTH)
        i = tl.arange(0, triton.next_power_of_2(V_WIDTH))
        first = value + token * (v_token_stride * STEP)
        source = first + (i // V_DIM).to(tl.int64) * (v_head_stride * STEP) + i % V_DIM
        tl.store(v_cache + slot * V_WIDTH + i, tl.load(source, mask=i < V_WIDTH), mask=i < V_WIDTH)


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    source, head_stride, cache, slot, D: tl.constexpr, HKV: tl.constexpr, PAGE: tl.constexpr
):
    """The heads of a token, ``[HKV, D]`` from ``source`` on, to their slot of a cache of planes."""
    heads = tl.arange(0, triton.next_power_of_2(HKV)).to(tl.int64)
    dims = tl.arange(0, triton.next_power_of_2(D))
    mask = heads < HKV
    pointers = source + (heads * head_stride)[:, None] + dims[None, :]
    x = tl.load(pointers, mask=mask[:, None] & (dims < D)[None, :], other=0.0)
    slots = slot + tl.zeros_like(heads)
    store_vectors(cache, slots, heads, x, dims, mask, HKV, D, PAGE)


def kv_store(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """As :func:`.dispatch.kv_store`; T programs, no synchronisation.

    ``key`` and ``value`` may be strided in tokens and heads, as the transposed views of a model
    are. What ends up in the null block, where many tokens write, is not determined.
    """
    num_tokens, num_heads, _ = key.shape
    if num_tokens == 0:
        return
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    *strides, step = vector_strides(key, value)
    _store_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slot_mapping, *strides,
        K_DIM=key.shape[2],
        V_DIM=value.shape[2],
        HKV=num_heads,
        STEP=step,
        PAGE=k_cache.shape[1],
        PDL=has_dependent_launch(key.device),
        num_warps=4,
    )  # fmt: skip
