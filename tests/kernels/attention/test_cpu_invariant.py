"""The CPU's aligned attention is correct, and a position has the same bits in any step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.arguments import AttentionParams
from pagespec.kernels.attention import cpu_invariant
from tests.support.paged import Rows, Shape, check_positions, float64_attention, make_batch

SHAPES = [
    Shape(hq=9, hkv=3, dk=64, dv=64),
    Shape(hq=4, hkv=4, dk=16, dv=16, window=8, block_size=4),
    Shape(hq=4, hkv=2, dk=24, dv=12, block_size=1),
    Shape(hq=4, hkv=2, dk=16, dv=16, softcap=5.0),
    Shape(hq=6, hkv=2, dk=16, dv=8, window=70, softcap=3.0, has_sinks=True),
    Shape(hq=4, hkv=1, dk=16, dv=16, window=1, has_sinks=True),
    Shape(hq=4, hkv=2, dk=64, dv=64, dtype=torch.bfloat16),
    Shape(hq=6, hkv=2, dk=16, dv=16, chunk=24),
    Shape(hq=4, hkv=4, dk=16, dv=16, chunk=100, has_sinks=True),
    Shape(hq=6, hkv=2, dk=16, dv=16, has_slopes=True),
    Shape(hq=4, hkv=1, dk=16, dv=8, has_slopes=True, window=70, chunk=128),
]
ROWS: list[Rows] = [
    [(0, 5), (17, 1), (30, 9), (3, 1), (0, 1), (99, 1), (40, 2)],
    [(1, 1), (200, 1), (3, 1), (63, 1), (64, 1), (65, 1)],
    [(5, 1), (0, 0), (0, 4), (0, 0)],
    [(130, 300), (0, 2)],
]


def attend(attention: tuple) -> Tensor:
    query, k_cache, v_cache, starts, contexts, tables, table_rows, scale, *rest = attention
    window, softcap, sinks, *more = rest
    layout = cpu_invariant.build_layout(
        k_cache, starts, contexts, tables, table_rows, window, *more
    )
    params = AttentionParams(scale, softcap=softcap, sinks=sinks)
    return cpu_invariant.attend(query, k_cache, v_cache, layout, params)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=["mixed", "decode", "empty rows", "long chunk"])
def test_matches_float64(shape: Shape, rows: Rows) -> None:
    batch = make_batch(rows, shape)
    ops.kv_store(*batch.store)
    out = attend(batch.attend)
    expected = float64_attention(batch, rows, shape)
    tolerance = 1e-5 if shape.dtype == torch.float32 else 0.02
    found = out[: batch.num_tokens].double()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_position_has_the_same_bits_in_any_step(shape: Shape) -> None:
    check_positions(attend, shape, 7 if shape.hq == 9 else 19)
