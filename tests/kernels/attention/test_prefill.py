"""The prefill kernel has the bits of the decode kernel, under Triton's interpreter.

Tiles of queries and splits of keys begin and end at arbitrary positions.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagespec.kernels.attention import launch
from pagespec.kernels.attention.prefill import num_leading_singles
from pagespec.kernels.attention.tiling import choose_tiling
from tests.kernels.attention.test_decode import (
    TOLERANCE,
    attend,
    stored,
)
from tests.support.paged import Shape, bundled, float64_attention, rescheduled

pytestmark = pytest.mark.usefixtures("poisoned", "ordered_dot")

SHAPES = [
    Shape(hq=2, hkv=1),
    Shape(hq=6, hkv=2, dk=96, dv=96, window=7, softcap=3.0, has_sinks=True),
    Shape(hq=5, hkv=1, dk=24, dv=32, block_size=32, softcap=2.0),
    Shape(hq=4, hkv=1, dk=128, dv=128, window=40, has_sinks=True),
    Shape(hq=2, hkv=1, dk=256, dv=256, block_size=64),
    Shape(hq=3, hkv=1, dk=32, dv=16, block_size=256, window=21),
    Shape(hq=1, hkv=1, dk=16, dv=8, block_size=32, window=1, dtype=torch.float16),
    Shape(hq=2, hkv=1, dtype=torch.float16, has_sinks=True),
]
LENGTH = 135
# Rows of several queries: within a tile of keys, from one split into the next, over several splits.
CHUNKS = [(0, 2), (2, 15), (15, 33), (33, 64), (64, 66), (66, 126), (126, LENGTH)]
# The first and last of tiles of queries, of tiles of keys and of splits.
TOKENS = [0, 1, 15, 16, 31, 32, 63, 64, 65, 95, 96, 127, 128, LENGTH - 1]


# Tiles of keys of both widths by day for the plainest shape, of one width for each other.
@pytest.mark.parametrize(
    ("shape", "block_n"),
    [
        pytest.param(
            shape, block_n, marks=() if i == 0 or i % 2 == block_n // 32 else pytest.mark.nightly
        )
        for i, shape in enumerate(SHAPES)
        for block_n in (16, 32)
    ],
    ids=str,
)
def test_bits_are_those_of_decode(shape: Shape, block_n: int) -> None:
    batch = stored([(0, LENGTH)], shape, num_padding=0)
    splits = {"block_n": block_n, "near_split": 32, "far_split": 64, "unsplit_from": 1}
    whole = attend(batch.attend, **splits)
    exact = float64_attention(batch, [(0, LENGTH)], shape)
    assert (whole.double() - exact).abs().max().item() <= TOLERANCE[shape.dtype]  # false for NaN
    decoded = attend(rescheduled(batch, [(p, p + 1) for p in TOKENS]), **splits)
    assert torch.equal(decoded, whole[TOKENS])
    chunked = attend(rescheduled(batch, CHUNKS), block_m=32, **splits)
    assert torch.equal(chunked, whole)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_programs_that_share_the_values_change_no_bit(shape: Shape) -> None:
    """Beside rows of one query, which are not theirs, empty rows and padding."""
    rows = [(30, 9), (70, 1), (0, 5), (0, 0), (17, 1), (60, 40)]
    batch = stored(rows, shape)
    whole = attend(batch.attend)
    assert (whole[batch.num_tokens :] == 0).all()
    assert torch.equal(attend(batch.attend, prefill_parts=2), whole)


def test_heads_of_256_have_their_values_shared() -> None:
    """Where sums of all of them would not fit the registers, and the halves are powers of two."""
    half = torch.float16
    sizes = [(128, 128), (256, 256), (192, 128), (192, 192), (80, 256)]
    assert [choose_tiling(half, *size).prefill_parts for size in sizes] == [1, 2, 1, 1, 2]
    assert choose_tiling(torch.float32, 256, 256).prefill_parts == 1
    rows = [(30, 9), (70, 1), (0, 5)]
    shape = Shape(hq=2, hkv=1, dk=256, dv=256, dtype=half)
    batch = stored(rows, shape)
    out = launch.paged_attention(*bundled(*batch.attend))
    error = (out[: batch.num_tokens] - float64_attention(batch, rows, shape)).abs().max().item()
    assert error <= TOLERANCE[half]


@triton.jit
def _count_kernel(starts, out, num_rows, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out, num_leading_singles(starts, num_rows, WIDTH))


@pytest.mark.parametrize("others", [[], [2], [0, 2, 0], [3, 1, 1], [0, 1], [5, 0, 0, 0, 0, 1]])
@pytest.mark.parametrize("num_singles", [0, 1, 15, 16, 17, 32, 40])
def test_single_queries_in_front_are_counted(num_singles: int, others: list[int]) -> None:
    """In looks of 16 rows; later rows may start where as many single ones would."""
    lengths = torch.tensor([0, *[1] * num_singles, *others], dtype=torch.int32)
    out = torch.empty(1, dtype=torch.int32)
    starts = lengths.cumsum(0, dtype=torch.int32)
    _count_kernel[(1,)](starts, out, num_rows=len(lengths) - 1, WIDTH=16)
    assert out.item() == num_singles
