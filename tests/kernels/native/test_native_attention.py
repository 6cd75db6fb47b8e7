"""The native attention: right, and the same bits for a position in any step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.native import calls
from pagespec.kernels.native.library import library
from tests.support.paged import Rows, Shape, float64_attention, make_batch

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
    """210 positions of one row: at once, then cut everywhere, then beside rows of any length."""
    num_tokens = 210
    batch = make_batch([(0, num_tokens), (0, 250), (0, 1), (0, 70)], shape, num_padding=0)
    ops.kv_store(*batch.store)
    query, k_cache, v_cache, _, _, tables, *rest = batch.attend
    begins = [0, num_tokens, num_tokens + 250, num_tokens + 251]

    def served(rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """(row, begin, end) each; its outputs."""
        step = torch.cat([query[begins[r] + a : begins[r] + b] for r, a, b in rows])
        lengths = [b - a for _, a, b in rows]
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        contexts = torch.tensor([b for _, _, b in rows], dtype=torch.int32)
        table = tables[[r for r, _, _ in rows]]
        out = calls.attention(step, k_cache, v_cache, starts, contexts, table, *rest)
        return list(out.split(lengths))

    whole = served([(0, 0, num_tokens)])[0]
    for cut in range(1, num_tokens, 7):
        assert torch.equal(served([(0, 0, cut)])[0], whole[:cut])
        assert torch.equal(served([(0, cut, num_tokens)])[0], whole[cut:])
    for position in range(num_tokens):
        assert torch.equal(served([(0, position, position + 1)])[0][0], whole[position])
    for position in range(0, num_tokens, 11):
        mine = (0, position, position + 1)
        for others in ([(1, 249, 250)], [(2, 0, 1), (3, 69, 70)], [(1, 3, 90), (3, 69, 70)]):
            for rows in ([mine, *others], [*others, mine]):
                assert torch.equal(served(rows)[rows.index(mine)][0], whole[position])
