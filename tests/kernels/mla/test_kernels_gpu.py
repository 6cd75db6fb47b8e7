"""The kernels of latent attention on a GPU: against float64, and bit against bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels.mla import dispatch as mla
from pagespec.kernels.mla import launch
from pagespec.kernels.registry import registry
from tests.support.hopper import has_hopper_kernels
from tests.support.paged import (
    Rows,
    Shape,
    arguments,
    expected,
    float64_heads,
    latent_batch,
    latent_shape,
    rescheduled,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {torch.float32: 2e-5, BF16: 1.6e-2, FP16: 2e-3}
ROWS: dict[str, Rows] = {
    "ragged decode": [(0, 1), (1, 1), (15, 1), (4999, 1), (511, 1), (512, 1), (1023, 1), (700, 1)],
    "mixed": [(0, 5), (17, 1), (1020, 9), (3, 1), (0, 1), (2048, 1), (440, 2), (0, 0), (77, 600)],
    "empty rows": [(5, 1), (0, 0), (0, 4), (0, 0), (0, 0), (0, 0), (0, 0), (600, 2)],
}
SHAPES = [
    latent_shape(16, 512, 64, block_size=64, dtype=BF16),  # DeepSeek-V2-Lite
    latent_shape(128, 512, 64, dtype=BF16),  # DeepSeek-V3
    latent_shape(40, 256, 32, dtype=FP16),  # MiniCPM3
    latent_shape(4, 16, 8),
]
WHOLE, SPLIT = {"unsplit_from": 1}, {"unsplit_from": 1 << 20}


def attend(batch: tuple, shape: Shape, **changes: Any) -> Tensor:
    given = arguments(batch, shape.dv)
    tiling = launch.choose_tiling(shape.dtype, shape.hq, given[0].device)
    return launch.attention(*given, tiling=replace(tiling, **changes))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape: Shape, rows: Rows) -> None:
    batch = latent_batch(rows, shape, device="cuda")
    truth = expected(batch, rows, shape)
    for changes in (WHOLE, SPLIT):
        out = attend(batch.attend, shape, **changes)
        error = (out[: batch.num_tokens].double() - truth).abs()
        assert error.max().item() <= TOLERANCE[shape.dtype]  # false for NaN
        assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_schedules_give_the_same_bits(shape: Shape) -> None:
    """One prefill; chunks beside one another; decodes beside one another and alone, their contexts
    split over programs or not."""
    length = 1300
    batch = latent_batch([(0, length)], shape, num_padding=0, device="cuda")
    whole = attend(batch.attend, shape)
    assert torch.equal(attend(batch.attend, shape), whole)
    cuts = [0, 1, 8, 40, 41, 300, 301, 813, 1299, length]
    chunks = list(pairwise(cuts))
    for changes in (WHOLE, SPLIT):
        assert torch.equal(attend(rescheduled(batch, chunks), shape, **changes), whole)
    for step in (97, 7):
        decodes = [(p, p + 1) for p in range(0, length, step)]
        for changes in (WHOLE, SPLIT):
            out = attend(rescheduled(batch, decodes), shape, **changes)
            assert torch.equal(out, whole[::step]), (step, changes)
    for position in (0, 127, 128, 512, 1299):
        alone = attend(rescheduled(batch, [(position, position + 1)]), shape)
        assert torch.equal(alone[0], whole[position])


@pytest.mark.skipif(
    not has_hopper_kernels(),
    reason="for Hopper, in the Gluon of some Tritons",
)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_kernels_of_hopper_have_the_bits_of_any(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagespec.kernels.mla import decode_sm90, prefill_sm90

    launched: list[bool] = []
    start, start_decode = prefill_sm90.launch, decode_sm90.launch
    num_decoded = 0

    def noted(*given: Any) -> None:
        launched.append(given[-1])
        start(*given)

    def noted_decode(*given: Any) -> None:
        nonlocal num_decoded
        num_decoded += 1
        start_decode(*given)

    monkeypatch.setattr(prefill_sm90, "launch", noted)
    monkeypatch.setattr(decode_sm90, "launch", noted_decode)
    batches = list(ROWS.values())
    batches.append([(4096, 128), (63, 2), (0, 64), (0, 65), (0, 1), (2048, 3), (0, 700)])
    batches.append([(37 * i % 3000, 1 + i * i % 70) for i in range(150)])
    batches.append([(61 * i % 3000, 1) for i in range(140)])  # by token, without padding
    batches.append([(5, 2)])  # fewer lines than a tile has
    takes_singles = shape.hq % 64 == 0
    for rows in batches:
        batch = latent_batch(rows, shape, num_padding=0 if len(rows) == 140 else 3, device="cuda")
        by_token = len(batch.attend[0]) <= len(rows)
        before = len(launched)
        out = attend(batch.attend, shape, **WHOLE)
        assert launched[before:] == [takes_singles] * (takes_singles or not by_token), rows
        assert torch.equal(attend(batch.attend, shape, **SPLIT), out), rows
        with registry().changed(without=("latent_attention",)):
            for changes in (WHOLE, SPLIT):
                assert torch.equal(attend(batch.attend, shape, **changes), out), rows
    assert num_decoded == (2 * len(batches) if shape.hq <= 16 else 0)


def test_another_split_has_other_bits() -> None:
    """A control: if splits followed the schedule, the tests above would detect it."""
    shape = SHAPES[0]
    batch = latent_batch([(0, 1300)], shape, num_padding=0, device="cuda")
    changed = attend(batch.attend, shape, near_split=128)
    assert not torch.equal(changed, attend(batch.attend, shape))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_matmuls_of_heads_follow_no_schedule(dtype: torch.dtype) -> None:
    num_heads, nope_dim, rank, v_dim = 16, 128, 512, 128
    weight = torch.randn(num_heads, nope_dim + v_dim, rank, device="cuda").to(dtype) / 16
    to_latent, to_values = weight[:, :nope_dim], weight[:, nope_dim:].transpose(1, 2)
    query = torch.randn(num_heads, 300, nope_dim + 64, device="cuda").to(dtype).transpose(0, 1)
    latent = mla.latent_query(query, to_latent)
    truth = float64_heads(query[..., :nope_dim], to_latent)
    error = (latent[..., :rank].double() - truth).abs().max() / truth.abs().max()
    assert error.item() <= TOLERANCE[dtype]
    assert torch.equal(latent[..., rank:], query[..., nope_dim:])
    mixed = latent[..., :rank].contiguous()
    values = mla.head_values(mixed, to_values)
    truth = float64_heads(mixed, to_values)
    assert ((values.double() - truth).abs().max() / truth.abs().max()).item() <= TOLERANCE[dtype]
    for count in (1, 2, 3, 7, 16, 17, 31, 32, 33, 64, 65, 129, 256):
        first = 5 * count % (300 - count)
        some = slice(first, first + count)
        # Queries of another number of tokens have other strides.
        own = query.transpose(0, 1)[:, some].contiguous().transpose(0, 1)
        assert torch.equal(mla.latent_query(own, to_latent), latent[some]), count
        assert torch.equal(mla.head_values(mixed[some], to_values), values[some]), count
