"""``Fp8Weight``: a weight in e4m3 with float32 scales, of a checkpoint or made at load.

Checkpoints have a scale for each block of 128 x 128, for each output, or one for all. Held is a
scale for each output and 128 inputs, or for each output: rows can then be merged and cut anywhere,
at 3% more memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import e4m3

BLOCK = 128
"""Outputs and inputs that share a scale in a block, and inputs in a column of ``scales``."""


class Fp8Weight(NamedTuple):
    """A weight ``[N, K]`` of ``values * scale``.

    Attributes:
        values: uint8 ``[N, K]``, the bits of e4m3 numbers.
        scales: float32 ``[N, ceil(K / 128)]``, or ``[N, 1]`` for all inputs.
    """

    values: Tensor
    scales: Tensor

    def expanded(self) -> Tensor:
        """float32 ``[N, K]``."""
        return expand_fp8(self.values, self.scales * e4m3.DECODED_UNIT)


def expand_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """float32 ``[N, K]`` of an :class:`Fp8Weight` whose scales were multiplied by 256."""
    weight = e4m3.decode(values)
    if scales.shape[1] == 1:
        return weight.mul_(scales)
    num_whole = weight.shape[1] // BLOCK
    whole = weight[:, : num_whole * BLOCK].unflatten(1, (num_whole, BLOCK))
    whole.mul_(scales[:, :num_whole, None])
    weight[:, num_whole * BLOCK :].mul_(scales[:, num_whole:])
    return weight


def rows_of_blocks(scales: Tensor, num_outputs: int) -> Tensor:
    """``[N, ceil(K / 128)]``, from the scales ``[ceil(N / 128), ceil(K / 128)]`` of blocks."""
    return scales.float().repeat_interleave(BLOCK, 0)[:num_outputs].contiguous()


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """``weight [N, K]`` in blocks of 128 x 128, each scaled so that its largest becomes 448."""
    num_outputs, num_inputs = weight.shape
    shape = (-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
    missing = (0, shape[1] * BLOCK - num_inputs, 0, shape[0] * BLOCK - num_outputs)
    padded = torch.nn.functional.pad(weight.float(), missing)
    blocks = padded.view(shape[0], BLOCK, shape[1], BLOCK)
    scales = e4m3.scale_for(blocks.abs().amax((1, 3)))
    values = e4m3.encode(blocks / scales[:, None, :, None])
    values = values.view(padded.shape)[:num_outputs, :num_inputs].contiguous()
    return Fp8Weight(values, rows_of_blocks(scales, num_outputs))
