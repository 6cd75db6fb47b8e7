"""Tile sizes of the FP8 matmuls: by a rule, from the shape of the weight and the number of rows.

No size changes the bits of a result (tests/kernels/quantized/test_fp8_gpu.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import Gpu
from ..linear.matmul import Tile
from .quantized_weight import BLOCK

if TYPE_CHECKING:
    from .matmul_fp8_sm90_launch import FewTile, ManyTile

_MAX_FEW_ROWS = 64
_MANY_PROGRAMS = 96
_STAGED_BYTES = 192 << 10
_SHARED_STAGED_BYTES = 96 << 10  # where two programs are to have a multiprocessor
# By (rows of x, outputs) of a tile: stages, and microseconds per 128 summands, measured on one H100
# (docs/notes/fp8.md).
_MANY_TILES = {
    (128, 128): (6, 0.40),
    (128, 64): (8, 0.27),
    (192, 128): (4, 0.55),
    (192, 64): (6, 0.36),
}
_GATE_US = {128: 3.8, 192: 5.0}  # to apply the gate and round, per tile, by its rows of x
# Of the activation's own kernel; lower than measured alone, as the matmul before it has to store
# what it reads.
_ACTIVATION_BYTES_PER_US = 1.5e6


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
    num_rows: int, num_outs: int, k_size: int, card: Gpu
) -> FewTile | ManyTile | None:
    """The tile for a weight ``[N, K]``; None where that kernel has none.

    By what was the quickest for the weights of four models (docs/notes/fp8.md).
    """
    if k_size % BLOCK:
        return None
    is_narrow = num_outs <= 64 * card.num_sms // 2
    if num_rows <= _MAX_FEW_ROWS or (is_narrow and num_rows <= 2 * _MAX_FEW_ROWS):
        tile = _few_tile(num_rows, num_outs, k_size, card)
        if tile is not None or num_rows <= _MAX_FEW_ROWS:
            return tile
    quickest = _quickest(num_rows, num_outs, k_size, card)
    return None if quickest is None else quickest[1]


def choose_gated_tile(
    num_rows: int, num_weight_rows: int, k_size: int, card: Gpu
) -> ManyTile | None:
    """The tile of a matmul with gate and up that applies the gate where it stores; None where a
    kernel of its own does that sooner, or the shape does not suit."""
    if num_rows <= _MAX_FEW_ROWS:
        return None
    if num_weight_rows % (2 * BLOCK) or k_size % BLOCK:
        return None
    num_outs = num_weight_rows // 2
    joined = _quickest(num_rows, num_outs, k_size, card, is_gated=True)
    apart = _quickest(num_rows, num_weight_rows, k_size, card)
    if joined is None or apart is None:
        return None
    num_bytes = num_rows * (2 * num_weight_rows + num_outs)
    return joined[1] if joined[0] < apart[0] + num_bytes / _ACTIVATION_BYTES_PER_US else None


def _quickest(
    num_rows: int, num_outs: int, k_size: int, card: Gpu, is_gated: bool = False
) -> tuple[float, ManyTile] | None:
    """(microseconds, tile) of a matmul of many rows; None where no tile suits it."""
    from .matmul_fp8_sm90_launch import ManyTile

    best: tuple[float, ManyTile] | None = None
    for (x_rows, part), (stages, group_us) in _MANY_TILES.items():
        tile = ManyTile(x_rows, part, stages)
        if not tile.fits(num_outs, k_size) or (is_gated and part != BLOCK):
            continue
        num_turns = -(-(num_outs // part * -(-num_rows // x_rows)) // card.num_sms)
        tile_us = k_size // BLOCK * group_us
        if is_gated:
            tile_us = 2 * tile_us + _GATE_US[x_rows]
        if best is None or num_turns * tile_us < best[0]:
            best = num_turns * tile_us, tile
    return best


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
