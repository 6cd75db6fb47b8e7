"""``Int4Layout``: reads 4-bit weights of AWQ, GPTQ and compressed-tensors into ``Int4Weight``.

All three store eight values in an int32, from its lowest bits up. They differ in the dimension, in
the order, and in the meaning of a zero point:

==================  =====================  ======================  ============================
layout              values                 zero points             weight
==================  =====================  ======================  ============================
AWQ                 ``[K, N / 8]``,        ``[G, N / 8]``, alike   ``(q - z) * scale``
                    outputs 0 2 4 6 1 3
                    5 7
GPTQ                ``[K / 8, N]``         ``[G, N / 8]``, in the  ``(q - z) * scale``
                                           first format shifted
compressed-tensors  ``[N, K / 8]``         ``[N / 8, G]`` or none  ``(q - z) * scale``; z is 8
==================  =====================  ======================  ============================

GPTQ's first format subtracts 0x11111111 from each int32 of zero points, modulo 2**32. A zero point
of 0 borrows from its neighbour, so the subtraction is undone before a word is unpacked.

N outputs, K inputs, G groups of inputs. Groups are split into groups of 32 inputs, which changes no
value: ``(q - 8) * scale + (8 - z) * scale`` is exact in float32 for scales of float16 and bfloat16.

GPTQ and compressed-tensors may give the group of each input (``g_idx``): inputs were quantised in
the order of their importance. Then columns, and the inputs of a matmul, are sorted by group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.matmul.quantized.quantized_weight import GROUP, Int4Weight
from .checkpoint import check_float, form_of

_PER_WORD = 8
_MIDDLE = 8
_ONES = 0x11111111  # 1 in each field of an int32


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """Where a checkpoint stores the elements of a layer.

    Attributes:
        values, zeros: names of tensors, and the dimension along which an int32 contains eight
            elements.
        scales, groups: names of tensors.
        is_input_first: whether values are ``[K, N]``, zero points and scales ``[G, N]``; else
            ``[N, K]`` and ``[N, G]``.
        places: the positions of elements 0, 1, 2, ... within an int32; empty if in this order.
        is_shifted: whether 1 was subtracted from zero points.
    """

    values: tuple[str, int]
    zeros: tuple[str, int]
    scales: str
    groups: str = "g_idx"
    is_input_first: bool = True
    places: tuple[int, ...] = ()
    is_shifted: bool = False

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Int4Weight:
        """The weight ``[N, K]`` of a layer's tensors.

        Raises:
            ValueError: a tensor does not have the layout.
        """
        num_outputs, num_inputs = shape
        values = self._unpacked(parts, *self.values, shape)
        scales, dim = parts[self.scales], 0 if self.is_input_first else 1
        num_groups = scales.shape[dim] if scales.dim() > dim else 0
        if num_groups < 1 or num_inputs % num_groups or num_inputs // num_groups % GROUP:
            groups = f"{num_groups} groups of {num_inputs} inputs"
            raise ValueError(f"{groups}; a group must be of a multiple of {GROUP}")
        by_group = num_outputs, num_groups
        check_float(self.scales, scales, self._as_stored(by_group))
        scales = (scales.t() if self.is_input_first else scales).float()
        zeros = torch.full_like(scales, _MIDDLE)
        if self.zeros[0] in parts:
            zeros = self._unpacked(parts, *self.zeros, by_group)
        order = self._order(parts, num_inputs, num_groups)
        if order is not None:
            values = values[:, order]
        halves = values.reshape(num_outputs, -1, 2, GROUP // 2)
        factors = [
            part.repeat_interleave(num_inputs // GROUP // num_groups, 1)
            for part in (scales, -zeros.float() * scales)
        ]
        return Int4Weight(halves[:, :, 0] | halves[:, :, 1] << 4, *factors, order=order)

    def _as_stored(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[::-1] if self.is_input_first else shape

    def _unpacked(
        self, parts: Mapping[str, Tensor], name: str, dim: int, shape: tuple[int, int]
    ) -> Tensor:
        """uint8 of this shape, whose first dimension is the outputs."""
        words, expected = parts[name], list(self._as_stored(shape))
        expected[dim] //= _PER_WORD
        if words.dtype != torch.int32 or list(words.shape) != expected:
            raise ValueError(f"{name} is {form_of(words)}, not int32 {tuple(expected)}")
        if self.is_shifted and name == self.zeros[0]:
            # A carry out of the highest field is dropped.
            words = ((words.long() + _ONES + 2**31) % 2**32 - 2**31).int()
        pairs = words.contiguous().view(torch.uint8).unflatten(-1, (-1, _PER_WORD // 2))
        elements = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
        if self.places:
            elements = elements[..., self.places]
        found = elements.movedim(-1, dim + 1).flatten(dim, dim + 1)
        return found.t() if self.is_input_first else found

    def _order(
        self, parts: Mapping[str, Tensor], num_inputs: int, num_groups: int
    ) -> Tensor | None:
        """The inputs sorted by group, int64. None if they are sorted, or if the layer does not give
        the group of each input, which -1 indicates."""
        groups = parts.get(self.groups)
        if groups is None or bool((groups == -1).all()):
            return None
        if groups.is_floating_point() or tuple(groups.shape) != (num_inputs,):
            raise ValueError(f"{self.groups} is {form_of(groups)}, not int32 {(num_inputs,)}")
        groups, size = groups.long(), num_inputs // num_groups
        expected = torch.arange(num_inputs, device=groups.device) // size
        if torch.equal(groups, expected):
            return None
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], expected):
            raise ValueError(f"g_idx must put {size} inputs into each of {num_groups} groups")
        return order


AWQ = Int4Layout(("qweight", 1), ("qzeros", 1), "scales", places=(0, 4, 1, 5, 2, 6, 3, 7))
GPTQ_V2 = Int4Layout(("qweight", 0), ("qzeros", 1), "scales")
GPTQ = Int4Layout(("qweight", 0), ("qzeros", 1), "scales", is_shifted=True)
PACKED = Int4Layout(
    ("weight_packed", 1),
    ("weight_zero_point", 0),
    "weight_scale",
    "weight_g_idx",
    is_input_first=False,
)
"""The layout of compressed-tensors."""
