"""Where tiles of rows begin: the last one ends with the last row, over rows of the one before.

TMA writes zeros where a box reaches beyond its tensor, and on an H200 all multiprocessors together
get some 1.5 TB/s of them, a third of what memory gives: with 136 rows in tiles of 128 the matmuls
of Qwen3-8B took up to 1.8 times as long as with 256 (docs/notes/matmul.md). Rows that two tiles
have are computed and stored twice, with the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_begin(tile, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row of a tile of ROWS rows; 0 where there are fewer."""
    return tl.maximum(tl.minimum(tile * ROWS, num_rows - ROWS), 0)
