"""Log-probabilities by the Triton kernels, interpreted, and by torch, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pagespec.engine.config import MAX_LOGPROBS
from pagespec.kernels.sampling.logprob_rows import (
    MAX_TOP,
    ROW_WORDS,
    likeliest,
    logprob_rows,
)
from pagespec.runner.logprob_rows import HostLogprobRows

VOCAB = 5000  # two stretches, the last group in part
INF, NAN = math.inf, math.nan
Rows = Callable[[Tensor, list[int], list[int]], Tensor]


def by_kernels(logits: Tensor, tokens: list[int], num_top: list[int]) -> Tensor:
    kernels = pytest.importorskip("pagespec.kernels.sampling.logprobs")
    places = list(range(len(logits)))
    # Every second token is the one that was sampled.
    fields = torch.tensor([places, [-1 if i % 2 else t for i, t in enumerate(tokens)], num_top])
    rows = torch.full((len(logits), ROW_WORDS), -7, dtype=torch.int32)
    kernels.write_logprobs(logits, fields.int(), torch.tensor(tokens), rows)
    return rows


def by_torch(logits: Tensor, tokens: list[int], num_top: list[int]) -> Tensor:
    return logprob_rows(logits, torch.tensor(tokens), torch.tensor(num_top))


BOTH = pytest.mark.parametrize("compute", [by_kernels, by_torch])


def expected(row: Tensor, token: int, count: int) -> tuple[float, int, list[int], list[float]]:
    values = [-INF if math.isnan(x) else x for x in row.double().tolist()]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    largest = values[order[0]]
    if not math.isfinite(largest):
        logprobs = [NAN] * len(values)
    else:
        total = math.log(math.fsum(math.exp(x - largest) for x in values))
        logprobs = [x - largest - total for x in values]
    top = order[:count]
    return logprobs[token], order.index(token) + 1, top, [logprobs[i] for i in top]


def check(compute: Rows, logits: Tensor, tokens: list[int], num_top: list[int]) -> None:
    rows = HostLogprobRows(compute(logits, tokens, num_top).numpy())
    for i, (token, count) in enumerate(zip(tokens, num_top, strict=True)):
        logprob, rank, top, top_logprobs = rows.row(i, count)
        expected_logprob, expected_rank, expected_top, expected_logprobs = expected(
            logits[i], token, count
        )
        assert (rank, list(top)) == (expected_rank, expected_top)
        found = [logprob, *top_logprobs]
        np.testing.assert_allclose(found, [expected_logprob, *expected_logprobs], 2e-6, 2e-6)
        if token in top and not math.isnan(logprob):
            assert top_logprobs[list(top).index(token)] == logprob  # the same float


def test_the_kernel_returns_as_many_as_the_engine_allows_by_default() -> None:
    assert MAX_TOP == MAX_LOGPROBS


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(compute: Rows, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, VOCAB, generator=generator) * 4).to(dtype)
    likely = logits.argmax(-1).tolist()
    check(compute, logits, [likely[0], 0, VOCAB - 1, 255, 256], [20, 0, 1, 5, 20])


@BOTH
def test_ties_go_to_the_lowest_ids(compute: Rows) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 100::100] = 1.0  # 49 equal ones in 20 groups
    logits[2, [4097, 4098, 17]] = 2.0
    logits[3] = -0.0
    check(compute, logits, [4999, 4900, 4097, 3], [20, 20, 20, 20])


@BOTH
def test_infinite_and_missing_logits(compute: Rows) -> None:
    logits = torch.full((6, VOCAB), -INF)
    logits[0, [3, 4000]] = torch.tensor([1.0, 2.0])  # fewer than requested
    logits[2] = NAN
    logits[3, 7] = INF
    logits[4] = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    logits[4, ::3] = NAN
    logits[5, 9] = -3e38
    check(compute, logits, [3, 5, 6, 7, 3, 9], [4, 2, 2, 2, 20, 3])


@BOTH
@pytest.mark.parametrize("size", [1, 5, 256, 320])
def test_small_vocabularies(compute: Rows, size: int) -> None:
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
    check(compute, logits, [0, size - 1], [20, min(2, size)])


@BOTH
def test_a_row_depends_on_nothing_beside_it(compute: Rows) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(9, VOCAB, generator=generator)
    tokens = [int(t) for t in torch.randint(VOCAB, (9,), generator=generator)]
    num_top = [20] * 9
    together = compute(logits, tokens, num_top)
    for begin, end in ((0, 1), (3, 5), (8, 9), (2, 9)):
        part = compute(logits[begin:end].clone(), tokens[begin:end], num_top[begin:end])
        assert torch.equal(part, together[begin:end])
    order = torch.tensor([4, 0, 8, 2, 6])
    moved = compute(logits[order], [tokens[i] for i in order], [20] * 5)
    assert torch.equal(moved, together[order])


def test_kernels_read_the_places_they_are_given() -> None:
    kernels = pytest.importorskip("pagespec.kernels.sampling.logprobs")
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(6))
    sampled = torch.tensor([5, 600, 3, 2, 1, 0])
    fields = torch.tensor([[1, 4], [-1, 77], [3, 0]], dtype=torch.int32)
    rows = torch.zeros(2, ROW_WORDS, dtype=torch.int32)
    kernels.write_logprobs(logits, fields, sampled, rows)
    again = by_kernels(logits[[1, 4]], [600, 77], [3, 0])
    assert torch.equal(rows[0, :5], again[0, :5])
    assert torch.equal(rows[1, :2], again[1, :2])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tokens_in_order_have_the_floats_of_the_rows(compute: Rows, dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 700, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    logits[1, 5:300] = logits[1, 7]
    logits[2, 3:30], logits[2, 40] = -INF, NAN
    logits[3, 9] = INF
    rows = compute(logits, [0] * 4, [1, 20, 700, 21])
    for row, words in zip(logits, rows, strict=True):
        ids, logprobs = likeliest(words=words, logits=row, count=701)
        _, _, top, expected_logprobs = expected(row, 0, 700)
        assert ids.tolist() == top
        np.testing.assert_allclose(logprobs.numpy(), expected_logprobs, 2e-6, 2e-6)
    for row, words, count in zip(logits[:3], rows, (1, 20, 20), strict=False):
        ids, logprobs = likeliest(row, words, count)
        of_rows = HostLogprobRows(words[None].numpy()).row(0, count)
        assert (ids.tolist(), logprobs.tolist()) == (of_rows[2], of_rows[3])
