"""Products of a step's rows with a constant, other than ``F.linear``, on a CPU: batch-invariant.

``x @ weight``, ``weight @ x``, ``bmm``, ``einsum``, ``addmm``: all of them are, for each element of
a batch, rows by a matrix ``[N, K]``, and so go through :mod:`.invariant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .invariant import MatmulRecipe, linear


class ProductForm(NamedTuple):
    """Which dimensions a product runs over. A named tuple, which a graph can hold.

    Attributes:
        x_squeezed, weight_squeezed: dimensions of size 1 that are taken away first.
        x_order: what is left of ``x``: dimensions of the batch, its own, those that are summed.
        weight_order: the same of the constant.
        num_batch, num_summed: how many dimensions are of the batch, and are summed.
        out_order: dimensions of the result, of (batch, x's own, the constant's own).
    """

    x_squeezed: tuple[int, ...]
    weight_squeezed: tuple[int, ...]
    x_order: tuple[int, ...]
    weight_order: tuple[int, ...]
    num_batch: int
    num_summed: int
    out_order: tuple[int, ...]


def matrices_of(weight: Tensor, form: ProductForm) -> Tensor:
    """The constant as ``[B, N, K]``, a view of it where there is one."""
    weight = weight.squeeze(form.weight_squeezed).permute(form.weight_order)
    sizes = weight.shape
    num_own = len(sizes) - form.num_summed
    batch, own, summed = sizes[: form.num_batch], sizes[form.num_batch : num_own], sizes[num_own:]
    return weight.reshape(prod(batch), prod(own), prod(summed))


def own_sizes(weight: Tensor, form: ProductForm) -> tuple[int, ...]:
    """Sizes of the dimensions that the result has of the constant alone."""
    sizes = weight.squeeze(form.weight_squeezed).permute(form.weight_order).shape
    return tuple(sizes[form.num_batch : len(sizes) - form.num_summed])


def product(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    addend: Tensor | None,
    recipe: MatmulRecipe,
    form: ProductForm,
    sizes: tuple[int, ...],
) -> Tensor:
    """Each row of ``x`` has the same bits whatever the number of rows.

    Args:
        weight: the constant; of a packed recipe its matrices, each packed.
        addend: is added to the result, whose shape it can be expanded to.
        recipe: for the matrices of :func:`matrices_of`.
        sizes: of :func:`own_sizes`.

    Returns:
        A fresh tensor, contiguous.
    """
    x = x.squeeze(form.x_squeezed).permute(form.x_order)
    num_kept = x.dim() - form.num_summed
    kept, batch = x.shape[:num_kept], x.shape[: form.num_batch]
    # Sizes by name: of no rows, such as an expert may get, -1 could be anything.
    rows = x.reshape(prod(batch), prod(kept[form.num_batch :]), prod(x.shape[num_kept:]))
    matrices = weight if recipe.is_packed else matrices_of(weight, form)  # type: ignore[arg-type]
    parts = [
        linear(rows_of_one, matrix, None, recipe)
        for rows_of_one, matrix in zip(rows, matrices, strict=True)
    ]
    out = parts[0] if len(parts) == 1 else torch.stack(parts)
    out = out.view(*kept, *sizes).permute(form.out_order).contiguous()
    if addend is not None:
        out += addend
    return out
