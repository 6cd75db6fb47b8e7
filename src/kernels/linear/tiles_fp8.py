"""Tile sizes of the FP8 matmuls: by a rule, from the shape of the weight and the number of rows.

No size changes the bits of a result (tests/kernels/linear/test_fp8_gpu.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import Gpu
from .fp8 import BLOCK
from .matmul import Tile

if TYPE_CHECKING:
    from .matmul_fp8_sm90_launch import FewTile, ManyTile
    from .matmul_fp8_sm90_wide_launch import WideTile

_MAX_FEW_ROWS = 64
# Time of a tile of 128 rows, by the rows of the weight in it.
_TILE_TIMES = {256: 2.6, 128: 1.5, 64: 1.0}
_MANY_PROGRAMS = 96
_STAGED_BYTES = 192 << 10
_SHARED_STAGED_BYTES = 96 << 10  # where two programs are to have a multiprocessor


def choose_fp8_tile(num_rows: int, num_outs: int) -> Tile:
    """Of the Triton kernel. All of its sizes have wgmma: 64 rows on the left, or outputs."""
    if num_rows <= _MAX_FEW_ROWS:
        rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        return Tile(
            block_m=rows, block_n=64, block_k=BLOCK, num_stages=5, num_warps=4, swap_ab=True
        )
    if num_outs * -(-num_rows // 128) <= BLOCK * 132:
        return Tile(block_m=128, block_n=64, block_k=BLOCK, num_stages=5, num_warps=4)
    return Tile(block_m=128, block_n=128, block_k=BLOCK, num_stages=4, num_warps=8)


def choose_sm90_tile(
    num_rows: int, num_outs: int, k_size: int, card: Gpu, has_blocks: bool = True
) -> FewTile | ManyTile | WideTile | None:
    """The tile for a weight ``[N, K]``; None where that kernel has none.

    By what was the quickest for the weights of Qwen3-8B on an H200 (docs/notes/fp8.md).
    """
    if not card.has_prefetch or k_size % BLOCK:
        return None
    is_narrow = num_outs <= 64 * card.num_sms // 2
    if num_rows <= _MAX_FEW_ROWS or (is_narrow and num_rows <= 2 * _MAX_FEW_ROWS):
        tile = _few_tile(num_rows, num_outs, k_size, card)
        if tile is not None or num_rows <= _MAX_FEW_ROWS:
            return tile
    from .matmul_fp8_sm90_launch import ManyTile
    from .matmul_fp8_sm90_wide_launch import WideTile

    # Narrow tiles share the work more evenly.
    wide, tiles = WideTile(), (ManyTile(128, 6), ManyTile(64, 6))
    fitting: dict[int, ManyTile | WideTile] = {t.part: t for t in tiles if t.fits(num_outs, k_size)}
    if has_blocks and wide.fits(num_outs, k_size):
        fitting[256] = wide
    if not fitting:
        return None
    return fitting[min(fitting, key=lambda part: _time(num_rows, num_outs, part, card))]


def _time(num_rows: int, num_weight_rows: int, part: int, card: Gpu) -> float:
    num_tiles = num_weight_rows // part * -(-num_rows // 128)
    return -(-num_tiles // card.num_sms) * _TILE_TIMES[part]


def gates_in_store(num_rows: int, num_weight_rows: int, k_size: int, card: Gpu) -> bool:
    """Whether the matmul of so many rows with a gate and up is that of wide tiles, which applies
    the gate and quantises."""
    if not card.has_prefetch or num_rows <= _MAX_FEW_ROWS:
        return False
    from .matmul_fp8_sm90_wide_launch import WideTile

    return WideTile().fits(num_weight_rows // 2, k_size, has_gate=True)


def _few_tile(num_rows: int, num_outs: int, k_size: int, card: Gpu) -> FewTile | None:
    from .matmul_fp8_sm90_launch import FewTile

    x_rows = next(rows for rows in (16, 32, 64) if num_rows <= rows or rows == 64)
    if 32 < num_rows <= 64 and num_outs // 64 < _MANY_PROGRAMS:
        x_rows = 32  # more programs
    atoms = next(a for a in (4, 2, 1) if k_size % (a * BLOCK) == 0 and a * x_rows <= 128)
    num_row_tiles = -(-num_rows // x_rows)
    for part in (64, 32, 16):
        num_programs = num_outs // part * num_row_tiles
        if num_programs < (64 if k_size <= 4096 else _MANY_PROGRAMS) and part > 16:
            continue
        room = _STAGED_BYTES if num_programs <= card.num_sms else _SHARED_STAGED_BYTES
        most = min(room // (atoms * BLOCK * (part + x_rows)), k_size // (atoms * BLOCK))
        for stages in range(most, max(0, most - 2), -1):  # scales may take the room of one
            tile = FewTile(part, atoms, stages, x_rows)
            if tile.fits(num_outs, k_size):
                return tile
    return None
