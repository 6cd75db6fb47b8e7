"""Cosines and sines of rotary embeddings, as Hugging Face's models compute them once a step.

On a GPU one Triton kernel; elsewhere the very operations it replaces.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(
    frequencies: Tensor, positions: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tables of a packed batch.

    Args:
        frequencies: float32 ``[1, H, 1]``. positions: int64 ``[1, 1, T]``.
        scaling: factor on cosines and sines, before they are rounded.
        dtype: of the results.

    Returns:
        cos, sin: ``[1, T, 2 H]``, contiguous; the angles twice, side by side.
    """
    if positions.device.type == "cuda":
        # Triton is only there on machines with a GPU.
        from .fused import rope_cos_sin

        return rope_cos_sin.rope_table(frequencies, positions, scaling, dtype)
    angles = (frequencies * positions.float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
