"""FP8 matmuls without a GPU: the chosen tiles, and their compiled form for Hopper.

Triton's interpreter does not run Gluon; tests/kernels/matmul/quantized/test_fp8_gpu.py runs it.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels.arch import Arch
from tests.support.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# Weights of Qwen3-0.6B and 8B.
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
SHAPES += [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
ROWS = (1, 16, 17, 33, 64, 65, 256, 512, 8192)


@pytest.fixture
def _gluon() -> None:
    from pagespec.kernels.arch import is_gluon_known

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")


def operands(num_rows: int, num_weight_rows: int, k_size: int) -> tuple[Any, Tensor, Tensor]:
    """Quantised rows, a weight and its scales, without memory."""
    from pagespec.kernels.fused.e4m3_groups import QuantizedRows

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    num_groups = -(-k_size // 128)
    x = QuantizedRows(empty(num_rows, k_size), empty(num_groups, num_rows))
    return x, empty(num_weight_rows, k_size), empty(num_weight_rows // 128, num_groups)


@pytest.mark.usefixtures("_gluon")
def test_chosen_tiles_fit() -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.quantized.tiles_fp8 import FewTile, ManyTile, choose_sm90_tile
    from pagespec.kernels.matmul.sm90.matmul_fp8_sm90 import matmul

    card = Gpu(132, 227 << 10, arch=Arch("sm90", has_gluon=True))
    for shape in SHAPES:
        for rows in ROWS:
            tile = choose_sm90_tile(rows, *shape, card)
            assert tile is not None
            assert isinstance(tile, FewTile) == (rows <= (128 if shape[0] <= 4096 else 64))
            assert tile.fits(*shape)
            assert shape[0] // tile.part * -(-rows // tile.x_rows) >= 32  # programs or tiles
    assert choose_sm90_tile(1, 640, 160, card) is None
    assert choose_sm90_tile(129, 640, 640, card) == ManyTile(192, 64, 6)  # an odd number of groups
    assert choose_sm90_tile(1, 645, 640, card) is None
    for tile in (FewTile(32, 4, 3), FewTile(32, 3, 1), FewTile(128, 4, 4), ManyTile(128, 64, 5)):
        with pytest.raises(ValueError, match="does not fit"):
            matmul(*operands(1, 1024, 1024), shared=128, tile=tile)


@pytest.mark.usefixtures("_gluon")
def test_what_was_the_quickest_is_taken() -> None:
    """The fastest tiles for weights of Qwen3-8B and 32B on an H100, from docs/notes/fp8.md."""
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.quantized.tiles_fp8 import choose_sm90_tile

    card = Gpu(132, 227 << 10, arch=Arch("sm90", has_gluon=True))
    quickest = {
        (6144, 4096): {128: (128, 64), 192: (192, 64), 256: (128, 128), 384: (192, 128)},
        (4096, 4096): {192: (128, 64), 384: (192, 64), 512: (128, 128), 768: (192, 128)},
        (4096, 12288): {256: (128, 64), 768: (192, 128), 1024: (128, 128), 8192: (192, 128)},
        (10240, 5120): {192: (192, 128), 256: (128, 128), 512: (192, 128), 1024: (128, 128)},
    }
    for shape, by_rows in quickest.items():
        for rows, tile in by_rows.items():
            assert astuple(choose_sm90_tile(rows, *shape, card))[:2] == tile, (shape, rows)


@pytest.mark.usefixtures("_gluon")
def test_when_the_gate_is_applied_in_the_store() -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.quantized.tiles_fp8 import ManyTile, choose_gated_tile
    from pagespec.kernels.matmul.sm90.matmul_fp8_sm90 import gated_matmul

    card = Gpu(132, 227 << 10, arch=Arch("sm90", has_gluon=True))
    assert choose_gated_tile(8192, 24576, 4096, card) == ManyTile(192, 128, 4)
    assert choose_gated_tile(2048, 24576, 4096, card) == ManyTile(192, 128, 4)
    assert choose_gated_tile(1024, 24576, 4096, card) == ManyTile(128, 128, 6)
    assert choose_gated_tile(512, 24576, 4096, card) == ManyTile(128, 128, 6)
    for rows in (384, 256, 64, 1):
        assert choose_gated_tile(rows, 24576, 4096, card) is None
    assert choose_gated_tile(192, 24576, 4096, card) == ManyTile(192, 128, 4)
    tile = ManyTile(192, 128, 4)
    for num_outs, k_size in ((12288 + 64, 4096), (12288, 4096 + 64)):
        assert choose_gated_tile(8192, 2 * num_outs, k_size, card) is None
        with pytest.raises(ValueError, match="does not suit"):
            gated_matmul(*operands(1, 2 * num_outs, k_size), tile=tile)
    for tile in (ManyTile(192, 64, 6), ManyTile(128, 128, 5)):
        with pytest.raises(ValueError, match="does not suit"):
            gated_matmul(*operands(1, 2 * 12288, 4096), tile=tile)


@pytest.mark.usefixtures("_gluon")
def test_they_compile_for_hopper() -> None:
    """To the instruction of a warpgroup, whose bits are compared on a GPU; without spills."""
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.quantized.tiles_fp8 import choose_fp8_tile, choose_sm90_tile

    card = Gpu(132, 227 << 10, arch=Arch("sm90", has_gluon=True))
    cases: list[tuple[int | bool | str, ...]] = []
    for has_blocks in (True, False):
        for shape in ((4096, 4096), (24576, 4096), (4096, 12288))[: 3 if has_blocks else 1]:
            for rows in (1, 64, 192, 256, 8192):
                tile = choose_sm90_tile(rows, *shape, card)
                assert tile is not None
                cases.append((rows, *shape, has_blocks, type(tile).__name__, *astuple(tile)))
    plain = []
    for rows in (1, 32, 64, 128, 8192):
        tile = choose_fp8_tile(rows, 6144)
        size = (tile.block_m, tile.block_n, tile.num_stages, tile.num_warps, tile.swap_ab)
        plain += [(*size, has_tma) for has_tma in (True, False)]
    script = Path(__file__).with_name("compile_matmul_fp8.py")
    gated = [(12288, 4096, 192, 128, 4), (12288, 4096, 128, 128, 6), (128, 128, 192, 128, 1)]
    answers = json.loads(run_apart(str(script), json.dumps([cases, gated, plain])))
    in_gluon, with_gate, in_triton = answers
    made_of = [*in_gluon, *with_gate, *in_triton]
    for case, made in zip([*cases, *gated, *plain], made_of, strict=True):
        assert made["wgmma"] > 0, case
        assert made["mma"] == 0, case
        assert made["spilled"] == 0, (case, made)
        assert not made["serialised"], case
        assert made["shared"] <= 227 << 10, case
    for case, made in zip(cases, in_gluon, strict=True):
        assert (made["ahead"] > 0) == (case[4] != "ManyTile"), case
