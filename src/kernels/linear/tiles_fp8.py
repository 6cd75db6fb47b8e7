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

_MAX_FEW_ROWS = 64
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
    num_rows: int, num_outs: int, k_size: int, card: Gpu
) -> FewTile | ManyTile | None:
    """The :class:`.matmul_fp8_sm90_launch.FewTile` or ``ManyTile`` for a weight ``[N, K]``; None
    where that kernel has none."""
    if not card.has_prefetch or k_size % BLOCK:
        return None
    from .matmul_fp8_sm90_launch import FewTile, ManyTile

    if num_rows <= _MAX_FEW_ROWS:
        x_rows = next(rows for rows in (16, 32, 64) if num_rows <= rows)
        atoms = next(a for a in (4, 2, 1) if k_size % (a * BLOCK) == 0 and a * x_rows <= 128)
        for part in (64, 32, 16):
            if num_outs // part < 96 and part > 16:
                continue
            room = _STAGED_BYTES if num_outs // part <= card.num_sms else _SHARED_STAGED_BYTES
            a_stage = atoms * BLOCK * (part + x_rows)
            tile = FewTile(part, atoms, min(room // a_stage, k_size // (atoms * BLOCK)), x_rows)
            if tile.stages and tile.fits(num_outs, k_size):
                return tile
        return None
    for rows, part in ((128, 128), (128, 64), (64, 64)):
        tiles = num_outs // part * -(-num_rows // rows)
        many = ManyTile(rows, part, 4)
        if (tiles >= card.num_sms * 3 // 4 or (rows, part) == (64, 64)) and many.fits(
            num_outs, k_size
        ):
            return many
    return None
