"""Matmul of each head's rows with a matrix of the head's own, on a CPU: a row has the same bits
whatever the number of rows.

Batched matmuls are MKL's as in :mod:`..linear_cpu.invariant`, with rows of zeros up to a multiple
of 4. Which way serves a shape is tried out there and here alike: a machine on which the first way
follows the number of rows gets calls of one fixed shape.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import MKL_ROW_UNIT

_TILE_ROWS = 16
_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 17, 31, 33, 64, 65, 100)


class HeadMatmulRecipe(NamedTuple):
    """How to multiply. A named tuple, which a graph can hold.

    Attributes:
        row_unit: rows are filled up with zeros to a multiple of this.
        is_tiled: every call has exactly ``row_unit`` rows.
    """

    row_unit: int
    is_tiled: bool = False


def head_matmul(x: Tensor, weight: Tensor, recipe: HeadMatmulRecipe | None) -> Tensor:
    """``out[t, h] = x[t, h] @ weight[h]``.

    Args:
        x: ``[T, H, I]``, any strides. weight: ``[H, I, O]``, any strides, of the same dtype.
        recipe: of :func:`choose_recipe`; None for the library's own order of summation, which
            follows T.

    Returns:
        ``[T, H, O]``.
    """
    rows = x.transpose(0, 1)
    if recipe is None:
        return torch.bmm(rows, weight).transpose(0, 1)
    num_rows = x.shape[0]
    filled = F.pad(rows, (0, 0, 0, -num_rows % recipe.row_unit))
    if recipe.is_tiled:
        parts = [torch.bmm(part, weight) for part in filled.split(recipe.row_unit, 1)]
        out = torch.cat(parts, 1) if parts else filled.new_empty(len(rows), 0, weight.shape[2])
    else:
        out = torch.bmm(filled, weight)
    return out[:, :num_rows].transpose(0, 1)


@cache
def choose_recipe(
    num_heads: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, is_transposed: bool
) -> HeadMatmulRecipe:
    """The first way for ``weight [H, I, O]`` that a trial finds row-invariant.

    Args:
        is_transposed: whether the weight lies as ``[H, O, I]``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = (num_heads, num_inputs, num_outputs)
        if is_transposed:
            weight = torch.randn(num_heads, num_outputs, num_inputs).to(dtype).transpose(1, 2)
        else:
            weight = torch.randn(shape).to(dtype)
        rows = torch.randn(max(_ROW_COUNTS), num_heads, num_inputs).to(dtype)
    recipe = HeadMatmulRecipe(MKL_ROW_UNIT)
    return recipe if _is_row_invariant(recipe, rows, weight) else _FALLBACK


_FALLBACK = HeadMatmulRecipe(_TILE_ROWS, is_tiled=True)


def _is_row_invariant(recipe: HeadMatmulRecipe, rows: Tensor, weight: Tensor) -> bool:
    expected = head_matmul(rows, weight, recipe)
    for i, count in enumerate(_ROW_COUNTS):
        # Groups begin at different rows, so that a row is seen at several places of a group.
        first = (5 * i) % (len(rows) - count + 1)
        group = slice(first, first + count)
        if not torch.equal(head_matmul(rows[group], weight, recipe), expected[group]):
            return False
    return True
