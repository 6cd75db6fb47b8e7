"""Launch parameters of the Hopper matmul: descriptors' boxes and layouts, grid, constants."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import triggers_dependents_late
from .tuned_tiles import PrefetchTile

_AHEAD_BYTES = 6 << 20


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch worked out, for a GPU or for a compiler alone: descriptors' shapes and constants."""

    x_box: list[int]
    weight_box: list[int]
    x_layout: gl.NVMMASharedLayout
    weight_layout: gl.NVMMASharedLayout
    num_programs: int
    num_warps: int
    constants: dict[str, object]

    def describe(self, weight: Tensor) -> TensorDescriptor:
        """``weight [halves * N, K]`` as ``[K / 64, halves, N, 64]``."""
        halves, row = self.weight_box[1], weight.stride(0)
        num_outs = len(weight) // halves
        shape, strides = [weight.shape[1] // 64, halves, num_outs, 64], [64, num_outs * row, row, 1]
        return TensorDescriptor(weight, shape, strides, self.weight_box, self.weight_layout)


def plan_launch(
    num_rows: int, num_outs: int, k_size: int, has_gate: bool, tile: PrefetchTile, overlap: bool
) -> Launch:
    """Raises ValueError if the tile does not fit the shape."""
    halves = 2 if has_gate else 1
    x_rows = 8 if num_rows <= 8 else tile.x_rows
    if not tile.fits(num_outs, k_size, has_gate):
        raise ValueError(f"{tile} does not fit {num_rows} x {k_size} by {num_outs} x {k_size}")
    constants: dict[str, object] = {
        "N": num_outs,
        "K": k_size,
        "HALVES": halves,
        "PART": tile.part,
        "X_ROWS": x_rows,
        "ATOMS": tile.atoms,
        "STAGES": tile.stages,
        "PREFETCH_STAGES": _stages_ahead(num_rows, num_outs * halves, k_size, tile),
        "LATE_TRIGGER": triggers_dependents_late(num_rows),
        "PDL": overlap,
    }
    return Launch(
        [tile.atoms, x_rows, 64],
        [tile.atoms, halves, tile.part, 64],
        gl.NVMMASharedLayout(128, 16, 3),
        gl.NVMMASharedLayout(128, 16, 4),
        num_outs // tile.part * -(-num_rows // x_rows),
        4 if tile.part * halves <= 64 else 8,
        constants,
    )


def _stages_ahead(num_rows: int, num_weight_rows: int, k_size: int, tile: PrefetchTile) -> int:
    """Stages of weights loaded before the wait; the others are behind it.

    All of them, but of few rows (:func:`triggers_dependents_late`) no more than 6 MiB of a weight
    that is staged as a whole: the kernel before ends only when what is under way has come.
    """
    if not triggers_dependents_late(num_rows) or tile.stages * tile.atoms * 64 < k_size:
        return tile.stages
    return min(tile.stages, max(1, tile.stages * _AHEAD_BYTES // (num_weight_rows * k_size * 2)))
