"""The float32 matmul of 16-bit rows and weight on a GPU.

It must add in one order for all numbers of rows and all tiles, be as close to float64 as a float32
matmul, and run in CUDA graphs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

SHAPES = [(64, 2048), (256, 7168), (160, 5120), (128, 2048), (32, 2880), (4, 48)]
COUNTS = (1, 2, 16, 17, 64, 256, 300, 8192)
DTYPES = [torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outs", "k_size"), SHAPES)
def test_bits_do_not_depend_on_the_number_of_rows(
    num_outs: int, k_size: int, dtype: torch.dtype
) -> None:
    from pagespec.kernels.matmul.wide_matmul import wide_linear

    x = normal(max(COUNTS), k_size, dtype=dtype)
    weight = normal(num_outs, k_size, dtype=dtype, seed=1)
    whole = wide_linear(x, weight)
    for count in COUNTS:
        for first in {0, min(512, max(COUNTS) - count), max(COUNTS) - count}:
            part = wide_linear(x[first : first + count], weight)
            assert same_bits(part, whole[first : first + count]), (count, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outs", "k_size"), SHAPES)
def test_all_tiles_have_the_same_bits(num_outs: int, k_size: int, dtype: torch.dtype) -> None:
    """Includes tiles that no number of rows of this weight selects. Tiles use either of the tensor
    core's instructions."""
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul import wide_matmul as kernel

    x = normal(300, k_size, dtype=dtype)
    weight = normal(num_outs, k_size, dtype=dtype, seed=1)
    tiles = kernel.TILES if Gpu.of(x.device).is_large else kernel._SMALL_TILES
    first, *others = (kernel.wide_matmul(x, weight, tile) for tile in tiles)
    assert [same_bits(first, other) for other in others] == [True] * len(others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outs", "k_size"), SHAPES)
def test_results_are_as_near_as_a_float32_matmul(
    num_outs: int, k_size: int, dtype: torch.dtype
) -> None:
    from pagespec.kernels.matmul.wide_matmul import wide_linear

    weight = normal(num_outs, k_size, dtype=dtype, seed=1)
    for count in COUNTS:
        x = normal(count, k_size, dtype=dtype, seed=count)
        # On the CPU: a cuBLAS matmul in float64 would allocate a workspace.
        few = x[: min(count, 512)]
        expected = few.cpu().double() @ weight.cpu().double().T
        error = (wide_linear(x, weight)[: len(few)].cpu() - expected).abs().max()
        assert error <= 2e-6 * expected.abs().max(), count


@pytest.mark.parametrize("num_rows", [1, 300])
def test_it_can_be_captured(num_rows: int) -> None:
    from pagespec.kernels.matmul.wide_matmul import wide_linear

    x = normal(1, num_rows, 2048, dtype=torch.bfloat16)
    weight = normal(64, 2048, dtype=torch.bfloat16, seed=1)
    expected = wide_linear(x * 2, weight)  # compiles it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What it reads is written by the kernel before, which it may start ahead of.
        found = wide_linear(x * 2, weight)
        shifted = found + 0.0
    for _ in range(3):
        shifted.zero_()
        graph.replay()
        assert same_bits(shifted, expected + 0.0)
    assert found.shape == (1, num_rows, 64)
