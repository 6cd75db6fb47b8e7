"""Batch-invariant CPU matmuls of a step's rows with a constant, other than ``F.linear``.

``x @ weight``, ``weight @ x``, ``bmm``, ``einsum`` and ``addmm`` are, for each element of a batch,
matmuls of rows with a matrix ``[N, K]``. So :mod:`.invariant` computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .invariant import MatmulRecipe, linear


class ProductForm(NamedTuple):
    """The dimensions of such a matmul. A named tuple, because a graph can contain one.

    Attributes:
        x_squeezed, weight_squeezed: dimensions of size 1 that are removed first.
        x_order: the remaining dimensions of ``x``: those of the batch, its own, those that are
            summed.
        weight_order: the same for the constant.
        num_batch, num_summed: number of batch dimensions, and of summed dimensions.
        out_order: dimensions of the result, in terms of (batch, x's own, the constant's own).
    """

    x_squeezed: tuple[int, ...]
    weight_squeezed: tuple[int, ...]
    x_order: tuple[int, ...]
    weight_order: tuple[int, ...]
    num_batch: int
    num_summed: int
    out_order: tuple[int, ...]


def matrices_of(weight: Tensor, form: ProductForm) -> Tensor:
    """The constant as ``[B, N, K]``, a view if possible."""
    weight = weight.squeeze(form.weight_squeezed).permute(form.weight_order)
    sizes = weight.shape
    num_own = len(sizes) - form.num_summed
    batch, own, summed = sizes[: form.num_batch], sizes[form.num_batch : num_own], sizes[num_own:]
    return weight.reshape(prod(batch), prod(own), prod(summed))


def own_sizes(weight: Tensor, form: ProductForm) -> tuple[int, ...]:
    """Sizes of the result's dimensions that come from the constant alone."""
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
    """Compute the matmul. Each row of ``x`` has the same bits whatever the number of rows.

    Args:
        weight: the constant; for a packed recipe its matrices, each packed.
        addend: added to the result; it can be expanded to the result's shape.
        recipe: for the matrices of :func:`matrices_of`.
        sizes: from :func:`own_sizes`.

    Returns:
        A new tensor, contiguous.
    """
    x = x.squeeze(form.x_squeezed).permute(form.x_order)
    num_kept = x.dim() - form.num_summed
    kept, batch = x.shape[:num_kept], x.shape[: form.num_batch]
    # The sizes are given explicitly: for zero rows, which an expert may get, -1 would be ambiguous.
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
