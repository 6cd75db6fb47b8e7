"""Matmuls with 4-bit and 8-bit weights on a GPU: the bits of a matmul with dequantised weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagespec.kernels.matmul.cublas import without_split_k
from pagespec.kernels.matmul.quantized.quantized_weight import (
    GROUP,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)

pytestmark = pytest.mark.gpu

# Kind; N, K, inputs in a group. There are outputs that are no whole tiles, and inputs that are no
# whole chunks.
WEIGHTS = [
    ("symmetric", (512, 1024, 128)),
    ("zeros", (256, 768, 64)),
    ("zeros", (200, 4096, 128)),
    ("minima", (96, 576, 32)),
    ("int8", (200, 2048, 32)),
    ("symmetric", (96, 64, 32)),
    ("int8", (128, 96, 32)),
]
COUNTS = (1, 16, 17, 64, 65)
# block_m, block_n, block_k, num_stages, num_warps
TILES = [(16, 32, 512, 4, 4), (64, 128, 128, 4, 8)]


def made(kind: str, num_outs: int, num_inputs: int, group: int) -> QuantizedWeight:
    generator = torch.Generator("cuda").manual_seed(num_outs)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cuda")

    def by_group(part: Tensor) -> Tensor:
        return part.repeat_interleave(group // GROUP, 1)

    shape = num_outs, num_inputs // group
    scales = by_group((rand(*shape) + 0.5).half().float() / 64)
    if kind == "int8":
        return Int8Weight((rand(num_outs, num_inputs) * 256 - 128).floor().to(torch.int8), scales)
    nibbles = (rand(num_outs, num_inputs // 32, 16) * 256).to(torch.uint8)
    if kind == "minima":
        return Int4Weight(nibbles, scales, -by_group(rand(*shape).half().float()))
    zeros = by_group((rand(*shape) * 17).floor()) if kind == "zeros" else 8
    return Int4Weight(nibbles, scales, -zeros * scales)


def rows_of(count: int, width: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(512, width, generator=generator, device="cuda").bfloat16()[:count]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16)


@pytest.mark.parametrize(("kind", "shape"), WEIGHTS)
def test_dequantised_is_the_weight_rounded_once(kind: str, shape: tuple[int, int, int]) -> None:
    from pagespec.kernels.matmul.quantized.int4_packing import pack
    from pagespec.kernels.matmul.quantized.matmul_int4 import dequantize

    weight = made(kind, *shape)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(pack(weight), shape[1], dtype), weight.expanded().to(dtype))


@pytest.mark.parametrize(("kind", "shape"), WEIGHTS)
@pytest.mark.parametrize("has_gate", [False, True])
def test_has_the_bits_of_the_dequantised_weight(
    kind: str, shape: tuple[int, int, int], has_gate: bool
) -> None:
    from pagespec.kernels.matmul import dispatch
    from pagespec.kernels.matmul.matmul import Tile
    from pagespec.kernels.matmul.quantized.dispatch_int4 import linear, linear_silu_mul
    from pagespec.kernels.matmul.quantized.int4_packing import pack
    from pagespec.kernels.matmul.quantized.matmul_int4 import dequantize, matmul

    packed = pack(made(kind, *shape))
    plain = dequantize(packed, shape[1], torch.bfloat16)
    ours, reference = (
        (linear_silu_mul, dispatch.linear_silu_mul) if has_gate else (linear, dispatch.linear)
    )
    bias = rows_of(1, shape[0])[0]
    differing = []
    with without_split_k():
        for added in (None, bias) if shape[1] == 4096 else (None,):
            expected = bits(reference(rows_of(512, shape[1]), plain, added, dispatch.ALL_ROWS))
            for count in COUNTS:
                # Unpacked in the matmul, and before it.
                for max_fused_rows in (512, 0):
                    x = rows_of(count, shape[1])
                    found = ours(x, *packed[:2], added, *packed[2:], max_fused_rows)
                    if not torch.equal(bits(found), expected[:count]):
                        differing.append((added is not None, count, max_fused_rows))
            for sizes in TILES:
                names = ("block_m", "block_n", "block_k", "num_stages", "num_warps")
                tile = Tile(**dict(zip(names, sizes, strict=True)))
                found = matmul(rows_of(77, shape[1]), packed, added, tile=tile, has_gate=has_gate)
                if not torch.equal(bits(found), expected[:77]):
                    differing.append((added is not None, *sizes))
    assert differing == []


def test_cublas_has_these_bits_too() -> None:
    """From some number of rows on, which the plan finds."""
    from pagespec.kernels.matmul.plan_cache import LinearPlans
    from pagespec.kernels.matmul.quantized.dispatch_int4 import MAX_FUSED_ROWS
    from pagespec.kernels.matmul.quantized.int4_packing import pack
    from pagespec.kernels.matmul.quantized.plan_int4 import RowLimits

    with without_split_k():
        limits = RowLimits(torch.bfloat16, LinearPlans(True))
        fused, custom = limits.choose(pack(made("zeros", 512, 1024, 128)), 1024)
    assert fused == MAX_FUSED_ROWS
    assert custom <= 256
