"""Tokens of edited rows are drawn with the reference probabilities; the seeds are fixed."""

from __future__ import annotations

import pytest

from tests.kernels.sampling.frequencies import CASES, run
from tests.support.plain_sampling import edited_logits


@pytest.mark.parametrize("case", CASES)
def test_draws_fit_the_definition(case: str) -> None:
    found = run(case, num_draws=8_000)
    assert found.num_impossible == 0
    assert found.num_cells > 5
    assert found.p > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_many_draws_fit_the_definition(case: str) -> None:
    found = run(case)
    assert (found.num_impossible, found.p > 1e-3) == (0, True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_draws_on_a_gpu_fit_the_definition(case: str) -> None:
    found = run(case, "cuda")
    assert (found.num_impossible, found.p > 1e-3) == (0, True)


def test_a_wrong_probability_is_noticed() -> None:
    """A control: counting prompt tokens as output tokens would be detected."""

    def wrong(logits, prompt, output, *rest, **named):  # type: ignore[no-untyped-def]
        return edited_logits(logits, [], [*prompt, *output], *rest, **named)

    assert run("frequency_penalty", num_draws=8_000, define=wrong).p < 1e-6
