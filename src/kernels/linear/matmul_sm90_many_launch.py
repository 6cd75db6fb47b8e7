"""Launch of the Hopper matmul of many bfloat16 rows: descriptors, grid, constants."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import count_sms
from .matmul_sm90_many import many_rows_kernel
from .tiles import MANY_WEIGHT_ROWS, count_many_tiles, fits_many_rows

_STEP = 64  # summands of a stage
NUM_WARPS = 4  # of the first warpgroup; the others are its workers


@dataclass(frozen=True, slots=True)
class ManyLaunch:
    """A launch worked out, for a GPU or for a compiler alone. Nothing in it depends on the number
    of rows."""

    x_box: list[int]  # that of the result, too
    weight_box: list[int]
    x_layout: gl.NVMMASharedLayout
    weight_layout: gl.NVMMASharedLayout
    constants: dict[str, object]


def plan_many_launch(num_outs: int, k_size: int, has_gate: bool, overlap: bool) -> ManyLaunch:
    """Raises ValueError if the shape does not suit the kernel."""
    if not fits_many_rows(num_outs, k_size):
        raise ValueError(f"a weight of {num_outs} x {k_size} does not suit the kernel")
    halves = 2 if has_gate else 1
    return ManyLaunch(
        [64, _STEP],
        [halves, MANY_WEIGHT_ROWS // halves, _STEP],
        gl.NVMMASharedLayout(128, 16, 2),
        gl.NVMMASharedLayout(128, 16, 3),
        {"N": num_outs, "K": k_size, "HALVES": halves, "PDL": overlap},
    )


def matmul_many(
    x: Tensor, weight: Tensor, has_gate: bool = False, *, overlap: bool = True
) -> Tensor:
    """``x @ weight.T``, rounded; one launch.

    Args:
        x: bfloat16 ``[M, K]`` on a Hopper GPU; rows of whole 16-byte units, maybe strided.
        weight: bfloat16 ``[N, K]``, or ``[2 N, K]`` (gate, then up); the same.
        has_gate: whether to return ``silu(gate) * up``, each operation rounded.
        overlap: whether to start before the kernel before has ended, and wait for it there.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: shapes do not fit each other or the kernel.
    """
    num_rows, k_size = x.shape
    halves = 2 if has_gate else 1
    num_outs = len(weight) // halves
    if weight.shape[1] != k_size:
        raise ValueError(f"{list(x.shape)} by {list(weight.shape)}")
    launch = plan_many_launch(num_outs, k_size, has_gate, overlap)
    out = x.new_empty(num_rows, num_outs)
    if num_rows == 0:
        return out
    row = weight.stride(0)
    x_desc = TensorDescriptor(
        x, [num_rows, k_size], [x.stride(0), 1], launch.x_box, launch.x_layout
    )
    w_desc = TensorDescriptor(
        weight, [halves, num_outs, k_size], [num_outs * row, row, 1],
        launch.weight_box, launch.weight_layout,
    )  # fmt: skip
    out_desc = TensorDescriptor(
        out, [num_rows, num_outs], [num_outs, 1], launch.x_box, launch.x_layout
    )
    num_tiles = count_many_tiles(num_rows, num_outs, has_gate)
    many_rows_kernel[(min(num_tiles, count_sms(x.device)),)](
        x_desc, w_desc, out_desc, num_rows,
        **launch.constants,
        num_warps=NUM_WARPS,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
