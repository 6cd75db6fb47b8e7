"""Launch parameters of the Hopper FP8 matmul: tiles, descriptors' boxes and layouts, constants."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import _LARGE_SHARED_BYTES, triggers_dependents_late

_AHEAD_BYTES = 6 << 20
GROUP = 128


@dataclass(frozen=True, slots=True)
class FewTile:
    """How a matmul of few FP8 rows is cut.

    Attributes:
        part: rows of the weight a program; a power of two from 8 to 128. x_rows: rows of x; from 8
            to 64. Up to 8 rows take 8.
        atoms: of 128 summands, in a stage: 1, 2 or 4. stages: in shared memory at once.
    """

    part: int
    atoms: int
    stages: int
    x_rows: int = 16

    def fits(self, num_outs: int, k_size: int) -> bool:
        """Whether shape and tile suit each other, and shared memory suffices."""
        num_steps, rest = divmod(k_size, GROUP * self.atoms)
        if rest or num_outs % self.part or num_steps < self.stages:
            return False
        num_staged = self.stages * self.atoms
        left = 64 if self.part <= 64 else 128
        # x, or what the last operand reads beyond; scales; and what stores go through.
        behind = max(num_staged * self.x_rows, left - self.part) * GROUP
        scales = 4 * self.x_rows * triton.next_power_of_2(k_size // GROUP)
        through = 2 * left * (self.x_rows + 8)
        used = num_staged * self.part * GROUP + behind + scales + through + 1024
        return used <= _LARGE_SHARED_BYTES


@dataclass(frozen=True, slots=True)
class ManyTile:
    """How a matmul of many FP8 rows is cut.

    Attributes:
        x_rows: of x a tile: 128 or 192. part: outputs a tile: 64 or 128.
        stages: of 128 summands, in shared memory at once; an even number for 128 rows.
    """

    x_rows: int
    part: int
    stages: int

    def fits(self, num_outs: int, k_size: int) -> bool:
        """Whether shape and tile suit each other, and shared memory suffices."""
        pair = 2 if self.x_rows == 128 else 1  # groups that a warpgroup multiplies at a time
        # Stages, their scales, and what stores go through.
        scales = self.stages * (self.x_rows + 64) * 4
        used = self.stages * (self.x_rows + self.part) * GROUP + scales + self.x_rows * GROUP + 1024
        is_whole = self.stages % pair == 0 and k_size % (pair * GROUP) == 0
        return is_whole and num_outs % self.part == 0 and used <= _LARGE_SHARED_BYTES


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch worked out, for a GPU or for a compiler alone."""

    x_box: list[int]
    weight_box: list[int]
    num_programs: int
    num_warps: int
    constants: dict[str, object]

    def describe_x(self, x: Tensor) -> TensorDescriptor:
        return self._describe(x, self.x_box)

    def describe_weight(self, weight: Tensor) -> TensorDescriptor:
        return self._describe(weight, self.weight_box)

    def _describe(self, matrix: Tensor, box: list[int]) -> TensorDescriptor:
        """``[R, K]``, or as ``[K / 128, R, 128]`` for a box of that many dimensions."""
        num_rows, k_size = matrix.shape
        layout = gl.NVMMASharedLayout(128, 8, len(box))
        if len(box) == 2:
            return TensorDescriptor(matrix, [num_rows, k_size], [k_size, 1], box, layout)
        shape, strides = [k_size // GROUP, num_rows, GROUP], [GROUP, k_size, 1]
        return TensorDescriptor(matrix, shape, strides, box, layout)


def plan_launch(
    num_rows: int,
    num_outs: int,
    k_size: int,
    num_w_groups: int,
    shared: int,
    tile: FewTile | ManyTile,
    overlap: bool,
    num_sms: int,
) -> Launch:
    """Raises ValueError if the tile does not fit the shape."""
    if not tile.fits(num_outs, k_size):
        raise ValueError(f"{tile} does not fit {num_rows} x {k_size} by {num_outs} x {k_size}")
    constants: dict[str, object] = {
        "N": num_outs,
        "K": k_size,
        "PART": tile.part,
        "STAGES": tile.stages,
        "W_GROUPS": num_w_groups,
        "SHARED": shared,
        "PDL": overlap,
    }
    if isinstance(tile, ManyTile):
        return Launch(
            [64, GROUP],
            [tile.part, GROUP],
            min(num_outs // tile.part * -(-num_rows // tile.x_rows), num_sms),
            4,  # of the first warpgroup; the others are its workers
            constants | {"X_ROWS": tile.x_rows},
        )
    x_rows = 8 if num_rows <= 8 else tile.x_rows
    return Launch(
        [tile.atoms, x_rows, GROUP],
        [tile.atoms, tile.part, GROUP],
        num_outs // tile.part * -(-num_rows // x_rows),
        4 if tile.part <= 64 else 8,
        constants
        | {
            "X_ROWS": x_rows,
            "ATOMS": tile.atoms,
            "PREFETCH_STAGES": _stages_ahead(num_rows, num_outs, k_size, tile),
            "GROUPS": triton.next_power_of_2(k_size // GROUP),
            "LATE_TRIGGER": triggers_dependents_late(num_rows),
        },
    )


def _stages_ahead(num_rows: int, num_outs: int, k_size: int, tile: FewTile) -> int:
    """Stages of weights loaded before the wait; as of :mod:`..linear.matmul_sm90_launch`."""
    if not triggers_dependents_late(num_rows) or tile.stages * tile.atoms * GROUP < k_size:
        return tile.stages
    return min(tile.stages, max(1, tile.stages * _AHEAD_BYTES // (num_outs * k_size)))
