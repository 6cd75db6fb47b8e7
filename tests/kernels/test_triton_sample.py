"""Simple sampling by the Triton kernels, under the interpreter, against the torch sampler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pagespec.kernels.sampling import SamplingInputs, sample

triton_sample = pytest.importorskip("pagespec.kernels.triton_sample")

VOCAB = 5000  # two stretches


def draw(logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]) -> list:
    sampled = torch.full((len(logits) + 1,), -1)
    triton_sample.sample_simple(
        logits,
        torch.tensor(temperatures),
        torch.tensor(seeds),
        torch.tensor(positions),
        sampled,
    )
    assert sampled[-1] == -1
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


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [4097, 30, 1024]] = 1.0
    logits[1, [4999, 4100]] = 2.0
    assert draw(logits, [0.0] * 3, [0] * 3, [0] * 3) == [30, 4100, 0]


def test_frequencies_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = torch.full((600, 8), -math.inf)
    logits[:, :4] = probabilities.log() * 0.7  # undone by the temperature
    tokens = draw(logits, [0.7] * 600, list(range(600)), [3] * 600)
    counts = torch.bincount(torch.tensor(tokens), minlength=4) / 600
    # Five standard deviations of the commonest.
    assert (counts - probabilities).abs().max() < 0.1
