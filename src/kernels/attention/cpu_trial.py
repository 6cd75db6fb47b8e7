"""Choose the recipe with which :mod:`.cpu_invariant` computes the same bits for a position in any
step, by a trial with the sizes of the model's attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import AttentionParams
from ..row_trial import holds_with_all, no_recipe
from .cpu_invariant import AttentionRecipe, attend, build_layout

_RECIPES = (
    AttentionRecipe(),
    AttentionRecipe(16),
    AttentionRecipe(is_fixed_order=True),
)
_CONTEXT = 80  # positions of a row: one full tile and a partial one
_BLOCK = 16
_ROWS = 3
_LAST_COUNTS = (1, 2, 3, 4, 5, 7, 12, 33)
_POSITIONS = (0, 1, 2, 3, 31, 63, 64)
# (row, begin, end): positions of rows that share a step.
_MIXED: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 50, 51), (1, 70, 71)),
    ((1, 70, 71), (0, 50, 51), (2, 20, 21)),
    ((0, 3, 17), (1, 71, 72)),
    ((1, 7, 71), (2, 79, 80)),
)
_WHOLE: tuple[tuple[tuple[int, int, int], ...], ...] = tuple(
    ((row, 0, _CONTEXT),) for row in range(_ROWS)
)
_Part = tuple[int, int, int]


def choose_recipe(
    num_q_heads: int,
    num_kv_heads: int,
    k_dim: int,
    v_dim: int,
    is_latent: bool,
    threads: Sequence[int] = (),
) -> AttentionRecipe:
    """The first recipe that keeps the bits of every position in the trial.

    Args:
        is_latent: whether values are the first ``v_dim`` elements of the keys. All matmuls are in
            float32, whatever the dtype of the cache.
        threads: see :func:`..matmul.cpu.invariant.choose_recipe`.

    Raises:
        UnsupportedModelError: no recipe passes the trial.
    """
    num_blocks = _CONTEXT // _BLOCK
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        queries = torch.randn(_ROWS, _CONTEXT, num_q_heads, k_dim)
        keys = torch.randn(_ROWS * num_blocks, _BLOCK, num_kv_heads, k_dim)
        values = None if is_latent else torch.randn(_ROWS * num_blocks, _BLOCK, num_kv_heads, v_dim)
    tables = torch.arange(_ROWS * num_blocks, dtype=torch.int32).view(_ROWS, num_blocks)

    def run(recipe: AttentionRecipe, parts: Sequence[_Part]) -> list[Tensor]:
        """The results of each range, all in one step."""
        counts = [end - begin for _, begin, end in parts]
        starts = torch.tensor([0, *counts]).cumsum(0)
        contexts = torch.tensor([end for _, _, end in parts])
        rows = torch.tensor([row for row, _, _ in parts])
        layout = build_layout(keys, starts, contexts, tables, rows)
        query = torch.cat([queries[row, begin:end] for row, begin, end in parts])
        found = attend(query, keys, values, layout, AttentionParams(k_dim**-0.5), v_dim, recipe)
        return list(found.split(counts))

    def is_invariant(recipe: AttentionRecipe) -> bool:
        whole: list[Tensor] = []

        def is_equal(is_first: bool) -> bool:
            if is_first:
                whole.extend(run(recipe, step)[0] for step in _WHOLE)
            return all(
                torch.equal(found, whole[row][begin:end])
                for parts in _steps(is_first)
                for (row, begin, end), found in zip(parts, run(recipe, parts), strict=True)
            )

        return holds_with_all(threads, is_equal)

    for recipe in _RECIPES:
        if is_invariant(recipe):
            return recipe
    sizes = f"{num_q_heads} queries, {num_kv_heads} keys of {k_dim} and values of {v_dim}"
    raise no_recipe(f"attention heads of {sizes} elements")


def _steps(is_first: bool) -> list[tuple[_Part, ...]]:
    """Steps to compare with whole rows. The first number of threads gets all of them; each other
    number gets a few, and whole rows."""
    last: list[tuple[_Part, ...]] = [((0, _CONTEXT - n, _CONTEXT),) for n in _LAST_COUNTS]
    if not is_first:
        return [*_WHOLE, *last[::3], *_MIXED]
    single: list[tuple[_Part, ...]] = [((0, at, at + 1),) for at in _POSITIONS]
    return [*last, *single, *_MIXED]
