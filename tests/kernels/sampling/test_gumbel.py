"""Simple sampling by the Triton kernels, under Triton's interpreter, against the torch sampler."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagespec.kernels.sampling.sampler import SamplingInputs, sample

triton_sample = pytest.importorskip("pagespec.kernels.sampling.gumbel")

VOCAB = 5000  # two stretches, the last group in part
INF = math.inf


def draw(logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]) -> list:
    sampled = torch.full((len(logits) + 1,), -1)
    steps = torch.full((3, len(sampled)), -1)
    results = triton_sample.Results(steps, torch.tensor([1], dtype=torch.int32))
    inputs = (torch.tensor(temperatures), torch.tensor(seeds), torch.tensor(positions))
    triton_sample.sample_simple(logits, *inputs, sampled, results)
    assert sampled[-1] == -1
    assert torch.equal(steps[1], sampled)  # and no other
    assert (steps[::2] == -1).all()
    without = torch.full_like(sampled, -1)
    triton_sample.sample_simple(logits, *inputs, without)
    assert torch.equal(without, sampled)
    return sampled[:-1].tolist()


def expected(logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]):
    n = len(logits)
    inputs = SamplingInputs.from_lists(
        temperature=temperatures,
        top_k=[0] * n,
        top_p=[1.0] * n,
        min_p=[0.0] * n,
        seeds=seeds,
        positions=positions,
    )
    return sample(logits, inputs).tolist()


def test_the_same_tokens_as_the_sampler_of_the_cpu() -> None:
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    temperatures = [0.0, 0.3, 0.7, 1.0, 2.0, 5.0] * 2
    seeds = [-3, 1, 1 << 62, 77, 5, 6] * 2
    positions = [1, 2, 3, 4, 5, 6, 7, 1 << 20, 9, 10, 11, 12]
    found = draw(logits, temperatures, seeds, positions)
    assert found == expected(logits, temperatures, seeds, positions)
    assert len(set(found)) > 6


def test_a_row_depends_on_nothing_beside_it() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    temperatures, seeds, positions = [0.0, 1.0, 1.0, 0.5, 1.0], [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]
    together = draw(logits, temperatures, seeds, positions)
    alone = [
        draw(logits[i : i + 1], temperatures[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0]
        for i in range(5)
    ]
    assert together == alone


def test_many_rows_of_any_temperature_get_the_tokens_of_the_cpu() -> None:
    n = 64
    logits = torch.randn(n, 1777, generator=torch.Generator().manual_seed(3)) * 3
    temperatures = [0.0, 1e-30, 1e-5, 0.05, 0.6, 1.0, 3.0, 1e6] * (n // 8)
    seeds = [(-1) ** i * (i << 37) + i for i in range(n)]
    positions = [(i << 30) + 7 for i in range(n)]
    found = draw(logits, temperatures, seeds, positions)
    assert found == expected(logits, temperatures, seeds, positions)
    highest = logits.argmax(-1).tolist()
    for i in range(n):
        if temperatures[i] < 1e-3:
            assert found[i] == highest[i]
    assert len(set(found[7::8])) == n // 8  # as good as uniform
    # Where temperatures are high, groups are drawn alike, the part of one at the end too.
    assert max(found[7::8]) > 1536


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_infinite_and_missing_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(10, 1300, generator=torch.Generator().manual_seed(4)) * 2
    masked = torch.rand(10, 1300, generator=torch.Generator().manual_seed(5)) < 0.9
    logits[masked] = -INF
    logits[2, :1024] = -INF  # groups without a token
    logits[3] = -INF
    logits[4] = -INF
    logits[4, 1299] = -3e4
    logits[5, 777] = INF
    logits[6, [300, 301, 900]] = INF
    logits[7, ::2] = math.nan
    logits[8] = math.nan
    logits = logits.to(dtype)
    for temperature in (1e-5, 0.7, 1e6):
        rows = [temperature] * 10, list(range(10)), [5] * 10
        found = draw(logits, *rows)
        assert found == expected(logits, *rows)
        assert all(logits[i, found[i]] > -INF for i in (0, 1, 2, 4, 5, 6, 7, 9))
        assert found[2] >= 1024
        assert found[3:6] == [0, 1299, 777]
        assert found[8] == 0
    greedy = draw(logits, [0.0] * 10, [0] * 10, [0] * 10)
    assert greedy[3:7] == [0, 1299, 777, 300]
    assert greedy[7] == logits[7].nan_to_num(-INF, INF, -INF).argmax()
    assert greedy[8] == 0


def test_each_of_several_infinite_logits_is_as_likely() -> None:
    n = 60
    logits = torch.zeros(n, 600)
    logits[:, [3, 100, 599]] = INF
    counts = torch.bincount(torch.tensor(draw(logits, [1.0] * n, list(range(n)), [1] * n)))
    assert counts.sum() == counts[[3, 100, 599]].sum()
    # 20 expected of each, of deviation 3.7.
    assert counts[[3, 100, 599]].min() > 5


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [4097, 30, 1024]] = 1.0
    logits[1, [4999, 4100]] = 2.0
    assert draw(logits, [0.0] * 3, [0] * 3, [0] * 3) == [30, 4100, 0]


def three_groups() -> Tensor:
    """The last group has one token; most tokens have hardly a chance."""
    row = torch.full((513,), -12.0)
    row[[0, 1, 255, 256, 300, 511, 512]] = torch.tensor([1.0, 0.2, 2.0, 1.5, -INF, 0.7, 1.8]) * 0.7
    return row


def test_tokens_of_three_groups_are_those_of_the_cpu() -> None:
    """So that their frequencies, below, are the kernel's as well."""
    rows = three_groups().repeat(40, 1), [0.7] * 40, list(range(40)), [3] * 40
    assert draw(*rows) == expected(*rows)


@pytest.mark.parametrize(
    ("sampler", "n"), [pytest.param(draw, 400, marks=pytest.mark.nightly), (expected, 4000)]
)
def test_frequencies_follow_the_softmax(sampler: Callable[..., list], n: int) -> None:
    row = three_groups()
    tokens = sampler(row.repeat(n, 1), [0.7] * n, list(range(n)), [3] * n)
    probabilities = (row.double() / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor(tokens), minlength=513).double()
    assert counts[300] == 0
    likely = probabilities > 5e-3
    assert likely.sum() == 6
    chi_square = ((counts - n * probabilities)[likely] ** 2 / (n * probabilities[likely])).sum()
    # 99.9% quantile of chi-square with 6 degrees of freedom.
    assert chi_square < 22.5
