"""Matmul of each head's rows with that head's matrix, on a CPU. A row has the same bits whatever
the number of rows.

As in :mod:`..matmul.cpu.invariant`, batched matmuls use MKL, with rows padded with zeros to a
multiple of 4, and a trial determines which recipe serves a shape. With few outputs (7 values per
head, for example), the first recipes depend on the number of rows, or on the place of a row among
them. Then outputs are padded with zeros to a multiple of 16. The last recipe has an explicit order
of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import fixed_order, row_trial
from ..device import MKL_ROW_UNIT
from ..row_trial import make_cancel, no_recipe, num_draws

_TILE_ROWS = 16
_EVEN_OUTPUTS = 16
_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 17, 31, 33, 64, 65, 100)
_FEW_COUNTS = (1, 4, 5, 16, 33)


class HeadMatmulRecipe(NamedTuple):
    """How to multiply. A named tuple, because a graph can contain one.

    Attributes:
        row_unit: rows are padded with zeros to a multiple of this.
        is_tiled: every call has exactly ``row_unit`` rows.
        is_even: every call has a number of outputs that is a multiple of 16; the last outputs are
            padded.
        is_fixed_order: whether :mod:`..fixed_order` multiplies, whatever the other fields.
    """

    row_unit: int
    is_tiled: bool = False
    is_even: bool = False
    is_fixed_order: bool = False


_RECIPES = (
    HeadMatmulRecipe(MKL_ROW_UNIT),
    HeadMatmulRecipe(_TILE_ROWS, is_tiled=True),
    HeadMatmulRecipe(MKL_ROW_UNIT, is_even=True),
    HeadMatmulRecipe(_TILE_ROWS, is_tiled=True, is_even=True),
    HeadMatmulRecipe(1, is_fixed_order=True),
)


def head_matmul(x: Tensor, weight: Tensor, recipe: HeadMatmulRecipe | None) -> Tensor:
    """``out[t, h] = x[t, h] @ weight[h]``.

    Args:
        x: ``[T, H, I]``, any strides. weight: ``[H, I, O]``, any strides, of the same dtype.
        recipe: from :func:`choose_recipe`; None for the library's own order of summation, which
            depends on T.

    Returns:
        ``[T, H, O]``.
    """
    rows = x.transpose(0, 1)
    if recipe is None:
        return torch.bmm(rows, weight).transpose(0, 1)
    if recipe.is_fixed_order:
        return fixed_order.bmm(rows, weight).transpose(0, 1)
    num_rows, num_outputs = x.shape[0], weight.shape[2]
    if recipe.is_even:
        weight = F.pad(weight, (0, -num_outputs % _EVEN_OUTPUTS))
    filled = F.pad(rows, (0, 0, 0, -num_rows % recipe.row_unit))
    if recipe.is_tiled:
        parts = [torch.bmm(part, weight) for part in filled.split(recipe.row_unit, 1)]
        out = torch.cat(parts, 1) if parts else filled.new_empty(len(rows), 0, weight.shape[2])
    else:
        out = torch.bmm(filled, weight)
    return out[:, :num_rows, :num_outputs].transpose(0, 1)


def choose_recipe(
    num_heads: int,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    is_transposed: bool,
    threads: Sequence[int] = (),
) -> HeadMatmulRecipe:
    """The first recipe for ``weight [H, I, O]`` that a trial finds row-invariant.

    Args:
        is_transposed: whether the weight is stored as ``[H, O, I]``.
        threads: see :func:`..matmul.cpu.invariant.choose_recipe`.

    Raises:
        UnsupportedModelError: no recipe passes the trial.
    """
    size = num_heads, num_inputs, num_outputs
    draws = [
        _draw(size, dtype, is_transposed, seed) for seed in range(num_draws(num_inputs, dtype))
    ]
    for recipe in _RECIPES:
        if all(
            _is_row_invariant(recipe, rows, weight, counts, threads)
            for weight, layouts in draws
            for rows, counts in layouts
        ):
            return recipe
    raise no_recipe(f"weights [{num_heads}, {num_inputs}, {num_outputs}] of heads in {dtype}")


def _draw(
    size: tuple[int, int, int], dtype: torch.dtype, is_transposed: bool, seed: int
) -> tuple[Tensor, list[tuple[Tensor, Sequence[int]]]]:
    """A random weight ``[H, I, O]``, and random rows ``[M, H, I]`` in each layout with the numbers
    of rows to try."""
    num_heads, num_inputs, num_outputs = size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weight = torch.randn(num_heads, num_outputs, num_inputs).to(dtype)
        # With one element more than a row has, so that rows are slices, as queries are.
        rows = torch.randn(max(_ROW_COUNTS), num_heads, num_inputs + 1).to(dtype)
        if dtype != torch.float32:
            make_cancel(rows[..., :num_inputs], weight)
    weight = weight.transpose(1, 2)
    if not is_transposed:
        weight = weight.contiguous()
    part = rows[..., :num_inputs]
    by_head = part.transpose(0, 1).contiguous().transpose(0, 1)
    return weight, [
        (part, _ROW_COUNTS),
        (part.contiguous(), _FEW_COUNTS),
        (by_head, _FEW_COUNTS),
    ]


def _is_row_invariant(
    recipe: HeadMatmulRecipe,
    rows: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    threads: Sequence[int],
) -> bool:
    return row_trial.is_row_invariant(
        lambda some: head_matmul(some, weight, recipe), rows, counts, weight.numel(), threads
    )
