"""What the trials of a CPU's matmuls share: groups of rows to compare, rows that show another
order of summation, and the error where nothing passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from .device import MKL_ROW_UNIT

MANY_ELEMENTS = 1 << 22
"""A weight of so many elements does not stay in the processor's cache, and oneDNN reads it best."""

# A weight of so many is multiplied in microseconds.
_FEW_ELEMENTS = 1 << 14
_MOST_PLACES = 3
_MOST_EXPONENT = 8


def no_recipe(operand: str) -> UnsupportedModelError:
    """The error where no recipe for ``operand`` passes its trial."""
    return UnsupportedModelError(
        f"no matmul of this CPU gives a row the same bits in every batch with {operand}; "
        "transparent=False does without"
    )


def groups_of(num_rows: int, counts: Sequence[int], num_elements: int) -> Iterator[slice]:
    """Groups of consecutive rows, of so many each, at different places.

    Args:
        num_elements: of the weight. With a small one few elements show a difference, and a call
            costs little: then each row is seen alone, and in each of the smallest groups.
    """
    for i, count in enumerate(counts):
        if count > num_rows:
            continue
        last = num_rows - count
        places = {(5 * i) % (last + 1)}
        if count <= MKL_ROW_UNIT and num_elements < MANY_ELEMENTS:
            step = count if num_elements <= _FEW_ELEMENTS else max(1, last // _MOST_PLACES)
            places |= set(range(0, last + 1, step))
        for first in sorted(places):
            yield slice(first, first + count)


def make_cancel(rows: Tensor, weight: Tensor) -> None:
    """Change random ``rows [.., K]`` and ``weight [.., K]`` of 16 bits so that all sums are nothing
    but the rounding of their float32 partial sums, well above the smallest float16. To round a sum
    to 16 bits would hide another order in all but one of some hundred."""
    for part in (rows, weight):
        # Without different exponents, sums of a few products of 16 bits would be exact.
        part *= 2.0 ** torch.randint(0, _MOST_EXPONENT, part.shape)
    num_inputs = rows.shape[-1]
    first, second, rest = torch.randperm(num_inputs).split(
        [num_inputs // 2, num_inputs // 2, num_inputs % 2]
    )
    rows[..., rest] = 0
    rows[..., second] = rows[..., first]
    weight[..., second] = -weight[..., first]
