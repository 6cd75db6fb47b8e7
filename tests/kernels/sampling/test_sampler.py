"""The sampler: Philox test vectors, distributions, masks, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pagespec.kernels.sampling.sampler import SamplingInputs, greedy, philox4x32, sample


def inputs(num_rows: int, **over: list) -> SamplingInputs:
    base: dict[str, list] = {
        "temperature": [1.0] * num_rows,
        "top_k": [0] * num_rows,
        "top_p": [1.0] * num_rows,
        "min_p": [0.0] * num_rows,
        "seeds": list(range(num_rows)),
        "positions": [7] * num_rows,
    }
    return SamplingInputs.from_lists(**{**base, **over})


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """Random123's kat_vectors for philox4x32, 10 rounds."""

    def words(text: str) -> list[np.uint64]:
        return [np.uint64(int(word, 16)) for word in text.split()]

    out = philox4x32(words(counter), words(key))
    assert [int(word[0]) for word in out] == [int(word, 16) for word in expected.split()]


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.randn(5, 300)
    logits[0, [250, 17, 99]] = 9.0
    logits[1] = 0.0
    logits[2, [299, 298]] = float("inf")
    assert greedy(logits).tolist()[:3] == [17, 0, 298]
    assert torch.equal(greedy(logits)[3:], logits[3:].argmax(-1))
    assert torch.equal(sample(logits, None), greedy(logits))


def empirical(logits: Tensor, num_draws: int, **params: float) -> Tensor:
    """Token frequencies over many positions of one request."""
    over = {name: [value] * num_draws for name, value in params.items()}
    drawn = sample(
        logits.expand(num_draws, -1),
        inputs(num_draws, seeds=[3] * num_draws, positions=list(range(num_draws)), **over),
    )
    return torch.bincount(drawn, minlength=logits.shape[-1]).double()


@pytest.mark.parametrize(
    ("params", "mask"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"temperature": 0.5}, [1, 1, 1, 1, 1, 1, 1]),
        ({"top_k": 3}, [1, 0, 1, 0, 1, 0, 0]),
        ({"top_p": 0.6}, [1, 0, 0, 0, 1, 0, 0]),
        ({"min_p": 0.3}, [1, 0, 1, 0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 0, 0, 0, 1, 0, 0]),
    ],
)
def test_frequencies_follow_the_masked_softmax(params: dict[str, float], mask: list[int]) -> None:
    # Probabilities 0.26 0.02 0.16 0.05 0.43 0.05 0.03 (about).
    logits = torch.tensor([2.0, -0.5, 1.5, 0.3, 2.5, 0.3, 0.0])
    expected = logits / params.get("temperature", 1.0)
    expected = expected.masked_fill(torch.tensor(mask) == 0, float("-inf")).double().softmax(-1)
    num_draws = 20_000
    counts = empirical(logits, num_draws, **params)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts - num_draws * expected)[kept] ** 2 / (num_draws * expected[kept])).sum()
    # 99.99% quantile of chi-square with 6 degrees of freedom is 27.9.
    assert chi_square < 27.9


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    num_rows, vocab_size = 12, 1003
    logits = torch.randn(num_rows, vocab_size) * 3
    params: dict[str, list] = {
        "temperature": [0.0, 0.7, 1.0, 1.5] * 3,
        "top_k": [0, 0, 5, 0, 40, 0, -1, 1, 0, 0, 0, 900],
        "top_p": [1.0, 0.9, 1.0, 0.3, 1.0, 1.0] * 2,
        "min_p": [0.0, 0.0, 0.05, 0.0] * 3,
        "seeds": [(1 << 64) - 1, -1, 0, 1, 1 << 63, 5, 6, 7, 8, 9, 10, 11],
        "positions": list(range(100, 112)),
    }
    together = sample(logits, inputs(num_rows, **params))
    order = list(range(num_rows))[::-1]
    reverse = sample(
        logits[order], inputs(num_rows, **{k: [v[i] for i in order] for k, v in params.items()})
    )
    assert reverse.tolist() == together.tolist()[::-1]
    for row in range(num_rows):
        alone = sample(logits[row : row + 1], inputs(1, **{k: [v[row]] for k, v in params.items()}))
        assert alone.item() == together[row].item()


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(64, 1000)
    by_seed = sample(logits, inputs(64, seeds=list(range(64))))
    by_high_seed = sample(logits, inputs(64, seeds=[i << 40 for i in range(64)]))
    by_position = sample(logits, inputs(64, seeds=[1] * 64, positions=list(range(64))))
    for draws in (by_seed, by_high_seed, by_position):
        assert len(set(draws.tolist())) > 50


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.randn(4, 500) * 50
    drawn = sample(logits, inputs(4, temperature=[temperature] * 4, top_p=[0.9] * 4))
    assert ((drawn >= 0) & (drawn < 500)).all()
    if temperature < 1e-3:
        assert torch.equal(drawn, logits.argmax(-1))
