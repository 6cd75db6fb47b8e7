"""A row keeps its bits if the library divides the rows among threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagespec.kernels.arguments import AttentionParams
from pagespec.kernels.attention import cpu_invariant as invariant_attention
from pagespec.kernels.matmul.cpu import invariant as invariant_linear


@pytest.fixture(params=[2, 8, 16])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_q_heads", [3, 9])
def test_attention_of_a_few_queries_is_that_of_all(num_threads: int, num_q_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(64, num_q_heads, 64)
    k_cache, v_cache = torch.randn(2, 5, 16, 3, 64)
    tables = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)

    def attend(begin: int, end: int) -> torch.Tensor:
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        contexts = torch.tensor([end], dtype=torch.int32)
        layout = invariant_attention.build_layout(
            k_cache, starts, contexts, tables, torch.tensor([0])
        )
        params = AttentionParams(0.125)
        return invariant_attention.attend(query[begin:end], k_cache, v_cache, layout, params)

    whole = attend(0, 64)
    for count in range(1, 40):
        begin = 64 - count
        assert torch.equal(attend(begin, 64), whole[begin:]), (count, num_threads)


@pytest.mark.parametrize("shape", [(96, 64), (320, 192)])
def test_a_product_of_a_few_rows_is_that_of_all(num_threads: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(shape), torch.randn(130, shape[1])
    product = invariant_linear.choose_recipe(*shape, torch.float32)
    whole = invariant_linear.linear(rows, weight, None, product)
    for count in range(1, 130):
        part = invariant_linear.linear(rows[:count], weight, None, product)
        assert torch.equal(part, whole[:count]), (count, num_threads)
