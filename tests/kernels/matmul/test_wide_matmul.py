"""The float32 matmul of 16-bit rows and weight, under Triton's interpreter.

Also tests its compiled form for Hopper.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from pagespec.kernels.arch import Arch
from pagespec.kernels.device import Gpu
from pagespec.kernels.jit.parallel_build import parallel_build
from pagespec.kernels.matmul import wide_matmul as kernel
from pagespec.kernels.matmul.matmul import Tile
from pagespec.kernels.matmul.wide_matmul import choose_wide_tile, wide_tiles
from tests.support.apart import run_apart

H200 = Gpu(num_sms=132, num_shared_bytes=227 << 10, arch=Arch("sm90", has_gluon=True))
SMALL = Gpu(num_sms=80, num_shared_bytes=99 << 10)
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's interpreter is off: the kernels are compiled here, not interpreted",
)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "num_outs", "k_size"),
    [(1, 4, 48), (5, 64, 512), (17, 60, 1032), (33, 8, 1304), (70, 130, 136)],
)
@pytest.mark.parametrize("tile", [*kernel.TILES, *kernel._SMALL_TILES])
def test_results_are_those_of_float64(
    tile: Tile, num_rows: int, num_outs: int, k_size: int, dtype: torch.dtype
) -> None:
    x, weight = normal(num_rows, k_size, dtype=dtype), normal(num_outs, k_size, dtype=dtype, seed=1)
    found = kernel.wide_matmul(x, weight, tile)
    expected = F.linear(x.double(), weight.double())
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@interpreted
def test_rows_may_be_strided_and_none() -> None:
    x, weight = normal(9, 400)[:, 100:300], normal(20, 200, seed=1)
    expected = F.linear(x.double(), weight.double())
    for tile in kernel.TILES:
        found = kernel.wide_matmul(x, weight, tile)
        assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert kernel.wide_matmul(x[:0], weight, kernel.TILES[0]).shape == (0, 20)


@interpreted
def test_parts_are_added_in_the_order_of_k() -> None:
    """Sums that float32 has to round, so that another order of parts, or parts of another size,
    would show: of each 128 summands only one is not 0, of which NumPy loses nothing."""
    generator = torch.Generator().manual_seed(0)
    parts = (torch.rand(40, 9, generator=generator) * 4096).to(torch.bfloat16)
    x = torch.zeros(40, 9, kernel.PART, dtype=torch.bfloat16)
    x[:, :, 5] = parts
    weight = torch.full((20, 9 * kernel.PART), 1.0 + 2**-7, dtype=torch.bfloat16)
    total = torch.zeros(40)
    for part in parts.unbind(1):
        total = total + part.float() * (1.0 + 2**-7)
    for tile in (*kernel.TILES, *kernel._SMALL_TILES):
        found = kernel.wide_matmul(x.flatten(1), weight, tile)
        assert torch.equal(found, total[:, None].expand(-1, 20))


def test_a_cpu_computes_it_as_torch_does() -> None:
    x, weight = normal(2, 3, 48), normal(4, 48, seed=1)
    assert torch.equal(kernel.wide_linear(x, weight), F.linear(x.float(), weight.float()))


@pytest.mark.parametrize(
    ("num_rows", "num_outs", "size"),
    [
        (1, 64, 16), (64, 64, 16), (256, 64, 16), (1024, 64, 32), (8192, 64, 64),
        (1, 256, 16), (256, 256, 32), (8192, 256, 128), (8192, 8, 16),
    ],
)  # fmt: skip
def test_larger_tiles_come_where_they_are_many(num_rows: int, num_outs: int, size: int) -> None:
    assert choose_wide_tile(num_rows, num_outs, H200).block_m == size


def test_every_tile_that_is_chosen_is_one_that_a_start_makes() -> None:
    for card in (H200, SMALL):
        for num_outs in (1, 8, 60, 64, 160, 256):
            tiles = wide_tiles(num_outs, card)
            for num_rows in (1, 2, 16, 17, 64, 256, 300, 1024, 8192, 100_000):
                assert choose_wide_tile(num_rows, num_outs, card) in tiles
    assert all(tile.block_m < 128 for tile in wide_tiles(256, SMALL))


def test_a_start_makes_all_tiles(
    monkeypatch: pytest.MonkeyPatch, as_gpu: Callable[[Gpu], None]
) -> None:
    asked = []

    def launch(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
        asked.append(tile)
        return torch.empty(len(x), len(weight), device="meta")

    monkeypatch.setattr(kernel, "wide_matmul", launch)
    as_gpu(H200)
    x, weight = torch.empty(1, 3, 48, device="meta"), torch.empty(64, 48, device="meta")
    assert kernel.wide_linear(x, weight).shape == (1, 3, 64)
    assert asked == [kernel.TILES[-1]]
    with parallel_build(torch.device("cpu")):
        kernel.wide_linear(x, weight)
    assert asked[1:] == [*kernel.TILES[1:], kernel.TILES[-1]]


def test_each_part_starts_from_zero_on_hopper() -> None:
    """From the compiler alone: the additions to the total are not the matrix unit's."""
    built = json.loads(run_apart(str(Path(__file__).with_name("compile_wide_matmul.py"))))
    assert len(built) == 2 * len(kernel.TILES)
    for each in built:
        # 128 summands are eight instructions' of 16.
        assert each["products"] == 8 * each["from zero"] > 0
        assert each["additions"] == each["sums"] > 0
        assert each["other additions"] == 0
        # Nothing is read of what the kernel before may write, nor stored, before the wait.
        before, behind = each["events"].split("w")
        assert set(before) <= {"p"}
        assert ("p" in before) == (each["rows"] == 16)
        assert {"d", "a", "m", "s"} <= set(behind)
        assert "l" not in behind
