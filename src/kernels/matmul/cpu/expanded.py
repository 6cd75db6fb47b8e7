"""Matmuls of a CPU that expand a quantised weight to float32, some outputs at a time.

What is expanded stays in the processor's cache, so that memory holds the quantised weight alone.
Rows and results are float32, and a weight's values are those of its dequantisation: this is the
reference for every quicker way, and serves the weights that have none. Each output is computed by
the same call for any number of rows (:mod:`.invariant`), so that a row has one set of
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantized.quantized_weight import expand_fp8, expand_int4
from . import invariant
from .few_rows import linear_few_rows
from .invariant import MatmulRecipe

# Of float32: 1 MiB, what a core's own cache has.
_EXPANDED_ELEMENTS = 1 << 18
_OUTPUT_UNIT = 16


class ExpandedRecipe(NamedTuple):
    """How to multiply with a weight that is expanded ``num_outputs`` outputs at a time.

    Attributes:
        whole, rest: of so many outputs, and of those left over; None for the quickest way, whose
            bits follow the number of rows.
    """

    num_outputs: int
    whole: MatmulRecipe | None
    rest: MatmulRecipe | None


def choose_expanded_recipe(
    num_outputs: int, num_inputs: int, *, transparent: bool, threads: Sequence[int] = ()
) -> ExpandedRecipe:
    """For a weight ``[N, K]``. Costs :func:`..matmul.cpu.invariant.choose_recipe` twice, which
    gets ``threads``."""
    fitting = _EXPANDED_ELEMENTS // num_inputs // _OUTPUT_UNIT * _OUTPUT_UNIT
    count = min(num_outputs, max(_OUTPUT_UNIT, fitting))
    if not transparent:
        return ExpandedRecipe(count, None, None)
    whole = invariant.choose_recipe(count, num_inputs, torch.float32, threads=threads)
    rest = whole
    if num_outputs % count:
        left = num_outputs % count
        rest = invariant.choose_recipe(left, num_inputs, torch.float32, threads=threads)
    return ExpandedRecipe(count, whole, rest)


def linear_fp8(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, *recipe: Any
) -> Tensor:
    """``F.linear`` with the parts of an :class:`.Fp8Weight`, scales multiplied by 256.

    Args:
        x: ``[..., K]``, float32. bias: ``[N]`` or None.
        recipe: the fields of an :class:`ExpandedRecipe`, which a graph does not hold nested.

    Returns:
        ``[..., N]``, float32.
    """
    return _linear(x, (values, scales), expand_fp8, bias, ExpandedRecipe(*recipe))


def linear_int4(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    minima: Tensor,
    bias: Tensor | None,
    *recipe: Any,
) -> Tensor:
    """``F.linear`` with the parts of an :class:`.Int4Weight`; else as
    :func:`linear_fp8`."""
    return _linear(x, (values, scales, minima), expand_int4, bias, ExpandedRecipe(*recipe))


def _linear(
    x: Tensor,
    parts: tuple[Tensor, ...],
    expand: Callable[..., Tensor],
    bias: Tensor | None,
    recipe: ExpandedRecipe,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    num_outputs = len(parts[0])
    out = rows.new_empty(len(rows), num_outputs)
    for begin in range(0, num_outputs, recipe.num_outputs):
        end = min(begin + recipe.num_outputs, num_outputs)
        weight = expand(*(part[begin:end] for part in parts))
        own = recipe.whole if end - begin == recipe.num_outputs else recipe.rest
        if own is None:
            out[:, begin:end] = linear_few_rows(rows, weight, None)
        else:
            out[:, begin:end] = invariant.linear(rows, weight, None, own)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], num_outputs)
