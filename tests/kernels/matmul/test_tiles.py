"""The tiles chosen for the matmuls of whole models and of their shards."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from pagespec.kernels.arch import Arch
from pagespec.kernels.device import _LARGE_SHARED_BYTES, Gpu
from pagespec.kernels.matmul.tiles import choose_prefetch_tile, choose_tile

HOPPER = Gpu(132, _LARGE_SHARED_BYTES, Arch("sm90", has_gluon=True))
# Of Qwen3-0.6B, 8B and 32B, whole and in halves, quarters and eighths.
OUTS = (384, 512, 768, 1024, 1536, 2560, 3072, 4096, 5120, 6144, 6400, 10240, 12288, 12800, 25600)
SUMMANDS = (512, 768, 1024, 1536, 2048, 3072, 3200, 4096, 5120, 6144, 6400, 8192, 12288, 25600)
ROWS = (1, 8, 9, 16, 17, 32, 64, 128, 256, 257)


@pytest.mark.parametrize("has_gate", [False, True])
def test_every_tile_that_is_chosen_fits(has_gate: bool) -> None:
    num_chosen = 0
    for num_rows in ROWS:
        for num_outs in OUTS:
            for k_size in SUMMANDS:
                tile = choose_prefetch_tile(num_rows, num_outs, k_size, has_gate, HOPPER)
                if tile is not None:
                    num_chosen += 1
                    assert tile.fits(num_outs, k_size, has_gate), (num_rows, num_outs, k_size)
    assert num_chosen > 500


def test_a_tile_measured_without_a_gate_is_not_taken_with_one() -> None:
    shape = 6144, 4096
    gated = choose_tile(16, *shape, 2, True, HOPPER)
    assert choose_tile(16, *shape, 2, False, HOPPER) != gated
    plain, joined = (choose_prefetch_tile(32, *shape, has_gate, HOPPER) for has_gate in (0, 1))
    assert plain is not None
    assert joined != plain
    assert choose_prefetch_tile(32, 4096, 4096, True, HOPPER) is None


@pytest.mark.parametrize("k_size", [2560, 6144, 25600])
def test_programs_that_would_take_a_second_turn_share_multiprocessors(k_size: int) -> None:
    tile = choose_prefetch_tile(2, 5120, k_size, False, HOPPER)
    assert tile is not None
    num_bytes = tile.stages * tile.atoms * (tile.part + tile.x_rows) * 128
    assert 5120 // tile.part <= HOPPER.num_sms * (_LARGE_SHARED_BYTES // num_bytes)


# q, k, v and o of Qwen3-30B-A3B and Gemma-3-4B, what DeepSeek-V2-Lite, Granite-4-H-Tiny and
# Qwen3.5-35B-A3B have besides; the last two are long. Programs that each take, of eight rows.
SHAPES = {
    (5120, 2048, False): 80,
    (2048, 4096, False): 64,
    (4096, 2560, False): 64,
    (2560, 2048, False): 40,
    (3648, 2048, False): 57,
    (2816, 2048, True): 88,
    (2048, 2816, False): 64,
    (1536, 3072, False): 48,
    (6448, 1536, False): 403,
    (2560, 10240, False): 80,
    (9216, 2048, False): 288,
}


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_have_few_programs_and_all_of_them_a_place_at_once(
    shape: tuple[int, int, bool], num_rows: int
) -> None:
    num_outs, k_size, has_gate = shape
    tile = choose_prefetch_tile(num_rows, num_outs, k_size, has_gate, HOPPER)
    assert tile is not None
    assert tile.fits(num_outs, k_size, has_gate)
    assert num_outs // tile.part == SHAPES[shape]
    rows = tile.part * (2 if has_gate else 1)
    num_bytes = tile.stages * tile.atoms * (rows + tile.x_rows) * 128
    assert num_outs // tile.part <= HOPPER.num_sms * (_LARGE_SHARED_BYTES // num_bytes)


@pytest.mark.parametrize("num_experts", [64, 128])
def test_few_rows_of_a_router_are_not_left_to_two_programs(num_experts: int) -> None:
    for num_rows in (2, 8, 16):
        tile = choose_prefetch_tile(num_rows, num_experts, 2048, False, HOPPER)
        assert tile is not None
        assert tile.fits(num_experts, 2048, False)
        assert num_experts // tile.part >= 8
