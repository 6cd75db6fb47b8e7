"""The native attention kernel is correct, and a position has the same bits in any step."""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels import ops
from pagespec.kernels.native import calls
from pagespec.kernels.native.library import library
from tests.support.paged import Rows, Shape, check_positions, float64_attention, make_batch

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built")
SHAPES = [
    Shape(hq=9, hkv=3, dk=64, dv=64),
    Shape(hq=4, hkv=4, dk=16, dv=16, window=8, block_size=4),
    Shape(hq=4, hkv=2, dk=48, dv=80, block_size=1),
    Shape(hq=4, hkv=2, dk=16, dv=16, softcap=5.0),
    Shape(hq=6, hkv=2, dk=128, dv=128, window=70, softcap=3.0, has_sinks=True),
    Shape(hq=4, hkv=1, dk=16, dv=16, window=1, has_sinks=True),
]
ROWS: list[Rows] = [
    [(0, 5), (17, 1), (30, 9), (3, 1), (0, 1), (99, 1), (40, 2)],
    [(1, 1), (200, 1), (3, 1), (63, 1), (64, 1), (65, 1)],
    [(5, 1), (0, 0), (0, 4), (0, 0)],
    [(130, 300), (0, 2)],
    [(77, 1)],
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=["mixed", "decode", "empty rows", "long chunk", "one"])
def test_matches_float64(shape: Shape, rows: Rows) -> None:
    batch = make_batch(rows, shape)
    ops.kv_store(*batch.store)
    out = calls.attention(*batch.attend)
    expected = float64_attention(batch, rows, shape)
    torch.testing.assert_close(out[: batch.num_tokens].double(), expected, rtol=1e-5, atol=1e-5)
    assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_position_has_the_same_bits_in_any_step(shape: Shape) -> None:
    check_positions(lambda attention: calls.attention(*attention), shape, 7)
