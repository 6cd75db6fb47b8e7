"""The tiles that the sweep tries fit their shapes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.matmul_sweep import ROWS, WEIGHTS, prefetch_tiles


@pytest.mark.parametrize("model", WEIGHTS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_every_tile_fits_and_is_tried_once(model: str, num_rows: int) -> None:
    for _, *shape in WEIGHTS[model]:
        tiles = prefetch_tiles(num_rows, *shape)
        # Tiles of more than 16 rows take 32 or 64 rows of the weight, of which some have no whole.
        has_whole_parts = shape[0] % (64 if shape[2] else 128) == 0
        assert len(tiles) >= (4 if has_whole_parts or num_rows <= 16 else 0)
        assert len(set(tiles)) == len(tiles)
        assert all(tile.fits(*shape) for tile in tiles)
