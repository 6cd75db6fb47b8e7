"""The FP8 product in Triton, under its interpreter, beside the formula in float64.

The interpreter multiplies with NumPy, whose order of summation within a group is its own.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagespec.kernels import e4m3
from pagespec.kernels.linear.fp8 import Fp8Weight, quantize_fp8
from tests.support.quantized_files import e4m3_table, nearest_e4m3

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)
SHAPES = [(33, 96), (32, 300)]
# block_m, block_n, swap_ab
TILES = [(16, 32, True), (32, 16, False), None]


def rows_of(count: int, width: int) -> Tensor:
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    return x * torch.logspace(-3, 2, count)[:, None]


def made(tile: tuple[int, int, bool] | None) -> Any:
    """None is the choice by the number of rows."""
    from pagespec.kernels.linear.matmul import Tile

    if tile is None:
        return None
    m, n, swap = tile
    return Tile(block_m=m, block_n=n, block_k=128, num_stages=2, num_warps=1, swap_ab=swap)


@pytest.mark.parametrize("width", [96, 300])
def test_rows_are_quantised_by_token_and_128_channels(width: int) -> None:
    from pagespec.kernels.linear.matmul_fp8 import quantize_rows

    x = rows_of(5, width)
    x[2, :128] = 0
    x[3, 0] = 1e-5
    values, scales = quantize_rows(x)
    for group in range(scales.shape[1]):
        at = slice(group * 128, (group + 1) * 128)
        part = x[:, at].numpy()
        expected = np.maximum(np.abs(part).max(1) / np.float32(448), np.float32(2.0**-126))
        assert np.array_equal(scales[:, group].numpy(), expected)
        bits = nearest_e4m3(part / expected[:, None])
        # Of zeros, only the number counts.
        assert np.array_equal(e4m3_table()[values[:, at].numpy()], e4m3_table()[bits])


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formula(shape: tuple[int, int], by_channel: bool) -> None:
    from pagespec.kernels.linear.matmul_fp8 import matmul_fp8, quantize_rows

    weight = quantize_fp8(torch.randn(shape))
    if by_channel:
        weight = Fp8Weight(weight.values, weight.scales[:, :1].contiguous())
    bias = torch.randn(shape[0])
    for count in (1, 17):
        x = rows_of(count, shape[1])
        rows = Fp8Weight(*quantize_rows(x)).expanded().double()
        exact = rows @ weight.expanded().double().t() + bias
        for tile in TILES:
            found = matmul_fp8(x, weight, bias, tile=made(tile))
            assert (found - exact).abs().max() / exact.abs().max() < 2**-20


def test_a_row_has_the_bits_of_any_batch_and_tile() -> None:
    """Numbers whose sums are exact in any order: each is counted once, with its own scale."""
    from pagespec.kernels.linear.matmul_fp8 import matmul_fp8

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-3, 4, (36, 260), generator=generator).float()
    x = torch.randint(-3, 4, (18, 260), generator=generator).float()
    # So that every group's largest is 448, and its scale 1.
    numbers[:, ::128] = 448
    x[:, ::128] = 448
    scales = torch.tensor([1.0, 0.5, 4.0]).repeat(36, 1)
    weight = Fp8Weight(e4m3.encode(numbers), scales)
    exact = x.double() @ weight.expanded().double().t()
    for tile in TILES:
        for first, count in ((0, 18), (3, 1), (5, 13)):
            found = matmul_fp8(x[first : first + count], weight, tile=made(tile))
            assert torch.equal(found.double(), exact[first : first + count])
