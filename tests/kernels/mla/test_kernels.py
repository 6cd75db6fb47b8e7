"""The Triton kernels of latent attention under Triton's interpreter, at small shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pagespec.kernels.arguments import LatentInputs, LatentKV
from pagespec.kernels.fused import rms_norm
from pagespec.kernels.mla import dispatch, head_matmul_kernel, launch, store_kernel
from pagespec.kernels.mla.launch import LatentTiling
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

pytestmark = pytest.mark.usefixtures("poisoned")

ROWS: dict[str, Rows] = {
    "mixed": [(30, 9), (70, 1), (0, 5), (0, 0), (17, 1)],
    "decode": [(10, 1), (100, 1), (0, 1)],
    "empty rows": [(5, 1), (0, 0), (20, 4), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)],
    "singles in front": [(9, 1), (70, 1), (30, 1), (5, 2), (0, 0), (44, 40), (8, 1)],
}
SHAPES = [
    latent_shape(4, 16, 8),
    latent_shape(5, 24, 16, block_size=32),
    latent_shape(20, 32, 8, dtype=torch.float16),  # more heads than a program serves
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
SMALL = LatentTiling(
    block_n=16,
    ones=16,
    decode_lines=16,
    decode_warps=4,
    prefill_lines=32,
    prefill_warps=4,
    num_stages=1,
    near_split=16,
    far_split=32,
    split_change=64,
)
SPREADS = {
    "whole contexts": {"unsplit_from": 1},
    "a program a split": {"unsplit_from": 1 << 20, "num_programs": 1 << 20},
    "one program for all splits": {"unsplit_from": 1 << 20, "num_programs": 1},
    "three": {"unsplit_from": 1 << 20, "num_programs": 6},
}


def _dot(_: object, a: Any, b: Any, d: Any, *__: object) -> TensorHandle:
    """``d + a @ b``, each element one chain in order along K, as the kernels take it of a GPU."""
    left, right = (x.data.astype(np.float32) for x in (a, b))
    total = np.array(d.data)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[k]
    return TensorHandle(total, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


def attend(batch: tuple, shape: Shape, tiling: LatentTiling = SMALL, **changes: int) -> Tensor:
    return launch.attention(*arguments(batch, shape.dv), tiling=replace(tiling, **changes))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape: Shape, rows: Rows) -> None:
    batch = latent_batch(rows, shape)
    wide = {"block_n": 32, "near_split": 32, "prefill_lines": 16}
    for changes in ({}, wide) if shape.hq < 16 else ({},):
        out = attend(batch.attend, shape, **changes)
        error = (out[: batch.num_tokens].double() - expected(batch, rows, shape)).abs()
        assert error.max().item() <= TOLERANCE[shape.dtype]  # false for NaN
        assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_spreading_splits_over_programs_changes_no_bit(shape: Shape) -> None:
    for rows in ([(10, 1), (90, 1)], [(3, 2), (64, 1)]):
        batch = latent_batch(rows, shape)
        outputs = {name: attend(batch.attend, shape, **spread) for name, spread in SPREADS.items()}
        for name, out in outputs.items():
            assert torch.equal(out, outputs["whole contexts"]), name


@pytest.mark.parametrize(
    "shape", [*SHAPES[:2], pytest.param(SHAPES[2], marks=pytest.mark.nightly)], ids=str
)
def test_schedules_give_the_same_bits(shape: Shape) -> None:
    """One prefill; several chunks at once; decodes at once and alone."""
    length = 75 if shape.hq < 16 else 36
    batch = latent_batch([(0, length)], shape, num_padding=0)
    whole = attend(batch.attend, shape)
    cuts = [0, 1, 8, length - 16, length - 15, length]
    assert torch.equal(attend(rescheduled(batch, list(pairwise(cuts))), shape), whole)
    assert torch.equal(attend(batch.attend, shape, prefill_lines=16), whole)
    tokens = [p for p in (0, 15, 16, 35, 63, 64, 74) if p < length]
    decodes = [(p, p + 1) for p in tokens]
    for spread in SPREADS.values():
        assert torch.equal(attend(rescheduled(batch, decodes), shape, **spread), whole[tokens])
    assert torch.equal(attend(rescheduled(batch, decodes[-1:]), shape), whole[tokens[-1:]])


def test_another_split_has_other_bits() -> None:
    """A control: if splits followed the schedule, the tests above would detect it."""
    shape = SHAPES[0]
    batch = latent_batch([(0, 75)], shape, num_padding=0)
    changed = attend(batch.attend, shape, near_split=32)
    assert not torch.equal(changed, attend(batch.attend, shape))


def test_a_block_size_that_is_no_power_of_two_is_refused() -> None:
    cache, index = torch.zeros(3, 24, 1, 24), torch.zeros(2, dtype=torch.int32)
    kv = LatentKV(cache, index, index[:1], index.view(1, 2), index[:1])
    with pytest.raises(ValueError, match="block size 24"):
        launch.attention(torch.zeros(1, 4, 24), kv, 1.0, 16)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
def test_matmuls_of_heads(num_rows: int) -> None:
    query = torch.randn(3, num_rows, 24 + 8).transpose(0, 1)
    weight = torch.randn(3, 24 + 12, 48)  # as a layer has it
    to_latent, to_values = weight[:, :24], weight[:, 24:].transpose(1, 2)
    latent = head_matmul_kernel.head_matmul(query, to_latent)
    torch.testing.assert_close(
        latent[..., :48].double(), float64_heads(query[..., :24], to_latent), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(latent[..., 48:], query[..., 24:])
    values = head_matmul_kernel.head_matmul(latent[..., :48], to_values)
    torch.testing.assert_close(
        values.double(), float64_heads(latent[..., :48], to_values), rtol=1e-5, atol=1e-4
    )


def test_vectors_are_stored() -> None:
    latent, rope = torch.randn(4, 30)[:, :24], torch.randn(4, 16)[:, 8:]
    cache = torch.zeros(3, 16, 1, 32)
    slots = torch.tensor([17, 3, 47, 18])
    store_kernel.store_latent(latent, rope, cache, slots)
    assert torch.equal(cache.view(-1, 32)[slots], torch.cat((latent, rope), 1))
    assert cache.count_nonzero() == 4 * 32


def tables(num_rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """As a region leaves them: the columns of a matrix with a row per angle."""
    angles = torch.randn(dim // 2, num_rows).T[None] * 9
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rank", "dim"), [(24, 8), (64, 12)])
def test_normalised_and_rotated_vectors_are_stored(dtype: torch.dtype, rank: int, dim: int) -> None:
    merged = torch.randn(1, 5, 7 + rank + dim).to(dtype)
    latent, rope = merged[..., 7 : 7 + rank], merged[..., 7 + rank :].view(1, 1, 5, dim)
    weight = torch.rand(rank).to(dtype) + 0.5
    inputs = LatentInputs(latent, rope, *tables(5, dim), weight, 1e-6, "rounded")
    cache = torch.zeros(3, 16, 1, rank + dim, dtype=dtype)
    slots = torch.tensor([17, 3, 47, 18, 20])
    store_kernel.norm_rope_store_latent(inputs, cache, slots)
    stored = cache.view(-1, rank + dim)[slots]
    assert torch.equal(stored[:, :rank], rms_norm.rms_norm(latent, weight, 1e-6, "rounded")[0])
    by_torch = torch.zeros_like(cache)
    dispatch.norm_rope_store_latent(inputs, by_torch, slots)
    rows = by_torch.view(-1, rank + dim)[slots]
    torch.testing.assert_close(stored[:, :rank], rows[:, :rank])
    assert torch.equal(stored[:, rank:], rows[:, rank:])
    assert cache.view(-1, rank + dim).any(1).sum() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [8, 12])
def test_queries_are_rotated_behind_the_matmul(dtype: torch.dtype, dim: int) -> None:
    query = torch.randn(5, 3, 24 + dim).to(dtype)
    weight = torch.randn(3, 24, 48).to(dtype)
    cos, sin = tables(5, dim)
    found = head_matmul_kernel.head_matmul(query, weight, (cos, sin))
    plain = head_matmul_kernel.head_matmul(query, weight)
    assert torch.equal(found[..., :48], plain[..., :48])
    assert torch.equal(found[..., 48:], dispatch.rotate_pairs(query[..., 24:], cos, sin))
    assert not torch.equal(found[..., 48:], plain[..., 48:])
    one = head_matmul_kernel.head_matmul(query[3:4], weight, (cos[:, 3:4], sin[:, 3:4]))
    assert torch.equal(one, found[3:4])
