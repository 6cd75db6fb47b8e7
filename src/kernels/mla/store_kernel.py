"""The store of latent vectors as a Triton kernel: one program copies one token's to its slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device import has_dependent_launch


@triton.jit(
    # What follows the batch must not make new versions of the kernel.
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
    """As :func:`.dispatch.store_latent`, of ``latent [T, R]`` and ``rope [T, P]``; T programs, no
    synchronisation. What ends up in the null block, where many tokens write, is not determined."""
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
