"""CPU matmuls that expand a quantised weight to float32, some outputs at a time.

The expanded values stay in the processor's cache, so memory holds only the quantised weight. Rows
and results are float32, and a weight has the values of its dequantisation. This is the reference
for every faster method, and serves the weights that have none. The same call computes an output for
any number of rows (:mod:`.invariant`), so a row has one set of bits.
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

# float32 elements: 1 MiB, the size of a core's own cache.
_EXPANDED_ELEMENTS = 1 << 18
_OUTPUT_UNIT = 16


class ExpandedRecipe(NamedTuple):
    """How to multiply with a weight that is expanded ``num_outputs`` outputs at a time.

    Attributes:
        whole, rest: recipes for that many outputs, and for the remaining ones. None selects the
            fastest method, whose bits depend on the number of rows.
    """

    num_outputs: int
    whole: MatmulRecipe | None
    rest: MatmulRecipe | None


def choose_expanded_recipe(
    num_outputs: int, num_inputs: int, *, transparent: bool, threads: Sequence[int] = ()
) -> ExpandedRecipe:
    """The recipe for a weight ``[N, K]``. Costs two calls of
    :func:`..matmul.cpu.invariant.choose_recipe`, with ``threads``."""
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
    """``F.linear`` with the parts of an :class:`.Fp8Weight`, whose scales are multiplied by 256.

    Args:
        x: ``[..., K]``, float32. bias: ``[N]`` or None.
        recipe: the fields of an :class:`ExpandedRecipe`: a graph has no nested tuples.

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
    """``F.linear`` with the parts of an :class:`.Int4Weight`; otherwise as :func:`linear_fp8`."""
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
