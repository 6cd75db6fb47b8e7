"""Matmuls with 4-bit and 8-bit weights under Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagespec.kernels.matmul.quantized.quantized_weight import (
    GROUP,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)
from tests.support.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)
KINDS = ("symmetric", "zeros", "minima", "int8")
# N, K, inputs in a group.
SHAPES = [(40, 288, 32), (32, 256, 64), (48, 640, 128), (16, 384, 384)]


def made(kind: str, num_outs: int, num_inputs: int, group: int) -> QuantizedWeight:
    """Of numbers that float16 has, but for the minima."""
    generator = torch.Generator().manual_seed(num_outs)

    def by_group(part: Tensor) -> Tensor:
        return part.repeat_interleave(group // GROUP, 1)

    shape = num_outs, num_inputs // group
    scales = by_group((torch.rand(shape, generator=generator) + 0.5).half().float() / 16)
    if kind == "int8":
        values = torch.randint(-128, 128, (num_outs, num_inputs), generator=generator)
        return Int8Weight(values.to(torch.int8), scales)
    nibbles = torch.randint(0, 256, (num_outs, num_inputs // 32, 16), generator=generator)
    if kind == "minima":
        minima = by_group(torch.randn(shape, generator=generator) / 7)
    elif kind == "zeros":
        minima = -by_group(torch.randint(0, 17, shape, generator=generator).float()) * scales
    else:
        minima = -8 * scales
    return Int4Weight(nibbles.to(torch.uint8), scales, minima)


def halved(whole: Tensor) -> Tensor:
    """silu(gate) * up, in float64."""
    gate, up = whole.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantised_is_the_weight_rounded_once(kind: str, shape: tuple[int, int, int]) -> None:
    from pagespec.kernels.matmul.quantized.int4_packing import pack
    from pagespec.kernels.matmul.quantized.matmul_int4 import dequantize

    weight = made(kind, *shape)
    packed = pack(weight)
    assert packed.group == min(shape[2], 128)
    assert packed.num_bits == (8 if kind == "int8" else 4)
    assert packed.has_minima == (kind == "minima")
    assert packed.dtype == ("float32" if kind == "minima" else "float16")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(packed, shape[1], dtype), weight.expanded().to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_gate", [False, True])
def test_equals_the_formula(kind: str, shape: tuple[int, int, int], has_gate: bool) -> None:
    from pagespec.kernels.matmul.quantized.dispatch_int4 import linear, linear_silu_mul
    from pagespec.kernels.matmul.quantized.int4_packing import pack

    weight = made(kind, *shape)
    packed = pack(weight)
    whole = weight.expanded().bfloat16().double()
    bias = torch.randn(shape[0]).bfloat16()
    call = linear_silu_mul if has_gate else linear
    for count in (1, 17):
        x = torch.randn(1, count, shape[1]).bfloat16()
        exact = x.double() @ whole.t() + bias.double()
        exact = halved(exact) if has_gate else exact
        # Unpacked in the matmul, and before it.
        for max_fused_rows in (64, 0):
            found = call(x, *packed[:2], bias, *packed[2:], max_fused_rows)
            assert found.shape == exact.shape
            # The interpreter cuts off where bfloat16 is rounded, with a gate four times.
            assert (found - exact).abs().max() < 2**-5 * exact.abs().max()


@pytest.mark.parametrize("kind", ["zeros", "int8"])
def test_a_row_has_the_bits_of_any_batch_and_tile(kind: str) -> None:
    """The sums are exact in any order, since the interpreter's order is undefined. Each term is
    added once, in every tile."""
    from pagespec.kernels.matmul.matmul import Tile
    from pagespec.kernels.matmul.quantized.dispatch_int4 import linear
    from pagespec.kernels.matmul.quantized.int4_packing import pack
    from pagespec.kernels.matmul.quantized.matmul_int4 import matmul

    weight = made(kind, 40, 288, 32)
    weight = replace(weight, scales=torch.ones_like(weight.scales))
    if isinstance(weight, Int4Weight):
        weight = replace(weight, minima=torch.full_like(weight.minima, -5.0))
    packed = pack(weight)
    x = torch.randint(-3, 4, (512, 288)).half()
    exact = (x.double() @ weight.expanded().double().t()).half()
    for count in (1, 2, 16, 17, 64, 65, 512):
        found = linear(x[:count], *packed[:2], None, *packed[2:])
        assert torch.equal(found, exact[:count])
    for m, n, k in ((16, 16, 128), (32, 32, 256), (64, 16, 512)):
        tile = Tile(block_m=m, block_n=n, block_k=k, num_stages=2, num_warps=1)
        assert torch.equal(matmul(x[3:40], packed, tile=tile), exact[3:40])


def test_padded_groups_and_numbers_that_no_half_has() -> None:
    from pagespec.kernels.matmul.quantized.int4_packing import pack

    weight = made("zeros", 16, 96, 32)
    packed = pack(weight)
    assert packed.words.shape == (16, 16)
    assert packed.numbers.shape == (4, 16)
    unusual = pack(replace(weight, scales=weight.scales * 1.0001))
    assert (unusual.dtype, unusual.numbers.shape) == ("float32", (2, 4, 16))
    wide = weight.scales.bfloat16().float() * 2.0**20
    assert pack(replace(weight, scales=wide, minima=-3 * wide)).dtype == "bfloat16"


def test_weights_stay_in_registers_on_hopper() -> None:
    """Of few rows: what goes to and from shared memory is rows, and a few numbers of groups."""
    cases = [[1, 4096, 4096, 128, 4, False], [16, 12288, 4096, 128, 4, True]]
    cases += [[1, 576, 576, 32, 8, False], [64, 12288, 4096, 128, 4, True]]
    script = Path(__file__).with_name("compile_matmul_int4.py")
    *few, many = json.loads(run_apart(str(script), json.dumps(cases)))
    for found, num_mma, num_pairs in zip(few, (32, 64, 32), (64, 128, 0), strict=True):
        assert found["mma"] == num_mma
        assert found["row loads"] == 32
        assert found["stores"] == 2
        assert found["pairs"] == num_pairs
    assert many["wgmma"] > 0
    for found in (*few, many):
        assert found["spilled"] == 0
        assert found["shared"] < 200 << 10
