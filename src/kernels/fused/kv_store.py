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
    key, value, k_cache, v_cache, slot_mapping,
    k_token_stride,  # all in units of STEP elements
    k_head_stride,
    v_token_stride,
    v_head_stride,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, HKV: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``k_cache[slot_mapping[t]] = key[t]``, values alike. Grid: ``(T,)``.

    Shapes: key ``[T, HKV, K_DIM]``, value ``[T, HKV, V_DIM]``, caches ``[slots, WIDTH]``,
    slot_mapping ``[T]``.
    """
    K_WIDTH: tl.constexpr = HKV * K_DIM  # elements of one token in the cache
    V_WIDTH: tl.constexpr = HKV * V_DIM
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)

    i = tl.arange(0, triton.next_power_of_2(K_WIDTH))
    first = key + token * (k_token_stride * STEP)
    source = first + (i // K_DIM).to(tl.int64) * (k_head_stride * STEP) + i % K_DIM
    tl.store(k_cache + slot * K_WIDTH + i, tl.load(source, mask=i < K_WIDTH), mask=i < K_WIDTH)
    i = tl.arange(0, triton.next_power_of_2(V_WIDTH))
    first = value + token * (v_token_stride * STEP)
    source = first + (i // V_DIM).to(tl.int64) * (v_head_stride * STEP) + i % V_DIM
    tl.store(v_cache + slot * V_WIDTH + i, tl.load(source, mask=i < V_WIDTH), mask=i < V_WIDTH)


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
        PDL=has_dependent_launch(key.device),
        num_warps=4,
    )  # fmt: skip
