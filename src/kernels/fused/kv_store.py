"""The KV store as a Triton kernel: one program copies one token's key and value to its slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device import has_dependent_launch, vector_strides


@triton.jit(
    # What follows the batch must not make new versions of the kernel: strides of tensors whose
    # outer dimension is the head grow with it, and metadata may lie anywhere in a staging buffer.
    do_not_specialize=["k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    k_token_stride,  # in units of K_STEP elements
    k_head_stride,
    v_token_stride,  # in units of V_STEP elements
    v_head_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,  # Hkv * Dk, elements of one token in the cache
    V_WIDTH: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """``k_cache[slot_mapping[t]] = key[t]``, values alike. Grid: ``(T,)``.

    Shapes: key ``[T, HKV, K_DIM]``, value ``[T, HKV, V_DIM]``, caches ``[slots, WIDTH]``,
    slot_mapping ``[T]``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)

    i = tl.arange(0, K_PADDED)
    first = key + token * (k_token_stride * K_STEP)
    source = first + (i // K_DIM).to(tl.int64) * (k_head_stride * K_STEP) + i % K_DIM
    tl.store(k_cache + slot * K_WIDTH + i, tl.load(source, mask=i < K_WIDTH), mask=i < K_WIDTH)
    i = tl.arange(0, V_PADDED)
    first = value + token * (v_token_stride * V_STEP)
    source = first + (i // V_DIM).to(tl.int64) * (v_head_stride * V_STEP) + i % V_DIM
    tl.store(v_cache + slot * V_WIDTH + i, tl.load(source, mask=i < V_WIDTH), mask=i < V_WIDTH)


def kv_store(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """As :func:`.reference.kv_store`; T programs, no synchronisation.

    ``key`` and ``value`` may be strided in tokens and heads, as the transposed views of a model
    are. What ends up in the null block, where many tokens write, is not determined.
    """
    num_tokens, num_heads, k_dim = key.shape
    v_dim = value.shape[2]
    if num_tokens == 0:
        return
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    k_width, v_width = num_heads * k_dim, num_heads * v_dim
    k_token_stride, k_head_stride, k_step = vector_strides(key)
    v_token_stride, v_head_stride, v_step = vector_strides(value)
    _store_kernel[(num_tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        k_token_stride,
        k_head_stride,
        v_token_stride,
        v_head_stride,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_WIDTH=k_width,
        V_WIDTH=v_width,
        K_PADDED=triton.next_power_of_2(k_width),
        V_PADDED=triton.next_power_of_2(v_width),
        K_STEP=k_step,
        V_STEP=v_step,
        PDL=has_dependent_launch(key.device),
        num_warps=4,
    )
