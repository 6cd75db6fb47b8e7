"""The distribution that a row is sampled from: the Triton kernel, interpreted, against torch."""

from __future__ import annotations

import pytest
import torch

from pagespec.engine.sampling_params import SamplingParams
from pagespec.kernels.sampling.sampler import SamplingInputs, processed_scores

processed = pytest.importorskip("pagespec.kernels.sampling.top_k_top_p")
row_params = pytest.importorskip("pagespec.runner.row_params")

PARAMS = [
    SamplingParams(temperature=0.0, top_k=3),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=0.5, min_p=0.2),
    SamplingParams(temperature=3.0, top_k=40, top_p=0.9, min_p=0.02),
]


def test_the_scores_of_the_sampler() -> None:
    logits = torch.randn(len(PARAMS), 5000, generator=torch.Generator().manual_seed(1)) * 3
    logits[2, :9] = 20.0  # ties at the edge of what is kept
    inputs = SamplingInputs.from_lists(
        temperature=[p.temperature for p in PARAMS],
        top_k=[p.top_k for p in PARAMS],
        top_p=[p.top_p for p in PARAMS],
        min_p=[p.min_p for p in PARAMS],
        seeds=[0] * len(PARAMS),
        positions=[0] * len(PARAMS),
    )
    truncated = torch.from_numpy(row_params.truncated_fields(PARAMS)).reshape(-1)
    for places in ([0, 1, 2, 3, 4, 5], [5, 2], [3]):
        found = processed.processed_scores(
            logits, torch.tensor(places, dtype=torch.int32), truncated, inputs.temperature
        )
        expected = processed_scores(logits, inputs, torch.tensor(places))
        is_kept = expected > -torch.inf
        assert torch.equal(found > -torch.inf, is_kept)
        assert is_kept.sum(-1).min() < 5000 or places == [0]
        expected -= expected.amax(-1, keepdim=True)
        assert torch.allclose(found, expected, atol=1e-6)
    assert int((processed_scores(logits, inputs, torch.tensor([2])) > -torch.inf).sum()) == 5
