"""Where tiles of rows begin, under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from pagespec.kernels.matmul.matmul import tile_begin  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's interpreter is off: the kernels are compiled here, not interpreted",
)


@triton.jit
def begins(out, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0)
    tl.store(out + tile, tile_begin(tile, num_rows, ROWS))


@pytest.mark.parametrize("size", [8, 64, 128])
def test_tiles_hold_every_row_and_no_other(size: int) -> None:
    for num_rows in (1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 3 * size + 5):
        found = torch.full((-(-num_rows // size),), -1, dtype=torch.int32)
        begins[(len(found),)](found, num_rows, ROWS=size)
        tiles = [range(begin, begin + size) for begin in found.tolist()]
        if num_rows < size:
            assert tiles == [range(size)]
        else:
            assert {row for tile in tiles for row in tile} == set(range(num_rows))
