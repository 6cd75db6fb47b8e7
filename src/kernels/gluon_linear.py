"""``x @ weight.T`` of few rows, its weight under way before the kernel before has ended.

A step of few rows is a chain of short kernels that each wait for the last, and a product in it is
mostly waiting for its weight, which depends on none of them. Triton cannot ask for the one operand
before the wait and for the other after it; Gluon, which it is made of, can: here every program
asks for all its weights that fit in shared memory, then waits (programmatic dependent launch),
then asks for x. So **weights must be older than the kernel before**: parameters, nothing computed.

The order of summation is that of :mod:`pagespec.kernels.triton_linear`, and so are the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagespec.kernels.gluon_early import early_kernel
from pagespec.kernels.linear_tiles import EarlyTile


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


def plan_launch(
    num_rows: int, num_outs: int, k_size: int, has_gate: bool, tile: EarlyTile, overlap: bool
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
        "UNITS": tile.units,
        "X_ROWS": x_rows,
        "ATOMS": tile.atoms,
        "STAGES": tile.stages,
        "PDL": overlap,
    }
    return Launch(
        [tile.atoms, x_rows, 64],
        [tile.atoms, halves, tile.part, 64],
        gl.NVMMASharedLayout(128, 16, 3),
        gl.NVMMASharedLayout(128, 16, 4),
        num_outs // (tile.part * tile.units) * -(-num_rows // x_rows),
        4 if tile.part * halves <= 64 else 8,
        constants,
    )


def matmul(
    x: Tensor, weight: Tensor, *, tile: EarlyTile, has_gate: bool = False, overlap: bool = True
) -> Tensor:
    """``x @ weight.T``, rounded; one launch.

    Args:
        x: bfloat16 ``[M, K]`` on a Hopper GPU; rows of whole 16-byte units, maybe strided.
        weight: bfloat16 ``[N, K]``, or ``[2 N, K]`` (gate, then up); the same. Not written by the
            kernels before, as far as they have not ended when the last one begins.
        tile: how to cut it.
        has_gate: whether to return ``silu(gate) * up``, each operation rounded.
        overlap: whether to start before the kernel before has ended.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: shapes do not fit each other or the tile.
    """
    num_rows, k_size = x.shape
    halves = 2 if has_gate else 1
    num_outs = weight.shape[0] // halves
    if weight.shape[1] != k_size:
        raise ValueError(f"x {list(x.shape)} does not fit weight {list(weight.shape)}")
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    launch = plan_launch(num_rows, num_outs, k_size, has_gate, tile, overlap)
    x_desc = TensorDescriptor(
        x, [k_size // 64, num_rows, 64], [64, x.stride(0), 1], launch.x_box, launch.x_layout
    )
    row = weight.stride(0)
    w_desc = TensorDescriptor(
        weight,
        [k_size // 64, halves, num_outs, 64],
        [64, num_outs * row, row, 1],
        launch.weight_box,
        launch.weight_layout,
    )
    early_kernel[(launch.num_programs,)](
        x_desc,
        w_desc,
        out,
        num_rows,
        **launch.constants,
        num_warps=launch.num_warps,
        launch_pdl=overlap,
    )
    return out
