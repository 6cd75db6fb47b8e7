"""The KV store as a Triton kernel: one program copies one token's key and value to its slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device import has_dependent_launch, vector_strides
from .e4m3_store import is_e4m3
from .norm_rope_store import copy_heads, heads_of_tile


@triton.jit(
    # A value that depends on the batch must not recompile the kernel. The strides of tensors whose
    # outer dimension is the head grow with the batch, and metadata may be anywhere in a staging
    # buffer.
    do_not_specialize=[
        "num_tokens",
        "k_token_stride",
        "k_head_stride",
        "v_token_stride",
        "v_head_stride",
    ],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_kernel(  # type: ignore[no-untyped-def]
    key, value, k_cache, v_cache, slot_mapping, num_tokens,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,  # in units of STEP elements
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, HKV: tl.constexpr, STEP: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``k_cache[slot_mapping[t]] = key[t]``, likewise for values. Grid: ``(T,)``.

    Shapes: key ``[T, HKV, K_DIM]``, value ``[T, HKV, V_DIM]``, caches ``[slots, WIDTH]`` or planes
    of :mod:`..e4m3` in blocks of PAGE slots, slot_mapping ``[T]``.
    """
    # Slots per block of planes; else 0, and a token's heads are contiguous.
    PLANES: tl.constexpr = PAGE if is_e4m3(k_cache.dtype.element_ty) else 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64)
    HEADS: tl.constexpr = triton.next_power_of_2(HKV)
    heads = heads_of_tile(0, first, num_tokens, slot_mapping, HKV, HEADS, 1)
    copy_heads(key, k_cache, k_token_stride * STEP, k_head_stride * STEP, heads, HKV, K_DIM, PLANES)
    copy_heads(
        value, v_cache, v_token_stride * STEP, v_head_stride * STEP, heads, HKV, V_DIM, PLANES
    )


def kv_store(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Same as :func:`.dispatch.kv_store`; T programs, no synchronisation.

    ``key`` and ``value`` may be strided in tokens and heads, as the transposed views of a model
    are. The contents of the null block, where many tokens write, are undefined.
    """
    num_tokens, num_heads, _ = key.shape
    if num_tokens == 0:
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    *strides, step = vector_strides(key, value)
    _store_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slot_mapping, num_tokens, *strides,
        K_DIM=key.shape[2],
        V_DIM=value.shape[2],
        HKV=num_heads,
        STEP=step,
        PAGE=k_cache.shape[1],
        PDL=has_dependent_launch(key.device),
        num_warps=4,
    )  # fmt: skip
