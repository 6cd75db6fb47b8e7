"""The FP8 matmul under Triton's interpreter, against the formula in float64.

The interpreter multiplies with NumPy, which has its own order of summation within a group.
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
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.matmul.quantized.quantized_weight import Fp8Weight, quantize_fp8
from tests.support.quantized_files import e4m3_table, nearest_e4m3

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)
SHAPES = [(33, 96), (32, 300), (160, 256)]
# block_m, block_n, swap_ab
TILES = [(16, 32, True), (32, 16, False), None]


def rows_of(count: int, width: int) -> Tensor:
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    return x * torch.logspace(-3, 2, count)[:, None]


def multiplied(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, tile: tuple[int, int, bool] | None
) -> Tensor:
    """None is the choice by the number of rows."""
    from pagespec.kernels.fused.quantize_rows import quantize_rows
    from pagespec.kernels.matmul.matmul import Tile
    from pagespec.kernels.matmul.quantized import dispatch_fp8
    from pagespec.kernels.matmul.quantized.matmul_fp8 import matmul

    values, scales = dispatch_fp8.pack(weight)
    if tile is None:
        return dispatch_fp8.linear(x, values, scales, bias)
    m, n, swap = tile
    made = Tile(block_m=m, block_n=n, block_k=128, num_stages=2, num_warps=1, swap_ab=swap)
    shared = 1 if len(scales) == len(values) else 128
    return matmul(quantize_rows(x), values, scales, bias, x.dtype, shared=shared, tile=made)


def expanded_rows(rows: Any) -> Tensor:
    return Fp8Weight(rows.values, rows.scales.t().contiguous()).expanded().double()


@pytest.mark.parametrize("width", [96, 300])
def test_rows_are_quantised_by_token_and_128_channels(width: int) -> None:
    from pagespec.kernels.fused.quantize_rows import quantize_rows

    x = rows_of(5, width)
    x[2, :128] = 0
    x[3, 0] = 1e-5
    values, scales = quantize_rows(x)
    for group in range(len(scales)):
        at = slice(group * 128, (group + 1) * 128)
        part = x[:, at].numpy()
        expected = np.maximum(np.abs(part).max(1) / np.float32(448), np.float32(2.0**-126))
        assert np.array_equal(scales[group].numpy(), expected)
        bits = nearest_e4m3(part / expected[:, None])
        # Of zeros, only the number counts.
        assert np.array_equal(e4m3_table()[values[:, at].numpy()], e4m3_table()[bits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [96, 300, 1024])
def test_what_makes_rows_quantises_what_it_would_have_stored(
    width: int, dtype: torch.dtype
) -> None:
    from pagespec.kernels.fused import activation, quantize_rows, rms_norm

    x, up = rows_of(4, width).to(dtype), rows_of(4, width).flip(0).to(dtype)
    weight = torch.randn(width).to(dtype)

    def check(found: Any, plain: Tensor) -> None:
        for part, expected in zip(found, quantize_rows.quantize_rows(plain), strict=True):
            assert torch.equal(part, expected)

    for kind in ("silu", "gelu_tanh"):
        check(quantize_rows.act_mul_quantize(x, up, kind), activation.act_mul(x, up, kind))
    wide = torch.cat((x, up), 1)
    found = quantize_rows.act_mul_quantize(wide[:, :width], wide[:, width:], "silu")
    check(found, activation.act_mul(x, up, "silu"))
    for form in ("rounded", "wide", "plus_one"):
        plain = rms_norm.rms_norm(x, weight, 1e-6, form)
        found, hidden = quantize_rows.rms_norm_quantize(x, None, weight, 1e-6, form)
        check(found, plain)
        assert hidden is x
        plain, total = rms_norm.add_rms_norm(x, up, weight, 1e-6, form)
        found, hidden = quantize_rows.rms_norm_quantize(x, up, weight, 1e-6, form)
        check(found, plain)
        assert torch.equal(hidden, total)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formula(shape: tuple[int, int], by_channel: bool) -> None:
    from pagespec.kernels.fused.quantize_rows import quantize_rows

    weight = quantize_fp8(torch.randn(shape))
    if by_channel:
        scales = weight.scales[:, :1] * torch.linspace(0.5, 2, shape[0])[:, None]
        weight = Fp8Weight(weight.values, scales)
    bias = torch.randn(shape[0])
    for count in (1, 17):
        x = rows_of(count, shape[1])
        rows = expanded_rows(quantize_rows(x))
        exact = rows @ weight.expanded().double().t() + bias
        for tile in TILES:
            found = multiplied(x, weight, bias, tile)
            assert (found - exact).abs().max() / exact.abs().max() < 2**-20


def test_calls_with_what_comes_before() -> None:
    """The results of both calls apart."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    weight = dispatch_fp8.pack(quantize_fp8(torch.randn(40, 256)))
    x, y, scale, bias = rows_of(3, 256), rows_of(3, 256).flip(0), torch.randn(256), torch.randn(40)
    x, y = x[None], y[None]
    normed = fused.rms_norm(x, scale, 1e-6, "wide")
    expected = dispatch_fp8.linear(normed, *weight, bias)
    found = dispatch_fp8.norm_linear(x, scale, 1e-6, "wide", *weight, bias)
    assert found.shape == (1, 3, 40)
    assert torch.allclose(found, expected, rtol=2e-2, atol=1e-2)
    normed, total = fused.add_rms_norm(x, y, scale, 1e-6, "wide")
    found, hidden = dispatch_fp8.add_norm_linear(x, y, scale, 1e-6, "wide", *weight, bias)
    assert torch.equal(hidden, total)
    assert torch.allclose(found, dispatch_fp8.linear(normed, *weight, bias), rtol=2e-2, atol=1e-2)


def test_an_mlp_in_one_call() -> None:
    """The results of its calls apart, with what comes before it or not."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    gate_up = dispatch_fp8.pack(quantize_fp8(torch.randn(2 * 96, 256)))
    down = (*dispatch_fp8.pack(quantize_fp8(torch.randn(40, 96))), torch.randn(40))
    x, y, scale = rows_of(3, 256)[None], rows_of(3, 256).flip(0)[None], torch.randn(256)

    def apart(gated: Tensor) -> Tensor:
        gate, up = gated.chunk(2, -1)
        return dispatch_fp8.act_linear(gate, up, "silu", *down)

    expected = apart(dispatch_fp8.linear(x, *gate_up))
    assert expected.shape == (1, 3, 40)
    assert torch.equal(dispatch_fp8.mlp(x, *gate_up, *down), expected)
    expected = apart(dispatch_fp8.norm_linear(x, scale, 1e-6, "wide", *gate_up, None))
    assert torch.equal(dispatch_fp8.norm_linear(x, scale, 1e-6, "wide", *gate_up, *down), expected)
    gated, total = dispatch_fp8.add_norm_linear(x, y, scale, 1e-6, "wide", *gate_up, None)
    found, hidden = dispatch_fp8.add_norm_linear(x, y, scale, 1e-6, "wide", *gate_up, *down)
    assert torch.equal(hidden, total)
    assert torch.equal(found, apart(gated))


def test_a_row_has_the_bits_of_any_batch_and_tile() -> None:
    """Numbers whose sums are exact in any order: each is counted once, with its own scale."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-3, 4, (36, 260), generator=generator).float()
    x = torch.randint(-3, 4, (18, 260), generator=generator).float()
    # So that every group's largest is 448, and its scale 1.
    numbers[:, ::128] = 448
    x[:, ::128] = 448
    for scales in (torch.tensor([1.0, 0.5, 4.0]).repeat(36, 1), 2.0 ** torch.arange(36)[:, None]):
        weight = Fp8Weight(e4m3.encode(numbers), scales.float())
        exact = x.double() @ weight.expanded().double().t()
        for tile in TILES:
            for first, count in ((0, 18), (3, 1), (5, 13)):
                found = multiplied(x[first : first + count], weight, None, tile)
                assert torch.equal(found.double(), exact[first : first + count])
