"""Batch-invariant matmuls on a CPU: the bits of a row depend only on that row.

Libraries choose the order of summation by the number of rows. Measured with torch 2.13 on an AVX2
machine, weights from 320 x 48 to 49,152 x 576 in float32, 1 to 64, 100 and 300 rows; every row and
element was compared. Emulation with fused multiply-adds identified the orders:

- MKL (``F.linear``, ``mm``, ``bmm``) has one class of bits for all row counts from 4 up: each sum
  is computed in chunks of 192 multiplications. 1 row, and 2 to 3 rows, differ. Threads share the
  rows, and if one thread gets few rows its sums differ, too: 5, 6, 7, 9, 10, 11 rows with two
  threads, up to 99 with more. Multiples of 4 never differed, with 1 to 32 threads. Threads may also
  share the outputs: with 17, 33 or 65 outputs and 512 or more inputs, 3 threads or more give other
  bits than 1. Multiples of 16 outputs never differed, with 1 to 8 threads.
- oneDNN has one class from 2 rows up (576 multiplications in plain order). 1 row differs, unless
  the weight was packed before (:func:`pack`): then all row counts are in that class.
- bfloat16 ``F.linear`` has one class.

So the rows of a matmul are padded with zeros to a multiple of 4 for MKL, and of 2 for oneDNN. The
size and dtype of a weight determine its library, never a timing: bits must not depend on noise. The
results of one machine are not assumed on another. :func:`choose_recipe` tests every recipe with the
exact shape and every number of threads that may be used, before it returns one. The fallbacks are
calls of one fixed shape, calls with one thread, and sums in an explicit order
(:mod:`...fixed_order`).

A packed weight is a second copy that later changes of the weight do not reach, so only constant
weights are packed. All layers of SmolLM2-135M (120 weights, none in the cache; 900 rows: five times
a fifth of them), one thread, ms. "free" is the fast choice of :mod:`.few_rows`, whose bits depend
on the row count:

=====  ======  =====  ======  =====
rows   packed  MKL    oneDNN  free
=====  ======  =====  ======  =====
1      28      57     57      30
2      30      57     56      40
4      38      55     65      42
8      48      64     69      70
16     70      82     89      90
64     193     196    211     215
900    2,310   2,040  2,200   2,040
=====  ======  =====  ======  =====

Elementwise functions may differ, too: PyTorch computes the last elements of a range one by one,
with other bits than in vectors. This affects silu, sigmoid, gelu and softplus, but not exp, log,
tanh, sin and cos (observed over 98 offsets and lengths each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import fixed_order, row_trial
from ...device import MKL_ROW_UNIT
from ...row_trial import MANY_ELEMENTS, make_cancel, no_recipe, num_draws, num_threads

Library = Literal["onednn", "mkl", "fixed_order"]

_ONEDNN_ROW_UNIT = 2
_TILE_ROWS = 16
_EVEN_OUTPUTS = 16

_FEW_ROW_COUNTS = (2, 3, 4, 5, 8, 12, 16, 17, 33)
_ROW_COUNTS = (*_FEW_ROW_COUNTS, 1, 6, 7, 9, 11, 13, 24, 31, 32, 48, 63, 64, 65, 100, 129)


class MatmulRecipe(NamedTuple):
    """How to multiply rows with one weight. A named tuple, because a graph can contain one.

    Attributes:
        library: the library that multiplies.
        row_unit: rows are padded with zeros to a multiple of this.
        tile: if above 0, every call has exactly this many rows.
        is_even: every call has a number of outputs that is a multiple of 16; the last outputs are
            padded.
        is_packed: the weight is the result of :func:`pack`.
        is_serial: one thread computes, whatever torch's number of threads.
    """

    library: Library
    row_unit: int
    tile: int = 0
    is_even: bool = False
    is_packed: bool = False
    is_serial: bool = False


FALLBACK = MatmulRecipe("mkl", _TILE_ROWS, _TILE_ROWS, is_even=True)
"""One shape for all calls: correct if a row's place in a tile does not matter."""
SERIAL = MatmulRecipe("mkl", MKL_ROW_UNIT, is_serial=True)
"""For libraries whose threads share the outputs, with other bits for each number of threads."""
SERIAL_FALLBACK = FALLBACK._replace(is_serial=True)
FIXED_ORDER = MatmulRecipe("fixed_order", 1)
"""An explicit order of summation."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: MatmulRecipe) -> Tensor:
    """``F.linear``, each row with the same bits whatever the number of rows and its place.

    Args:
        x: ``[..., in]``. weight: ``[out, in]``, packed if the recipe is. bias: ``[out]`` or
            None.
        recipe: from :func:`choose_recipe` for this weight.

    Returns:
        ``[..., out]``, contiguous.
    """
    # As in the trial: if columns are consecutive in memory, MKL's order of summation depends on
    # their address.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = _multiply(rows, weight, recipe)
    if bias is not None:
        out += bias
    # The size is given explicitly: for zero rows, which an expert may get, -1 would be ambiguous.
    return out.view(*x.shape[:-1], out.shape[1])


def _multiply(rows: Tensor, weight: Tensor, recipe: MatmulRecipe) -> Tensor:
    """``rows [M, in]`` times ``weight [out, in]``; returns a new ``[M, out]``, contiguous."""
    num_rows = rows.shape[0]
    num_even = weight.shape[0] - weight.shape[0] % _EVEN_OUTPUTS
    if recipe.is_even and num_even < weight.shape[0]:
        last = weight[num_even:]
        last = F.pad(last, (0, 0, 0, _EVEN_OUTPUTS - len(last)))
        parts = [_multiply(rows, last, recipe)[:, : weight.shape[0] - num_even]]
        if num_even:
            parts.insert(0, _multiply(rows, weight[:num_even], recipe))
        return torch.cat(parts, 1)
    if recipe.tile:
        tiles = [_filled(tile, recipe.tile) for tile in rows.split(recipe.tile)]
        return torch.cat([_call(recipe, tile, weight) for tile in tiles])[:num_rows]
    filled = _filled(rows, num_rows + -num_rows % recipe.row_unit)
    return _call(recipe, filled, weight)[:num_rows]


def _filled(rows: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - rows.shape[0]
    return F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def _call(recipe: MatmulRecipe, rows: Tensor, weight: Tensor) -> Tensor:
    if recipe.is_serial:
        with num_threads(1):
            return _call(recipe._replace(is_serial=False), rows, weight)
    if recipe.library == "onednn":
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
        return out
    if recipe.library == "fixed_order":
        return fixed_order.linear(rows, weight)
    return F.linear(rows, weight)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has its own layout for ``weight [out, in]``."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and weight.dtype == torch.float32 and weight.is_contiguous()


def pack(weight: Tensor) -> Tensor:
    """A copy of ``weight [out, in]``, float32, in the layout that oneDNN multiplies with. Otherwise
    oneDNN makes this copy in every call with 2 rows or more. No other operator can read the copy,
    and it does not follow later changes of the weight."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def choose_recipe(
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    *,
    is_contiguous: bool = True,
    may_pack: bool = False,
    threads: Sequence[int] = (),
) -> MatmulRecipe:
    """The first recipe for a weight of this shape that a trial finds row-invariant.

    Args:
        may_pack: whether the weight may be packed: it is constant, and there is memory for a copy.
        threads: numbers of threads that the recipe may be used with, largest first; empty: only the
            present number.

    Costs one matmul with a random weight of the shape for each row count tried: about 0.5 s for
    the largest, milliseconds for others.

    Raises:
        UnsupportedModelError: no recipe passes the trial.
    """
    draws = [
        _draw(num_outputs, num_inputs, dtype, is_contiguous, seed)
        for seed in range(num_draws(num_inputs, dtype))
    ]
    weight = draws[0][1]
    is_large = weight.numel() >= MANY_ELEMENTS
    candidates = [
        MatmulRecipe("mkl", MKL_ROW_UNIT),
        MatmulRecipe("mkl", MKL_ROW_UNIT, is_even=True),
    ]
    if dtype != torch.float32:
        candidates.insert(0, MatmulRecipe("mkl", 1))
    if can_pack(weight) and is_large:
        candidates.insert(0, MatmulRecipe("onednn", _ONEDNN_ROW_UNIT))
    if can_pack(weight) and may_pack:
        packed = [MatmulRecipe("onednn", n, is_packed=True) for n in (1, _ONEDNN_ROW_UNIT)]
        candidates = packed + candidates
    for recipe in (*candidates, FALLBACK, SERIAL, SERIAL_FALLBACK, FIXED_ORDER):
        if all(
            is_row_invariant(recipe, rows[: 48 if is_large else None], weight, threads)
            for rows, weight in draws
        ):
            return recipe
    raise no_recipe(f"a weight [{num_outputs}, {num_inputs}] in {dtype}")


def _draw(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, is_contiguous: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Random rows ``[M, in]`` and a random weight ``[out, in]``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weight = torch.randn(num_outputs, num_inputs).to(dtype)
        rows = torch.randn(max(_ROW_COUNTS), num_inputs).to(dtype)
        if dtype != torch.float32:
            make_cancel(rows, weight)
    return rows, weight if is_contiguous else weight.t().contiguous().t()


def is_row_invariant(
    recipe: MatmulRecipe, rows: Tensor, weight: Tensor, threads: Sequence[int] = ()
) -> bool:
    """Whether all of ``rows [M, in]``, multiplied with ``weight [out, in]`` (not packed) in groups
    of many sizes, keep their bits with every number of threads."""
    counts = _ROW_COUNTS if weight.numel() < MANY_ELEMENTS else (1, *_FEW_ROW_COUNTS)
    num_elements = weight.numel()
    if recipe.is_packed:
        weight = pack(weight)
    return row_trial.is_row_invariant(
        lambda some: _multiply(some, weight, recipe), rows, counts, num_elements, threads
    )


def grouped_mm(rows: Tensor, weight: Tensor, offs: Tensor, recipe: MatmulRecipe) -> Tensor:
    """Each expert's rows times its weight. A row has the same bits whatever experts the other rows
    have.

    Args:
        rows: ``[S, in]``, sorted by expert. weight: ``[E, in, out]``.
        offs: ``[E]``, end of each expert's rows. Rows after the last belong to no expert; their
            results are zeros.
    """
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = _multiply(rows[start:end], weight[expert].t(), recipe)
        start = end
    return out
