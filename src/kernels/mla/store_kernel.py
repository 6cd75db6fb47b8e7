"""The store of latent vectors as Triton kernels: one program copies the vector of a token to its
slot, either unchanged or normalised and rotated."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import LatentInputs
from ..device import as_rows, has_dependent_launch, overlap_options
from ..fused.rms_norm import mean_square, num_warps
from ..fused.rounding import rounded, scaled


@triton.jit
def rotated_pairs(  # type: ignore[no-untyped-def]
    source, cos, sin, offsets, mask, cos_step, sin_step
):
    """``x c - y s`` of the first and ``x c + y s`` of the second element of a pair (x and its
    partner y), in float32, not rounded. Compile it without contraction, because torch rounds each
    multiplication.

    Args:
        source: pointers to the first elements of vectors. cos, sin: pointers to their tables, of
            half the length, with strides ``cos_step`` and ``sin_step``.
        offsets: which elements. ``mask`` has the shape of the result.
    """
    x = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + (offsets ^ 1), mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + offsets // 2 * cos_step, mask=mask, other=0.0)
    s = tl.load(sin + offsets // 2 * sin_step, mask=mask, other=0.0)
    return x * c + tl.where(offsets % 2 == 0, -y, y) * s


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_kernel(  # type: ignore[no-untyped-def]
    latent, rope, cache, slot_mapping, latent_stride, rope_stride,
    R: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``cache[slot_mapping[t]] = [latent[t], rope[t]]``. Grid: ``(T,)``.

    Shapes: latent ``[T, R]``, rope ``[T, P]``, cache ``[slots, R + P]``, slot_mapping ``[T]``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    target = cache + slot * (R + P)
    i = tl.arange(0, triton.next_power_of_2(R))
    tl.store(target + i, tl.load(latent + token * latent_stride + i, mask=i < R), mask=i < R)
    i = tl.arange(0, triton.next_power_of_2(P))
    tl.store(target + R + i, tl.load(rope + token * rope_stride + i, mask=i < P), mask=i < P)


def store_latent(latent: Tensor, rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Same as :func:`.dispatch.store_latent`, for ``latent [T, R]`` and ``rope [T, P]``; T
    programs, no synchronisation. The contents of the null block, where many tokens write, are
    undefined."""
    if len(latent) == 0:
        return
    latent, rope = (x if x.stride(1) == 1 else x.contiguous() for x in (latent, rope))
    _store_kernel[(len(latent),)](
        latent, rope, cache, slot_mapping, latent.stride(0), rope.stride(0),
        R=latent.shape[1],
        P=rope.shape[1],
        PDL=has_dependent_launch(cache.device),
        num_warps=4,
    )  # fmt: skip


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=["cos_stride", "cos_step", "sin_stride", "sin_step"],
    do_not_specialize_on_alignment=["cos", "sin", "slot_mapping"],
)
def _norm_rope_store_kernel(  # type: ignore[no-untyped-def]
    latent, rope, cos, sin, weight, cache, slot_mapping, eps, latent_stride, rope_stride,
    cos_stride, cos_step, sin_stride, sin_step,
    R: tl.constexpr, P: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``cache[slot_mapping[t]] = [norm(latent[t]), rotated(rope[t])]``. Grid: ``(T,)``.

    Shapes: latent ``[T, R]``, rope ``[T, P]``, cos and sin ``[T, P / 2]``, weight ``[R]``, cache
    ``[slots, R + P]``, slot_mapping ``[T]``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = cache.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    target = cache + tl.load(slot_mapping + token) * (R + P)
    i = tl.arange(0, triton.next_power_of_2(R))
    mask = i < R
    x = tl.load(latent + token * latent_stride + i, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    y = scaled(x * tl.rsqrt(mean_square(x, R) + eps), w, FORM, DTYPE)
    tl.store(target + i, y.to(DTYPE), mask=mask)
    i = tl.arange(0, triton.next_power_of_2(P))
    cos += token * cos_stride
    sin += token * sin_stride
    y = rotated_pairs(rope + token * rope_stride, cos, sin, i, i < P, cos_step, sin_step)
    tl.store(target + R + i, rounded(y, DTYPE).to(DTYPE), mask=i < P)


def norm_rope_store_latent(inputs: LatentInputs, cache: Tensor, slot_mapping: Tensor) -> None:
    """Same as :func:`.dispatch.norm_rope_store_latent`; T programs, no synchronisation. A latent
    has the bits of :func:`.rms_norm.rms_norm`. For the null block see :func:`store_latent`."""
    latent, rope = as_rows(inputs.latent), as_rows(inputs.rope)
    if len(latent) == 0:
        return
    cos, sin = inputs.cos, inputs.sin
    _norm_rope_store_kernel[(len(latent),)](
        latent, rope, cos, sin, inputs.weight, cache, slot_mapping, inputs.eps, latent.stride(0),
        rope.stride(0), cos.stride(1), cos.stride(2), sin.stride(1), sin.stride(2),
        R=latent.shape[1],
        P=rope.shape[1],
        FORM=inputs.form,
        num_warps=num_warps(triton.next_power_of_2(latent.shape[1])),
        enable_fp_fusion=False,
        **overlap_options(cache.device),
    )  # fmt: skip
