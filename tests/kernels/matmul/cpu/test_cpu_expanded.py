"""CPU matmuls that expand quantised weights: exact, and a row's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagespec.kernels import e4m3
from pagespec.kernels.matmul.cpu import expanded as cpu_expanded
from pagespec.kernels.matmul.cpu.expanded import choose_expanded_recipe
from pagespec.kernels.matmul.quantized import quantized_weight
from pagespec.kernels.matmul.quantized.quantized_weight import (
    Fp8Weight,
    Int4Weight,
    QuantizedWeight,
    quantize_fp8,
)
from tests.support.quantized_files import fp8_blocks

# Several calls each, of outputs that no unit divides; inputs of no whole blocks; small ones.
SHAPES = [(1500, 576), (576, 1536), (300, 1000), (48, 96), (16, 32)]
Multiply = Callable[[Tensor], Tensor]


def weights(shape: tuple[int, int]) -> list[QuantizedWeight]:
    torch.manual_seed(0)
    fp8 = quantize_fp8(torch.randn(shape))
    found: list[QuantizedWeight] = [fp8, Fp8Weight(fp8.values, fp8.scales[:, :1].contiguous())]
    if shape[1] % 32 == 0:
        groups = shape[0], shape[1] // 32
        values = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        found.append(Int4Weight(values, torch.rand(groups) + 0.5, torch.randn(groups)))
    return found


def multiply(weight: QuantizedWeight, bias: Tensor | None, *, transparent: bool) -> Multiply:
    shape = weight.expanded().shape
    recipe = choose_expanded_recipe(*shape, transparent=transparent)
    if isinstance(weight, Fp8Weight):
        scales = weight.scales * e4m3.DECODED_UNIT
        return lambda x: cpu_expanded.linear_fp8(x, weight.values, scales, bias, *recipe)
    return lambda x: cpu_expanded.linear_int4(x, *weight, bias, *recipe)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_one_set_of_bits(shape: tuple[int, int]) -> None:
    for weight in weights(shape):
        call = multiply(weight, None, transparent=True)
        rows = torch.randn(300, shape[1])
        expected = call(rows)
        for count in (*range(1, 34, 3), 65, 100, 257):
            first = 7 * count % (300 - count)
            group = slice(first, first + count)
            assert torch.equal(call(rows[group]), expected[group]), count


@pytest.mark.parametrize("transparent", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact(shape: tuple[int, int], transparent: bool) -> None:
    for weight in weights(shape):
        bias, rows = torch.randn(shape[0]), torch.randn(2, 3, shape[1])
        plain = weight.expanded().double()
        exact = rows.double() @ plain.t() + bias
        found = multiply(weight, bias, transparent=transparent)(rows)
        assert found.shape == (2, 3, shape[0])
        assert (found - exact).abs().max() / exact.abs().max() < 2**-20
        assert multiply(weight, bias, transparent=transparent)(rows[:, :0]).shape[1] == 0


@pytest.mark.parametrize("shape", [(300, 1000), (128, 256), (48, 96)])
def test_blocks_are_those_of_the_format(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    weight[:20, :130] = 0
    made = quantize_fp8(weight)
    parts, plain = fp8_blocks(weight + (weight == 0) * 1e-30)
    assert torch.equal(made.values[20:], parts["weight"].view(torch.uint8)[20:])
    assert torch.equal(made.expanded(), plain * (weight != 0))


def test_merged() -> None:
    for one, two in zip(weights((48, 96)), weights((16, 96)), strict=True):
        both = quantized_weight.merged([one, two])
        assert both is not None
        parts = [weight.expanded() for weight in (one, two)]
        assert torch.equal(both.expanded(), torch.cat(parts))


def test_only_weights_of_one_form_are_merged() -> None:
    fp8, _, int4 = weights((48, 96))
    assert quantized_weight.merged([fp8, int4]) is None
    assert quantized_weight.merged([int4, None]) is None
    assert quantized_weight.merged([None, None]) is None


def test_equal_weights_have_one_form_one_order_and_the_same_bits() -> None:
    for weight, again in zip(weights((48, 96)), weights((48, 96)), strict=True):
        assert weight.equals(again)
        assert not weight.equals(None)
        assert not weight.equals(replace(again, order=torch.arange(96)))
        assert replace(weight, order=torch.arange(96)).equals(
            replace(again, order=torch.arange(96))
        )
        assert not weight.equals(replace(again, scales=again.scales * 2))
    fp8, _, int4 = weights((48, 96))
    assert not fp8.equals(int4)
