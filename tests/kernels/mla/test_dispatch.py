"""Latent attention (MLA) on a CPU: against float64, and bit against bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagespec.kernels import e4m3
from pagespec.kernels.arguments import AttentionParams
from pagespec.kernels.attention import cpu_invariant
from pagespec.kernels.mla import dispatch as mla
from pagespec.kernels.mla import head_matmul
from pagespec.kernels.mla.head_matmul import HeadMatmulRecipe
from tests.support.paged import (
    Rows,
    arguments,
    expected,
    float64_heads,
    latent_batch,
    latent_shape,
    rescheduled,
)

ROWS: Rows = [(30, 9), (70, 1), (0, 5), (0, 0), (17, 1)]
SHAPE = latent_shape(6, 40, 8)


def invariant(attend: tuple) -> torch.Tensor:
    query, kv, scale, rank = arguments(attend, SHAPE.dv)
    layout = cpu_invariant.build_layout(*kv)
    return cpu_invariant.attend(query, kv.cache, None, layout, AttentionParams(scale), rank)


def test_both_forms_match_float64() -> None:
    batch = latent_batch(ROWS, SHAPE)
    truth = expected(batch, ROWS, SHAPE)
    for out in (invariant(batch.attend), mla.attention(*arguments(batch.attend, SHAPE.dv))):
        assert out.shape == (batch.num_tokens + 3, 6, 40)
        torch.testing.assert_close(out[: batch.num_tokens].double(), truth, rtol=0, atol=1e-5)
        assert (out[batch.num_tokens :] == 0).all()


def test_schedules_give_the_same_bits() -> None:
    length = 150
    batch = latent_batch([(0, length)], SHAPE, num_padding=0)
    whole = invariant(batch.attend)
    chunks = [(0, 1), (1, 8), (8, 40), (40, 41), (41, length)]
    assert torch.equal(invariant(rescheduled(batch, chunks)), whole)
    decodes = [(p, p + 1) for p in range(0, length, 7)]
    assert torch.equal(invariant(rescheduled(batch, decodes)), whole[::7])


def test_rows_of_e4m3_hold_a_vector_and_one_scale() -> None:
    latent, rope = torch.randn(1, 1, 4, 24), torch.randn(1, 1, 4, 8)
    cache = torch.zeros(3, 16, 1, 32 + e4m3.SCALE_BYTES, dtype=torch.uint8)
    slots = torch.tensor([17, 3, 47, 18])
    mla.store_latent(latent, rope, cache, slots)
    vectors = torch.cat((latent, rope), -1)[0, 0]
    assert torch.equal(cache.view(48, -1)[slots], e4m3.encode_rows(vectors))


# The real shapes of DeepSeek-V2-Lite among them.
SIZES = [(4, 16, 24), (16, 128, 512), (16, 512, 128), (3, 200, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("num_heads", "num_inputs", "num_outputs"), SIZES)
def test_matmuls_of_heads(
    num_heads: int, num_inputs: int, num_outputs: int, is_transposed: bool, dtype: torch.dtype
) -> None:
    recipe = head_matmul.choose_recipe(num_heads, num_inputs, num_outputs, dtype, is_transposed)
    weight = torch.randn(num_heads, num_inputs, num_outputs).to(dtype)
    if is_transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    rows = torch.randn(num_heads, 130, num_inputs).to(dtype).transpose(0, 1)
    out = head_matmul.head_matmul(rows, weight, recipe)
    truth = float64_heads(rows, weight)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert ((out.double() - truth).abs().max() / truth.abs().max()).item() < bound
    for first, count in [(0, 1), (7, 2), (3, 3), (11, 4), (50, 17), (1, 64), (2, 99)]:
        some = slice(first, first + count)
        assert torch.equal(head_matmul.head_matmul(rows[some], weight, recipe), out[some])


@pytest.mark.parametrize("recipe", [None, HeadMatmulRecipe(4), HeadMatmulRecipe(16, is_tiled=True)])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
def test_every_way_multiplies(recipe: HeadMatmulRecipe | None, num_rows: int) -> None:
    query = torch.randn(num_rows, 3, 24 + 8)
    weight = torch.randn(3, 24 + 12, 48)
    latent = mla.latent_query(query, weight[:, :24], recipe)
    truth = float64_heads(query[..., :24], weight[:, :24])
    torch.testing.assert_close(latent[..., :48].double(), truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(latent[..., 48:], query[..., 24:])
    values = mla.head_values(latent[..., :48], weight[:, 24:].transpose(1, 2), recipe)
    assert values.shape == (num_rows, 3, 12)
    assert values.is_contiguous()  # as the graph has it noted


def test_a_way_that_follows_the_rows_is_not_chosen(torch_calls: dict[Any, Any]) -> None:
    def follows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, weight) + x.shape[1]

    torch_calls[torch.bmm] = follows
    recipe = head_matmul.choose_recipe(3, 24, 40, torch.float32, False)
    assert recipe.is_tiled


def test_a_layer_without_positions_has_latents_alone() -> None:
    cache, latent = torch.zeros(3, 4, 1, 5), torch.randn(1, 1, 2, 5)
    mla.store_latent(latent, latent[..., :0], cache, torch.tensor([1, 6]))
    assert torch.equal(cache.view(-1, 5)[[1, 6]], latent[0, 0])
