"""``QuantizedWeight``: the forms in which quantised weights are stored, on every device.

A form defines how its parts are arranged and which values they represent. Checkpoint formats are
read into a form, and each kernel packs a form for itself. All parts have one row per output, so
weights can be merged and cut anywhere along their outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ... import e4m3

GROUP = 32
"""Inputs that share a scale and a minimum in 4 and 8 bits."""
BLOCK = 128
"""Outputs and inputs that share a scale in a block of FP8, and inputs in a column of ``scales``."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight(ABC):
    """A weight ``[N, K]``. Iteration yields its parts, whose first dimension is N.

    Attributes:
        format: name of the form, for the kernel registry and statistics.
        order: int64 ``[K]``, the input that each column multiplies, so that inputs of a group are
            adjacent; None if columns are in the order of the inputs.
    """

    format: ClassVar[str]
    values: Tensor
    scales: Tensor
    order: Tensor | None = field(default=None, kw_only=True)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts.values())

    @property
    def parts(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "order"}

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A weight with ``function(part)`` for each part, and the same order of inputs."""
        return replace(self, **{name: function(part) for name, part in self.parts.items()})

    def in_order(self) -> Self:
        """The weight for inputs that are already permuted by ``order``."""
        return replace(self, order=None)

    def equals(self, other: QuantizedWeight | None) -> bool:
        """Whether ``other`` has the same form and the same bits."""
        if other is None or type(self) is not type(other):
            return False
        return is_same_order(self.order, other.order) and all(map(torch.equal, self, other))

    def expanded(self) -> Tensor:
        """The values, float32 ``[N, K]``."""
        columns = self._columns()
        if self.order is None:
            return columns
        return torch.empty_like(columns).index_copy_(1, self.order, columns)

    @abstractmethod
    def _columns(self) -> Tensor:
        """The values, float32 ``[N, K]``, with inputs in ``order``."""


@dataclass(frozen=True, eq=False)
class Int4Weight(QuantizedWeight):
    """``value * scale + minimum``, in groups of 32 inputs.

    Attributes:
        values: uint8 ``[N, K / 32, 16]``; the low halves of the bytes are the first 16 values of a
            group.
        scales, minima: float32 ``[N, K / 32]``.
    """

    format = "int4"
    minima: Tensor

    def unpacked(self) -> Tensor:
        """The values, uint8 ``[N, K]``."""
        return unpack_int4(self.values).flatten(1)

    def _columns(self) -> Tensor:
        return expand_int4(*self)


@dataclass(frozen=True, eq=False)
class Int8Weight(QuantizedWeight):
    """``value * scale``, in groups of 32 inputs.

    Attributes:
        values: int8 ``[N, K]``. scales: float32 ``[N, K / 32]``.
    """

    format = "int8"

    def unpacked(self) -> Tensor:
        """The values plus 128, uint8 ``[N, K]``."""
        return self.values.view(torch.uint8) ^ 128

    def _columns(self) -> Tensor:
        groups = self.values.float().unflatten(1, (self.scales.shape[1], -1))
        return (groups * self.scales.unsqueeze(-1)).flatten(1)


@dataclass(frozen=True, eq=False)
class Fp8Weight(QuantizedWeight):
    """``value * scale``, with e4m3 values.

    Checkpoints have one scale per block of 128 x 128, one per output, or one in total. This form
    stores one scale per output and 128 inputs, or one per output. So rows can be merged and cut
    anywhere, at 3% more memory.

    Attributes:
        values: uint8 ``[N, K]``, the bits of e4m3 values.
        scales: float32 ``[N, ceil(K / 128)]``, or ``[N, 1]`` for all inputs.
    """

    format = "fp8"

    def _columns(self) -> Tensor:
        return expand_fp8(self.values, self.scales * e4m3.DECODED_UNIT)


def merged(weights: Sequence[QuantizedWeight | None]) -> QuantizedWeight | None:
    """The outputs of all weights, concatenated. All must have one form, the same number of scales
    per output and the same order of inputs; None unless all have one form."""
    held = [weight for weight in weights if type(weight) is type(weights[0])]
    first = held[0]
    if first is None or len(held) < len(weights):
        return None
    parts = [torch.cat(parts) for parts in zip(*(weight for weight in held if weight), strict=True)]
    return type(first)(*parts, order=first.order)


def unpack_int4(values: Tensor) -> Tensor:
    """uint8 ``[.., 32]`` from the two values in each byte of ``[.., 16]``."""
    return torch.cat((values & 15, values >> 4), -1)


def expand_int4(values: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """float32 ``[N, K]`` from the parts of an :class:`Int4Weight`."""
    weight = unpack_int4(values).float()
    return weight.mul_(scales.unsqueeze(-1)).add_(minima.unsqueeze(-1)).flatten(1)


def expand_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """float32 ``[N, K]`` from an :class:`Fp8Weight` whose scales were multiplied by 256."""
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
    """Quantise ``weight [N, K]`` in blocks of 128 x 128, each scaled so that its largest value
    becomes 448."""
    num_outputs, num_inputs = weight.shape
    shape = (-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
    missing = (0, shape[1] * BLOCK - num_inputs, 0, shape[0] * BLOCK - num_outputs)
    padded = torch.nn.functional.pad(weight.float(), missing)
    blocks = padded.view(shape[0], BLOCK, shape[1], BLOCK)
    scales = e4m3.scale_for(blocks.abs().amax((1, 3)))
    values = e4m3.encode(blocks / scales[:, None, :, None])
    values = values.view(padded.shape)[:num_outputs, :num_inputs].contiguous()
    return Fp8Weight(values, rows_of_blocks(scales, num_outputs))


def is_same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
