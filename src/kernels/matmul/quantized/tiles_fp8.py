"""Tile sizes of the FP8 matmuls, by a rule from the shape of the weight and the number of rows.

No size changes the bits of a result (tests/kernels/matmul/quantized/test_fp8_gpu.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from ...device import _LARGE_SHARED_BYTES, Gpu
from ..matmul import Tile
from ..tuned_tiles import _swapped, _tile
from .quantized_weight import BLOCK

_MAX_FEW_ROWS = 64
_MANY_PROGRAMS = 96
_STAGED_BYTES = 192 << 10
_SHARED_STAGED_BYTES = 96 << 10  # where two programs share a multiprocessor
# By (rows of x, outputs) of a tile: stages, and microseconds per 128 summands, measured on one H100
# (docs/notes/fp8.md).
_MANY_TILES = {
    (128, 128): (6, 0.40),
    (128, 64): (8, 0.27),
    (192, 128): (4, 0.55),
    (192, 64): (6, 0.36),
}
_GATE_US = {128: 3.8, 192: 5.0}  # to apply the gate and round, per tile, by its rows of x
# Of the separate activation kernel. Lower than measured alone, because the matmul before it must
# store what the kernel reads.
_ACTIVATION_BYTES_PER_US = 1.5e6


@dataclass(frozen=True, slots=True)
class FewTile:
    """Tile sizes of a skinny FP8 matmul.

    Attributes:
        part: rows of the weight per program; a power of two from 8 to 128.
        x_rows: rows of x, from 8 to 64. Up to 8 rows use 8.
        atoms: number of 128-summand atoms per stage: 1, 2 or 4. stages: in shared memory at once.
    """

    part: int
    atoms: int
    stages: int
    x_rows: int = 16

    def fits(self, num_outs: int, k_size: int) -> bool:
        """Whether the tile matches the shape and fits shared memory."""
        num_steps, rest = divmod(k_size, BLOCK * self.atoms)
        if rest or num_outs % self.part or num_steps < self.stages:
            return False
        num_staged = self.stages * self.atoms
        left = 64 if self.part <= 64 else 128
        # x, or padding that the last operand reads; scales; and the store buffers.
        behind = max(num_staged * self.x_rows, left - self.part) * BLOCK
        scales = 4 * self.x_rows * triton.next_power_of_2(k_size // BLOCK)
        through = 2 * left * (self.x_rows + 8)
        used = num_staged * self.part * BLOCK + behind + scales + through + 1024
        return used <= _LARGE_SHARED_BYTES


@dataclass(frozen=True, slots=True)
class ManyTile:
    """Tile sizes of a persistent FP8 matmul.

    Attributes:
        x_rows: rows of x per tile: 128 or 192. part: outputs per tile: 64 or 128.
        stages: number of 128-summand stages in shared memory at once; even for 128 rows.
    """

    x_rows: int
    part: int
    stages: int

    def fits(self, num_outs: int, k_size: int) -> bool:
        """Whether the tile matches the shape and fits shared memory."""
        pair = 2 if self.x_rows == 128 else 1  # groups that a warpgroup multiplies at a time
        # Stages, their scales, and the store buffers.
        scales = self.stages * (self.x_rows + 64) * 4
        used = self.stages * (self.x_rows + self.part) * BLOCK + scales + self.x_rows * BLOCK + 1024
        is_whole = self.stages % pair == 0 and k_size % (pair * BLOCK) == 0
        return is_whole and num_outs % self.part == 0 and used <= _LARGE_SHARED_BYTES


def choose_fp8_tile(num_rows: int, num_outs: int) -> Tile:
    """The tile of the Triton kernel. All of its sizes use wgmma: 64 rows on the left, or 64
    outputs."""
    if num_rows <= _MAX_FEW_ROWS:
        rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        return _swapped(rows, 64, BLOCK, 5)
    if num_outs * -(-num_rows // 128) <= BLOCK * 132:
        return _tile(128, 64, BLOCK, 5)
    return _tile(128, 128, BLOCK, 4, 8)


def choose_sm90_tile(
    num_rows: int, num_outs: int, k_size: int, card: Gpu
) -> FewTile | ManyTile | None:
    """The tile for a weight ``[N, K]``; None if that kernel has none.

    The rule follows the fastest tiles for the weights of four models (docs/notes/fp8.md).
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
    """The tile of a matmul with gate and up that applies the gate in its epilogue. None if a
    separate kernel is faster, or if the shape is not supported."""
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
    """(microseconds, tile) of a matmul of many rows; None if no tile supports it."""
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
        for stages in range(most, max(0, most - 2), -1):  # scales may take the space of one
            tile = FewTile(part, atoms, stages, x_rows)
            if tile.fits(num_outs, k_size):
                return tile
    return None
