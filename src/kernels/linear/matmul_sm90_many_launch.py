"""Launch of the Hopper matmul of many bfloat16 rows: tiles, descriptors, grid, constants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import _LARGE_SHARED_BYTES, Gpu
from .matmul_sm90_many import OUT_BUFFERS, many_rows_kernel

_ROWS = 128  # of a tile
_STEP = 64  # summands in a stage


@dataclass(frozen=True, slots=True)
class ManyTile:
    """How a matmul of many rows is cut, 128 of them a tile.

    Attributes:
        wide: rows of the weight a tile, 128 or 256; with a gate half of them are up's.
        stages: of 64 summands, in shared memory at once. band: tiles of rows beside each other.
    """

    wide: int = 256
    stages: int = 4
    band: int = 16
    defer: bool = True
    silu: int = 0

    def fits(self, num_outs: int, k_size: int, has_gate: bool) -> bool:
        """Whether shape and tile suit each other, and shared memory suffices."""
        part = self.wide // (2 if has_gate else 1)
        # Stages, what stores go through, barriers.
        used = (self.stages * (_ROWS + self.wide) + _ROWS * OUT_BUFFERS.value) * _STEP * 2 + 1024
        num_steps, rest = divmod(k_size, _STEP)
        return (
            used <= _LARGE_SHARED_BYTES
            and part % 64 == 0
            and rest == 0
            and num_steps > self.wide // 64  # the last tile's outputs are stored beside as many
            and num_outs % 8 == 0
        )


def fits(x: Tensor, weight: Tensor, has_gate: bool, tile: ManyTile | None = None) -> bool:
    """Whether :func:`matmul_many` takes this: bfloat16 on a Hopper GPU, in whole 16-byte units."""
    num_outs = len(weight) // (2 if has_gate else 1)
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and all(m.stride(1) == 1 and m.stride(0) % 8 == 0 for m in (x, weight))
        and all(m.data_ptr() % 16 == 0 for m in (x, weight))
        and (tile or ManyTile()).fits(num_outs, weight.shape[1], has_gate)
        and Gpu.of(weight.device).has_prefetch
    )


def matmul_many(
    x: Tensor,
    weight: Tensor,
    has_gate: bool = False,
    *,
    tile: ManyTile | None = None,
    overlap: bool = True,
) -> Tensor:
    """``x @ weight.T``, rounded; one launch.

    Args:
        x: bfloat16 ``[M, K]`` on a Hopper GPU; rows of whole 16-byte units, maybe strided.
        weight: bfloat16 ``[N, K]``, or ``[2 N, K]`` (gate, then up); the same.
        has_gate: whether to return ``silu(gate) * up``, each operation rounded.
        tile: how to cut it. overlap: whether to start before the kernel before has ended.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: shapes do not fit each other or the tile.
    """
    num_rows, k_size = x.shape
    halves = 2 if has_gate else 1
    num_outs = len(weight) // halves
    tile = tile or ManyTile()
    if weight.shape[1] != k_size or not tile.fits(num_outs, k_size, has_gate):
        raise ValueError(f"{tile} does not fit {list(x.shape)} by {list(weight.shape)}")
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    part = tile.wide // halves
    pane, panes = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 16, 3)
    row = weight.stride(0)
    x_desc = TensorDescriptor(x, [num_rows, k_size], [x.stride(0), 1], [64, _STEP], pane)
    w_desc = TensorDescriptor(
        weight, [halves, num_outs, k_size], [num_outs * row, row, 1], [halves, part, _STEP], panes
    )
    out_desc = TensorDescriptor(out, [num_rows, num_outs], [num_outs, 1], [64, 64], pane)
    num_tiles = -(-num_rows // _ROWS) * -(-num_outs // part)
    many_rows_kernel[(min(num_tiles, Gpu.of(x.device).num_sms),)](
        x_desc, w_desc, out_desc, num_rows,
        N=num_outs, K=k_size, HALVES=halves, PART=part, STAGES=tile.stages, BAND=tile.band,
        DEFER=tile.defer, SILU=tile.silu, PDL=overlap,
        num_warps=4,  # of the first warpgroup; the others are its workers
        launch_pdl=overlap,
    )  # fmt: skip
    return out
