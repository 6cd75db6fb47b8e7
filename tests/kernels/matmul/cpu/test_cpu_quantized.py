"""CPU matmuls with 4-bit and float16 weights: their error, and a row's bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagespec.kernels.matmul.cpu import quantized as cpu_quantized
from pagespec.kernels.matmul.quantized.quantized_weight import Int4Weight, Int8Weight
from pagespec.kernels.native import calls as native
from pagespec.kernels.native.library import library

pytestmark = pytest.mark.skipif(
    cpu_quantized.reason_against() is not None, reason=str(cpu_quantized.reason_against())
)
Multiply = Callable[[Tensor], Tensor]
# The weights of SmolLM2-135M but for its head, a part of that, and small ones.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 576), (16, 32), (48, 96)]


def random_blocks(num_outputs: int, num_inputs: int) -> Int4Weight:
    torch.manual_seed(0)
    groups = num_outputs, num_inputs // 32
    values = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
    scales = torch.rand(groups) + 0.5
    return Int4Weight(values, scales, torch.randn(groups) - 8 * scales)


def dense(blocks: Int4Weight) -> Tensor:
    values = blocks.unpacked().float().unflatten(1, (-1, 32))
    return (values * blocks.scales[..., None] + blocks.minima[..., None]).flatten(1)


def calls(blocks: Int4Weight) -> dict[str, Multiply]:
    int4 = cpu_quantized.pack_int4(blocks)
    float16 = cpu_quantized.pack_float16(dense(blocks))
    return {
        "int4": lambda x: cpu_quantized.linear_int4(x, *int4, None),
        "float16": lambda x: cpu_quantized.linear_float16(x, float16, None),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_one_set_of_bits(shape: tuple[int, int]) -> None:
    """With AVX2, 1 or 2 of 31, 32, 121 and 242 rows would be another kernel's."""
    for multiply in calls(random_blocks(*shape)).values():
        rows = torch.randn(300, shape[1])
        expected = multiply(rows)
        for count in (*range(1, 65), 65, 100, 121, 242, 257):
            first = 7 * count % (300 - count)
            group = slice(first, first + count)
            assert torch.equal(multiply(rows[group]), expected[group]), count
        assert cpu_quantized.is_row_invariant(multiply, shape[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_error_against_the_dequantised_weight(shape: tuple[int, int]) -> None:
    blocks = random_blocks(*shape)
    rows = torch.randn(9, shape[1])
    exact = rows.double() @ dense(blocks).double().t()
    # int4: scales and zero points, rows and results are rounded to 8 bits. float16: weights to 11.
    bounds = {"int4": 2**-7.5, "float16": 2**-11}
    for name, multiply in calls(blocks).items():
        error = (multiply(rows).double() - exact).norm() / exact.norm()
        assert error < bounds[name], name


def test_bias_and_shape() -> None:
    blocks, bias = random_blocks(48, 64), torch.randn(48)
    rows = torch.randn(2, 3, 64)
    float16 = cpu_quantized.pack_float16(dense(blocks))
    for plain, biased in (
        (
            calls(blocks)["int4"](rows),
            cpu_quantized.linear_int4(rows, *cpu_quantized.pack_int4(blocks), bias),
        ),
        (calls(blocks)["float16"](rows), cpu_quantized.linear_float16(rows, float16, bias)),
    ):
        assert plain.shape == (2, 3, 48)
        assert torch.equal(plain + bias, biased)


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built")
@pytest.mark.parametrize("format", ["int4", "int4_float32", "int8"])
def test_native_formats_keep_the_numbers_of_a_file(format: str) -> None:
    """Rows of one element: the results are columns of the weight."""
    blocks: Int4Weight | Int8Weight = random_blocks(48, 64)
    if format == "int8":
        values = torch.randint(-128, 128, (48, 64), dtype=torch.int8)
        blocks = Int8Weight(values, blocks.scales.half().float())
        weight = (values.unflatten(1, (-1, 32)) * blocks.scales[..., None]).flatten(1)
    else:
        if format == "int4":
            blocks = replace(
                blocks, scales=blocks.scales.half().float(), minima=blocks.minima.half().float()
            )
        weight = dense(blocks)
    found = cpu_quantized.native_format(blocks)
    packed, numbers = cpu_quantized.pack_native(blocks, found)
    assert found == format
    columns = native.linear(127 * torch.eye(64), packed, numbers, None, 48, found, None)
    torch.testing.assert_close(columns.t(), 127 * weight, rtol=1e-6, atol=1e-4)


def test_a_difference_would_be_found() -> None:
    weight = torch.randn(40, 64)
    assert not cpu_quantized.is_row_invariant(lambda x: x @ weight.t() * (1 + len(x) % 2), 64)


def test_outputs_that_the_operation_does_not_take() -> None:
    assert not cpu_quantized.fits_int4(random_blocks(24, 32))
