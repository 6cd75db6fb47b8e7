"""FP8 matmuls on a GPU: against the formula, and bit against bit over tiles and numbers of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagespec.kernels import e4m3
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.fused.e4m3_groups import QuantizedRows
from pagespec.kernels.matmul.quantized.quantized_weight import Fp8Weight, quantize_fp8

pytestmark = pytest.mark.gpu

# Beside the sum of magnitudes: the matrix unit sums a group with fewer bits than float32 has.
UNIT_ERROR = 2.0**-11
# block_m, block_n, num_stages, num_warps, swap_ab
TILES = [
    (16, 64, 5, 4, True),
    (64, 64, 3, 4, True),
    (128, 64, 5, 4, False),
    (128, 128, 4, 8, False),
]
# part, atoms, stages, x_rows
FEW = [(32, 4, 1), (64, 2, 2), (16, 1, 3), (128, 1, 4, 32), (64, 2, 2, 64)]
# x_rows, part, stages
MANY = [(128, 128, 6), (128, 64, 8), (128, 64, 2), (192, 128, 4), (192, 64, 6), (192, 64, 1)]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def rows_of(count: int, width: int) -> Tensor:
    return normal(count, width) * torch.logspace(-3, 2, count, device="cuda").bfloat16()[:, None]


def weight_of(kind: str, num_outs: int, width: int) -> Fp8Weight:
    """Scales of blocks of 128 x 128; of outputs, for all inputs; of outputs and 128 inputs."""
    weight = quantize_fp8(normal(num_outs, width, seed=1))
    factors = torch.linspace(0.5, 2, num_outs, device="cuda")[:, None]
    if kind == "channels":
        return Fp8Weight(weight.values, weight.scales[:, :1] * factors)
    return Fp8Weight(weight.values, weight.scales * factors) if kind == "rows" else weight


def formula(x: Tensor, weight: Fp8Weight) -> tuple[Tensor, Tensor]:
    """In float64, of the rows as they are quantised; and of the magnitudes of all summands."""
    from pagespec.kernels.fused.quantize_rows import quantize_rows

    values, scales = quantize_rows(x)
    rows = Fp8Weight(values.view(torch.uint8), scales.t().contiguous()).expanded().double()
    matrix = weight.expanded().double().t()
    return rows @ matrix, rows.abs() @ matrix.abs()


def by_every_tile(x: Tensor, weight: Fp8Weight) -> dict[str, Tensor]:
    from pagespec.kernels.fused.quantize_rows import quantize_rows
    from pagespec.kernels.matmul.matmul import Tile
    from pagespec.kernels.matmul.quantized import dispatch_fp8, matmul_fp8
    from pagespec.kernels.matmul.quantized.tiles_fp8 import FewTile, ManyTile
    from pagespec.kernels.matmul.sm90 import matmul_fp8_sm90

    values, scales = dispatch_fp8.pack(weight)
    (num_outs, width), rows = values.shape, quantize_rows(x)
    shared = 1 if len(scales) == num_outs else 128
    found = {"dispatch": dispatch_fp8.linear(x, values, scales)}
    for m, n, stages, warps, swap in TILES:
        tile = Tile(
            block_m=m, block_n=n, block_k=128, num_stages=stages, num_warps=warps, swap_ab=swap
        )
        found[str((m, n, swap))] = matmul_fp8.matmul(
            rows, values, scales, None, x.dtype, shared=shared, tile=tile
        )
    if width % 128 == 0 and (shared == 128 or scales.shape[1] == 1):
        for tile_90 in [*(FewTile(*t) for t in FEW), *(ManyTile(*t) for t in MANY)]:
            if tile_90.fits(num_outs, width):
                found[str(tile_90)] = matmul_fp8_sm90.matmul(
                    rows, values, scales, shared=shared, tile=tile_90
                )
    return found


@pytest.mark.parametrize("width", [4096, 300])
def test_rows_are_rounded_as_on_a_cpu(width: int) -> None:
    from pagespec.kernels.fused.quantize_rows import quantize_rows

    x = rows_of(2000, width)  # quotients near ties of e4m3 among them
    x[3, :128] = 0
    values, scales = quantize_rows(x)
    for group, found in enumerate(scales):
        at = slice(group * 128, (group + 1) * 128)
        part = x[:, at].float().cpu()
        expected = e4m3.scale_for(part.abs().amax(1))
        assert torch.equal(found.cpu(), expected)
        bits = e4m3.encode(part / expected[:, None])
        assert torch.equal(values[:, at].view(torch.uint8).cpu(), bits)


def test_weights_are_rounded_as_on_a_cpu() -> None:
    weight = normal(300, 400) * torch.logspace(-3, 2, 300, device="cuda").bfloat16()[:, None]
    for found, expected in zip(quantize_fp8(weight), quantize_fp8(weight.cpu()), strict=True):
        assert torch.equal(found.cpu(), expected)


def test_silu_is_rounded_alike_for_every_bfloat16() -> None:
    """A row of one channel: its scale is the activation / 448, its number the sign."""
    from pagespec.kernels.fused import quantize_rows

    x = torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()][:, None].contiguous()
    ones = torch.ones_like(x)
    found = quantize_rows.act_mul_quantize(x, ones, "silu")
    expected = quantize_rows.quantize_rows(fused.act_mul(x, ones, "silu"))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("width", [300, 4096])
def test_what_makes_rows_quantises_what_it_would_have_stored(width: int) -> None:
    from pagespec.kernels.fused import quantize_rows

    x, up = rows_of(33, width), rows_of(33, width).flip(0).contiguous()
    weight = normal(width, seed=2)

    def check(found: QuantizedRows, plain: Tensor) -> None:
        expected = quantize_rows.quantize_rows(plain)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(found.scales, expected.scales)

    for kind in ("silu", "gelu_tanh"):
        check(quantize_rows.act_mul_quantize(x, up, kind), fused.act_mul(x, up, kind))
    for form in ("rounded", "wide", "plus_one"):
        found, _ = quantize_rows.rms_norm_quantize(x, None, weight, 1e-6, form)
        check(found, fused.rms_norm(x, weight, 1e-6, form))
        plain, total = fused.add_rms_norm(x, up, weight, 1e-6, form)
        found, hidden = quantize_rows.rms_norm_quantize(x, up, weight, 1e-6, form)
        check(found, plain)
        assert torch.equal(hidden, total)


@pytest.mark.parametrize(
    ("num_outs", "width", "kind"),
    [
        (256, 512, "channels"),
        (1024, 4096, "blocks"),
        (200, 336, "rows"),
        (33, 300, "blocks"),
    ],
)
def test_every_tile_matches_float64_and_has_the_same_bits(
    num_outs: int, width: int, kind: str
) -> None:
    weight = weight_of(kind, num_outs, width)
    x = rows_of(150, width)
    exact, size = formula(x, weight)
    first = by_every_tile(x, weight)["dispatch"]
    rounding = exact.abs() * 2.0**-8 + size * UNIT_ERROR
    assert ((first - exact).abs() <= rounding).all(), ((first - exact).abs() / size).max()
    inexact = (first.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    print(f"{num_outs} x {width} {kind}: {inexact:.2e} of the results' size beside float64")
    for rows in (150, 1, 3, 4, 8, 9, 17, 70):
        for name, out in by_every_tile(x[:rows], weight).items():
            assert torch.equal(out, first[:rows]), (name, rows)


@pytest.mark.parametrize(
    ("num_outs", "width", "kind"),
    [(6144, 4096, "blocks"), (4096, 12288, "channels"), (640, 576, "blocks")],
)
def test_a_row_has_its_bits_among_1_to_512(num_outs: int, width: int, kind: str) -> None:
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    parts = dispatch_fp8.pack(weight_of(kind, num_outs, width))
    x = rows_of(512, width)
    whole = dispatch_fp8.linear(x, *parts)
    assert whole.isfinite().all()
    for rows in (*range(1, 35), 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 400):
        assert torch.equal(dispatch_fp8.linear(x[:rows], *parts), whole[:rows]), rows
    moved = dispatch_fp8.linear(x.roll(5, 0), *parts)
    assert torch.equal(moved.roll(-5, 0), whole)
    assert torch.equal(dispatch_fp8.linear(x.repeat(4, 1), *parts), whole.repeat(4, 1))


@pytest.mark.parametrize(("width", "hidden"), [(4096, 1536), (384, 256)])
def test_a_gate_in_the_store_has_the_bits_of_its_own_kernel(width: int, hidden: int) -> None:
    from pagespec.kernels.fused.quantize_rows import act_mul_quantize, quantize_rows
    from pagespec.kernels.matmul.quantized import dispatch_fp8
    from pagespec.kernels.matmul.quantized.tiles_fp8 import ManyTile
    from pagespec.kernels.matmul.sm90.matmul_fp8_sm90 import gated_matmul

    tiles = [ManyTile(128, 128, 6), ManyTile(192, 128, 4)]
    gate_up = dispatch_fp8.pack(weight_of("blocks", 2 * hidden, width))
    down = dispatch_fp8.pack(weight_of("blocks", width, hidden))
    x = rows_of(700, width)
    x[5] = 0  # groups of zeros behind the gate
    whole = dispatch_fp8.mlp(x, *gate_up, *down, None)
    assert whole.isfinite().all()
    for rows in (700, 513, 256, 129, 128, 65, 64, 9, 1):
        gate, up = dispatch_fp8.linear(x[:rows], *gate_up).chunk(2, -1)
        expected = act_mul_quantize(gate, up, "silu")
        quantised = quantize_rows(x[:rows])
        for tile in (tile for tile in tiles if tile.fits(hidden, width)):
            found = gated_matmul(quantised, *gate_up, tile=tile)
            values = found.values.view(torch.uint8)
            assert torch.equal(values, expected.values.view(torch.uint8)), (rows, tile)
            assert torch.equal(found.scales, expected.scales), (rows, tile)
        apart = dispatch_fp8.act_linear(gate, up, "silu", *down, None)
        assert torch.equal(apart, whole[:rows]), rows
        assert torch.equal(dispatch_fp8.mlp(x[:rows], *gate_up, *down, None), apart), rows


@pytest.mark.parametrize("num_rows", [1500, 8000])
def test_a_gate_in_the_store_of_a_prompt(num_rows: int) -> None:
    """So many rows that ``mlp`` leaves the gate to the store, and programs have several tiles."""
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.quantized import dispatch_fp8
    from pagespec.kernels.matmul.quantized.tiles_fp8 import choose_gated_tile

    width, hidden = 512, 12288
    assert choose_gated_tile(num_rows, 2 * hidden, width, Gpu.of(torch.device("cuda")))
    gate_up = dispatch_fp8.pack(weight_of("blocks", 2 * hidden, width))
    down = dispatch_fp8.pack(weight_of("blocks", width, hidden))
    x = rows_of(num_rows, width)
    gate, up = dispatch_fp8.linear(x, *gate_up).chunk(2, -1)
    apart = dispatch_fp8.act_linear(gate, up, "silu", *down, None)
    assert torch.equal(dispatch_fp8.mlp(x, *gate_up, *down, None), apart)


def test_bias_and_other_dtypes() -> None:
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    weight, bias = weight_of("blocks", 384, 512), normal(384, seed=3)
    parts = dispatch_fp8.pack(weight)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = normal(70, 512).to(dtype)
        exact, size = formula(x, weight)
        whole = dispatch_fp8.linear(x, *parts, bias.to(dtype))
        assert whole.dtype == dtype
        error = (whole - exact - bias.double()).abs()
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        assert (error <= (exact + bias).abs() * rounding + size * UNIT_ERROR).all()
        for rows in (1, 16, 17, 65):
            assert torch.equal(dispatch_fp8.linear(x[:rows], *parts, bias.to(dtype)), whole[:rows])


@pytest.mark.parametrize("rows", [1, 8, 40, 256])
def test_a_captured_chain_waits_for_its_rows(rows: int) -> None:
    """Kernels that start before their input is there must wait for it."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    ups = [dispatch_fp8.pack(weight_of("blocks", 2048, 512)) for _ in range(3)]
    downs = [dispatch_fp8.pack(weight_of("blocks", 512, 1024)) for _ in range(3)]
    square = dispatch_fp8.pack(weight_of("blocks", 512, 512))
    scale = normal(512, seed=4)

    def chain(x: Tensor, wait: bool) -> Tensor:
        hidden = x
        for up, down in zip(ups, downs, strict=True):
            y, hidden = dispatch_fp8.add_norm_linear(x, hidden, scale, 1e-6, "rounded", *up, None)
            if wait:
                torch.cuda.synchronize()
            x = dispatch_fp8.act_linear(*y.chunk(2, -1), "silu", *down, None)
            if wait:
                torch.cuda.synchronize()
            x = dispatch_fp8.linear(x, *square)
        return x

    given = normal(rows, 512)
    chain(given, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(given, False)
    for seed in range(20):
        given.copy_(normal(rows, 512, seed=seed))
        graph.replay()
        assert torch.equal(out, chain(given.clone(), True)), seed
    assert out.isfinite().all()
