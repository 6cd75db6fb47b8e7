"""Copies of rows to experts and the sums back, under Triton's interpreter: eager torch's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

expert_rows = pytest.importorskip("pagespec.kernels.moe.expert_rows")

DTYPES = [
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float16, torch.float16, torch.float16),
    (torch.float32, torch.float32, torch.float32),
]
SHAPES = [(1, 8, 48), (1, 1, 300), (5, 3, 513), (70, 4, 40)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def permutation(num_rows: int) -> tuple[Tensor, Tensor]:
    """An order and its inverse."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows))
    return order, torch.argsort(order)


def combined(
    rows: Tensor, weights: Tensor, order: Tensor, top_k: int, dtype: torch.dtype
) -> Tensor:
    """As transformers, with the additions one after the other."""
    products = (rows * weights[order].unsqueeze(-1))[torch.argsort(order)]
    products = products.view(-1, top_k, rows.shape[1])
    total = torch.zeros_like(products[:, 0], dtype=torch.float32)
    for j in range(top_k):
        total = total + products[:, j]
    return total.to(products.dtype).to(dtype)


@pytest.mark.parametrize(("num_tokens", "top_k", "hidden_size"), SHAPES)
@pytest.mark.parametrize(("rows_dtype", "weights_dtype", "dtype"), DTYPES)
def test_sums_are_rounded_where_torch_rounds(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    rows_dtype: torch.dtype,
    weights_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    num_rows = num_tokens * top_k
    order, inverse = permutation(num_rows)
    rows = normal(num_rows, hidden_size, dtype=rows_dtype)
    weights = normal(num_rows, dtype=weights_dtype, seed=1).abs()
    found = expert_rows.combine_experts(rows, weights, inverse, top_k, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, combined(rows, weights, order, top_k, dtype))


@pytest.mark.parametrize(("num_tokens", "top_k", "hidden_size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_shared_expert_is_added_where_torch_adds_it(
    num_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype
) -> None:
    num_rows = num_tokens * top_k
    rows, weights = normal(num_rows, hidden_size, dtype=dtype), normal(num_rows, dtype=dtype)
    given = (rows, weights, permutation(num_rows)[1], top_k, dtype)
    alone = expert_rows.combine_experts(*given)
    # Rows in a wider tensor, and logits that are a column of one.
    shared = normal(num_tokens, hidden_size + 2, dtype=dtype, seed=2)[:, 1:-1]
    gate = (3 * normal(num_tokens, 5, dtype=dtype, seed=3))[:, 2:3]
    found = expert_rows.combine_experts(*given, shared)
    assert torch.equal(found, alone + shared)
    found = expert_rows.combine_experts(*given, shared, gate)
    assert torch.equal(found, alone + torch.sigmoid(gate) * shared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_of_any_size(dtype: torch.dtype) -> None:
    """A shared expert's row of ones, added to zeros, is the gate."""
    gate = torch.arange(-1 << 15, 1 << 15, 97).to(torch.int16).view(dtype).unsqueeze(1)
    gate[:3, 0] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    num_tokens = len(gate)
    shared, none = torch.ones(num_tokens, 16, dtype=dtype), torch.zeros(num_tokens, 16, dtype=dtype)
    found = expert_rows.combine_experts(
        none, none[:, 0], torch.arange(num_tokens), 1, dtype, shared, gate
    )
    expected = torch.sigmoid(gate).expand(-1, 16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("num_tokens", "top_k", "hidden_size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_expert_gets_its_tokens(
    num_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype
) -> None:
    order, inverse = permutation(num_tokens * top_k)
    tokens = normal(num_tokens, hidden_size + 8, dtype=dtype)[:, 3 : 3 + hidden_size]
    found = expert_rows.spread_rows(tokens, inverse, top_k)
    assert torch.equal(found, tokens[order // top_k])


def test_a_token_has_its_bits_in_any_company() -> None:
    """Another number of tokens has other tiles."""
    rows, weights = normal(70 * 4, 300, dtype=torch.bfloat16), normal(70 * 4, seed=1)
    whole = expert_rows.combine_experts(rows, weights, torch.arange(280), 4, torch.bfloat16)
    for token in (0, 33, 69):
        at = slice(token * 4, token * 4 + 4)
        alone = expert_rows.combine_experts(
            rows[at], weights[at], torch.arange(4), 4, torch.bfloat16
        )
        assert torch.equal(alone[0], whole[token])


def test_no_tokens() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert expert_rows.spread_rows(normal(0, 8), none, 2).shape == (0, 8)
    found = expert_rows.combine_experts(normal(0, 8), normal(0), none, 2, torch.bfloat16)
    assert found.shape == (0, 8)
