"""Tile sizes of the FP8 matmuls: by a rule, from the shape of the weight and the number of rows.

No size changes the bits of a result (tests/kernels/quantized/test_fp8_gpu.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import Gpu
from ..linear.matmul import Tile
from .fp8 import BLOCK

if TYPE_CHECKING:
    from .matmul_fp8_sm90_launch import FewTile, ManyTile

_MAX_FEW_ROWS = 64
_MANY_PROGRAMS = 96
_STAGED_BYTES = 192 << 10
_SHARED_STAGED_BYTES = 96 << 10  # where two programs are to have a multiprocessor
_CACHED_BYTES = 64 << 20  # about what the L2 cache keeps from one kernel to the next


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

    # Time of a tile, beside that of the widest: narrow ones share the work more evenly.
    best: tuple[float, ManyTile] | None = None
    for many, time in ((ManyTile(128, 6), 1.5), (ManyTile(64, 6), 1.0)):
        num_tiles = num_outs // many.part * -(-num_rows // 128)
        total = -(-num_tiles // card.num_sms) * time
        if many.fits(num_outs, k_size) and (best is None or total < best[0]):
            best = total, many
    return None if best is None else best[1]


def gates_in_store(num_rows: int, num_weight_rows: int, k_size: int, card: Gpu) -> bool:
    """Whether a matmul with gate and up applies the gate where it stores.

    Its tiles are a little slower: it pays where gate and up of all rows, in bfloat16, would go to
    memory and back (docs/notes/fp8.md).
    """
    fits = num_weight_rows % (2 * BLOCK) == 0 and k_size % BLOCK == 0 and k_size >= 2 * BLOCK
    return card.has_prefetch and fits and 2 * num_rows * num_weight_rows > _CACHED_BYTES


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
