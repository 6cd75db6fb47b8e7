"""Indexers and sparse attention on a GPU: against float64, and bit against bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.mla import launch
from pagespec.kernels.sparse import index_kernels
from tests.kernels.sparse.chosen import choice_of, choice_of_rows, float64_chosen
from tests.kernels.sparse.test_indexer import weights_of
from tests.support.paged import (
    Batch,
    Rows,
    Shape,
    arguments,
    latent_batch,
    latent_shape,
    make_batch,
    rescheduled,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

BF16 = torch.bfloat16
ROWS: Rows = [(0, 5), (700, 1), (1020, 9), (3, 1), (0, 0), (2048, 1), (440, 2), (77, 600)]
INDEXERS = [
    Shape(hq=64, hkv=1, dk=128, dv=1, block_size=64, dtype=BF16),
    Shape(hq=16, hkv=1, dk=64, dv=1, dtype=BF16),
    Shape(hq=6, hkv=1, dk=24, dv=1),
]
LATENTS = [
    latent_shape(128, 512, 64, block_size=64, dtype=BF16),
    latent_shape(16, 256, 32, dtype=torch.float16),
]
TOLERANCE = {BF16: 1.6e-2, torch.float16: 2e-3}
TOPK = 256


def chosen_of(attend: tuple, key: Tensor, slots: Tensor, topk: int = TOPK, **more: Any) -> Tensor:
    query, cache, _, starts, contexts, tables, table_rows, scale, *_ = attend
    of_step = (cache, slots, starts, contexts, tables, table_rows)
    return index_kernels.index_topk(query, key, weights_of(query), *of_step, scale, topk, **more)


def float64_scores(batch: Batch, rows: Rows, shape: Shape) -> Iterator[tuple[int, Tensor]]:
    """(token, scores of the positions it sees)."""
    query = batch.attend[0]
    weights = weights_of(query).double()
    token = 0
    for (start, n), (keys, _) in zip(rows, batch.histories, strict=True):
        for position in range(start, start + n):
            products = query[token].double() @ keys[: position + 1, 0].double().T
            yield token, weights[token] @ products.relu() * shape.dk**-0.5
            token += 1


@pytest.mark.parametrize("shape", INDEXERS, ids=str)
def test_chooses_the_highest_scores_in_view(shape: Shape) -> None:
    batch = make_batch(ROWS, shape, device="cuda")
    key, slots = batch.store[0][:, 0], batch.store[4]
    chosen = chosen_of(batch.attend, key, slots)
    assert (chosen[batch.num_tokens :] == -1).all()
    for token, scores in float64_scores(batch, ROWS, shape):
        at = chosen[token][: min(TOPK, len(scores))].long()
        assert (at.diff() > 0).all()
        assert (chosen[token][len(at) :] == -1).all()
        highest = scores.topk(len(at)).values
        found = scores[at].sort(descending=True).values
        torch.testing.assert_close(found, highest, rtol=1e-4, atol=1e-4)


def test_equal_scores_are_told_apart_as_torch_does() -> None:
    """One head and few values, so that most scores are equal. Rows of scores beyond a tile, too."""
    shape = Shape(hq=1, hkv=1, dk=16, dv=1, block_size=64)
    rows: Rows = [(0, 900), (9000, 3)]
    batch = make_batch(rows, shape, device="cuda")
    key, _, cache, _, slots = batch.store
    key, query = key.sign() * (key.abs() > 1), batch.attend[0].sign()
    cache.copy_(torch.where(cache.isnan(), cache, cache.sign() * (cache.abs() > 1)))
    chosen = chosen_of((query, cache, *batch.attend[2:]), key[:, 0], slots, 300)
    weights, token, num_tied = weights_of(query), 0, 0
    for (start, n), (keys, _) in zip(rows, batch.histories, strict=True):
        values = keys[:, 0].sign() * (keys[:, 0].abs() > 1)
        for position in range(start, start + n):
            if position >= 300:
                products = (query[token, 0] @ values[: position + 1].T * 0.25).relu()
                scores = weights[token, 0] * products
                wanted = scores.topk(300).indices.sort().values
                assert torch.equal(chosen[token].long(), wanted), position
                num_tied += int((scores >= scores[wanted].min()).sum()) > 300
            token += 1
    assert num_tied > 300


@pytest.mark.parametrize("shape", INDEXERS, ids=str)
def test_schedules_choose_alike(shape: Shape) -> None:
    length = 1300
    batch = make_batch([(0, length)], shape, num_padding=0, device="cuda")
    ops.kv_store(*batch.store)
    key, slots = batch.store[0][:, 0], batch.store[4]
    whole = chosen_of(batch.attend, key, slots)

    def again(chunks: list[tuple[int, int]], **more: Any) -> Tensor:
        tokens = torch.cat([torch.arange(a, b) for a, b in chunks]).cuda()
        return chosen_of(rescheduled(batch, chunks), key[tokens], slots[tokens], **more)

    chunks = list(pairwise([0, 1, 8, 40, 300, 301, 813, 1299, length]))
    assert torch.equal(again(chunks), whole)
    assert torch.equal(again(chunks, max_score_bytes=100 * 4 * 1408), whole)
    for step in (97, 7):
        decodes = [(p, p + 1) for p in range(0, length, step)]
        assert torch.equal(again(decodes), whole[::step])
    for position in (255, 256, 1299):
        assert torch.equal(again([(position, position + 1)])[0], whole[position])


@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_attention_sees_what_was_chosen(shape: Shape) -> None:
    batch = latent_batch(ROWS, shape, device="cuda")
    chosen = choice_of_rows(ROWS, TOPK).cuda()
    out = launch.attention(*arguments(batch.attend, shape.dv), indices=chosen)
    error = (out[: batch.num_tokens].double() - float64_chosen(batch, ROWS, shape, chosen)).abs()
    assert error.max().item() <= TOLERANCE[shape.dtype]  # false for NaN
    assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_schedules_attend_alike(shape: Shape) -> None:
    """Also where all positions are selected, with the bits of dense attention."""
    length = 1300
    batch = latent_batch([(0, length)], shape, num_padding=0, device="cuda")
    chosen = choice_of(list(range(length)), TOPK).cuda()
    whole = launch.attention(*arguments(batch.attend, shape.dv), indices=chosen)
    plain = launch.attention(*arguments(batch.attend, shape.dv))
    assert torch.equal(whole[:TOPK], plain[:TOPK])
    assert not torch.equal(whole[TOPK:], plain[TOPK:])
    for chunks in (
        list(pairwise([0, 1, 8, 40, 300, 301, 813, 1299, length])),
        *([(p, p + 1) for p in range(0, length, step)] for step in (433, 97, 7)),
    ):
        tokens = torch.cat([torch.arange(a, b) for a, b in chunks]).cuda()
        given = arguments(rescheduled(batch, chunks), shape.dv)
        assert torch.equal(launch.attention(*given, indices=chosen[tokens]), whole[tokens])
