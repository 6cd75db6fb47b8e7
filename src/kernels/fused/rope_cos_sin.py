"""Cosines and sines of rotary embeddings as a Triton kernel, rounded where torch rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..device import overlap_options
from ..overlap import overlap
from .rounding import EMULATE, rounded


@triton.jit(do_not_specialize=["frequency_step", "position_step"])
def _rope_table_kernel(  # type: ignore[no-untyped-def]
    frequencies, positions, cos_table, sin_table, frequency_step, position_step, scaling,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``cos(position * frequency) * scaling``, repeated twice along the last dim; sin likewise.
    Grid: ``(T,)``.

    Shapes: frequencies ``[H]``, float32, positions ``[T]``, int64, tables ``[T, 2 H]``, contiguous.
    """
    overlap(PDL)
    DTYPE: tl.constexpr = cos_table.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < H
    position = tl.load(positions + token * position_step).to(tl.float32)
    angles = tl.load(frequencies + i * frequency_step, mask=mask, other=0.0) * position
    # Not the hardware's fast approximations. The interpreter has no math library.
    if EMULATE:
        cos, sin = tl.cos(angles), tl.sin(angles)
    else:
        cos, sin = libdevice.cos(angles), libdevice.sin(angles)
    cos = rounded(cos * scaling, DTYPE).to(DTYPE)
    sin = rounded(sin * scaling, DTYPE).to(DTYPE)
    at = token * (2 * H) + i
    tl.store(cos_table + at, cos, mask=mask)
    tl.store(cos_table + at + H, cos, mask=mask)
    tl.store(sin_table + at, sin, mask=mask)
    tl.store(sin_table + at + H, sin, mask=mask)


def rope_table(
    frequencies: Tensor, positions: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Same as :func:`.dispatch.rope_table`."""
    num_tokens, half = positions.shape[-1], frequencies.shape[1]
    cos, sin = (
        torch.empty(1, num_tokens, 2 * half, dtype=dtype, device=positions.device) for _ in "cs"
    )
    if num_tokens == 0:
        return cos, sin
    _rope_table_kernel[(num_tokens,)](
        frequencies, positions, cos, sin, frequencies.stride(1), positions.stride(2),
        float(scaling),
        H=half,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
        enable_fp_fusion=False,
        **overlap_options(positions.device),
    )  # fmt: skip
    return cos, sin
