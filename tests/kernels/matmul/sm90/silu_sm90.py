"""The silu of the Hopper matmul for many rows as its own kernel, for a test of all inputs."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagespec.kernels.fused.rounding import silu_of_bfloat16
from pagespec.kernels.matmul.sm90.matmul_sm90_many import pair, unpacked


@gluon.jit
def _kernel(x, out):
    """Two numbers per int32. Grid: a program per 512 of those."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.program_id(0) * 512 + gl.arange(0, 512, LINE)
    even, odd = unpacked(gl.load(x + i))
    gl.store(out + i, pair(silu_of_bfloat16(even), silu_of_bfloat16(odd)))


def silu(x: Tensor) -> Tensor:
    """Of bfloat16 ``[1024 * n]``."""
    pairs = x.view(torch.int32)
    out = torch.zeros_like(pairs)
    _kernel[(len(pairs) // 512,)](pairs, out, num_warps=4)
    return out.view(torch.bfloat16)
