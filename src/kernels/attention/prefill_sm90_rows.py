"""How a program of Hopper's prefill finds its row: as one of :mod:`.prefill` does, in Gluon."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_of(starts, num_rows, tile, BLOCK_Q: gl.constexpr):
    """The row of a tile, as :func:`.online_softmax.count_at_most` finds it."""
    # Most batches at once. As wide for all: a kernel for each width would be seconds of compiling.
    WIDTH: gl.constexpr = 1024
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = 0
    for first in range(0, num_rows + 1, WIDTH):
        i = first + gl.arange(0, WIDTH, LAYOUT)
        keys = gl.load(starts + i, mask=i <= num_rows, other=0) // BLOCK_Q + i
        total += gl.sum(((keys <= tile) & (i <= num_rows)).to(gl.int32), 0)
    return total - 1


@gluon.jit
def num_leading_singles(starts, num_rows):
    """As :func:`.prefill.num_leading_singles`."""
    WIDTH: gl.constexpr = 1024
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    num_singles = num_rows
    for first in range(0, num_rows, WIDTH):
        row = first + gl.arange(0, WIDTH, LAYOUT)
        end = gl.load(starts + row + 1, mask=row < num_rows, other=0)
        others = gl.where((row < num_rows) & (end != row + 1), row, num_rows)
        num_singles = gl.minimum(num_singles, gl.min(others, 0))
    return num_singles
