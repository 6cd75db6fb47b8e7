"""Sparse attention to chosen positions, of heads and of latents, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.arguments import AttentionParams, PagedKV
from tests.kernels.sparse.chosen import choice_of, choice_of_rows, float64_chosen
from tests.support.paged import (
    Batch,
    Rows,
    Shape,
    arguments,
    latent_batch,
    latent_shape,
    make_batch,
    rescheduled,
)

pytest.importorskip("triton")
from pagespec.kernels.mla import launch
from pagespec.kernels.sparse.chosen import chosen_attention
from tests.kernels.mla.test_kernels import SMALL, SPREADS, _ordered_dot  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("poisoned")

NUM_CHOSEN = 37
ROWS: dict[str, Rows] = {
    "mixed": [(30, 9), (70, 1), (0, 5), (0, 0), (17, 1)],
    "decode": [(10, 1), (100, 1), (0, 1)],
    "one row": [(50, 3)],
}
HEADS = [
    Shape(hq=4, hkv=4, dk=24, dv=16, has_sinks=True),
    Shape(hq=6, hkv=2, dk=16, dv=16, block_size=4, softcap=5.0),
    Shape(hq=2, hkv=2, dk=16, dv=16, dtype=torch.float16),
]
LATENTS = [latent_shape(4, 16, 8), latent_shape(20, 32, 8, dtype=torch.float16)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def attend(batch: tuple, shape: Shape, chosen: Tensor, **spread: Any) -> Tensor:
    """Attention to the latents, or to the heads."""
    if shape in LATENTS:
        tiling = replace(SMALL, **spread)
        return launch.attention(*arguments(batch, shape.dv), tiling=tiling, indices=chosen)
    query, *kv = batch[:7]
    scale, window, softcap, sinks = batch[7:11]
    params = AttentionParams(scale, window, softcap, sinks, indices=chosen)
    return chosen_attention(query, PagedKV(*kv), params)


def batch_of(rows: Rows, shape: Shape, **options: int) -> Batch:
    if shape in LATENTS:
        return latent_batch(rows, shape, **options)
    batch = make_batch(rows, shape, **options)
    ops.kv_store(*batch.store)
    return batch


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("shape", [*HEADS, *LATENTS], ids=str)
def test_sees_what_was_chosen_and_no_more(shape: Shape, rows: Rows) -> None:
    batch = batch_of(rows, shape)
    chosen = choice_of_rows(rows, NUM_CHOSEN)
    out = attend(batch.attend, shape, chosen)
    expected = float64_chosen(batch, rows, shape, chosen)
    error = (out[: batch.num_tokens].double() - expected).abs()
    assert error.max().item() <= TOLERANCE[shape.dtype]  # false for NaN
    assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("shape", [HEADS[0], *LATENTS], ids=str)
def test_schedules_give_the_same_bits(shape: Shape) -> None:
    length = 75
    batch = batch_of([(0, length)], shape, num_padding=0)
    chosen = choice_of(list(range(length)), NUM_CHOSEN)
    whole = attend(batch.attend, shape, chosen)

    def again(chunks: list[tuple[int, int]], **spread: Any) -> Tensor:
        tokens = torch.cat([torch.arange(a, b) for a, b in chunks])
        return attend(rescheduled(batch, chunks), shape, chosen[tokens], **spread)

    assert torch.equal(again(list(pairwise([0, 1, 8, 59, 60, length]))), whole)
    tokens = [74, 0, 36, 15, 37, 64]
    decodes = [(p, p + 1) for p in tokens]
    for spread in SPREADS.values() if shape in LATENTS else [{}]:
        assert torch.equal(again(decodes, **spread), whole[tokens])
        assert torch.equal(again(decodes[:1], **spread), whole[tokens[:1]])


@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_where_all_are_chosen_bits_are_those_of_attention_to_all(shape: Shape) -> None:
    """Of a context that fits; and of an engine in which every context does."""
    rows: Rows = [(30, 6), (20, 1), (0, 5)]
    batch = latent_batch(rows, shape)
    plain = launch.attention(*arguments(batch.attend, shape.dv), tiling=SMALL)
    for num_chosen in (NUM_CHOSEN, 1000):
        chosen = choice_of_rows(rows, num_chosen)
        assert torch.equal(attend(batch.attend, shape, chosen), plain)
