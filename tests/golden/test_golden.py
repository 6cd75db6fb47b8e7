"""The engine must match Hugging Face `generate` in tokens and logits under all conditions.

Conditions range from a large pool to tiny pools, small budgets, overlap and preemption. `python -m
tests.golden` prints the table of all of them.
"""

from __future__ import annotations

import pytest

from tests.golden.harness import Condition, check
from tests.golden.subjects import (
    BEYOND_CONDITIONS,
    FEW_CONDITIONS,
    SMOLLM2_CONDITIONS,
    TINY_CONDITIONS,
    beyond,
    reach,
    smollm2,
    tiny,
)
from tests.support.models import ARCHITECTURES


# All conditions of an architecture follow one another: its subject is made where they run.
@pytest.mark.parametrize("condition", TINY_CONDITIONS, ids=lambda c: c.name.replace(" ", "-"))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_models_equal_generate(arch: str, condition: Condition) -> None:
    subject, reference = tiny(arch)
    check(subject.run(condition, reference), condition)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_models_equal_generate_beyond_every_threshold(arch: str) -> None:
    subject, reference = beyond(arch)
    values = {threshold.value for threshold in reach(arch).thresholds}
    assert {len(prompt) for prompt in reference.prompts} >= {t + 1 for t in values if t < 500}
    assert not reach(arch).beyond
    for condition in BEYOND_CONDITIONS:
        check(subject.run(condition, reference), condition)


@pytest.mark.smollm2
@pytest.mark.parametrize("condition", FEW_CONDITIONS, ids=lambda c: c.name.replace(" ", "-"))
def test_smollm2_equals_generate(condition: Condition) -> None:
    """The conditions that include the events of the others."""
    subject, reference = smollm2(few=True)
    check(subject.run(condition, reference), condition)


@pytest.mark.smollm2
@pytest.mark.nightly
@pytest.mark.parametrize("condition", SMOLLM2_CONDITIONS, ids=lambda c: c.name.replace(" ", "-"))
def test_smollm2_equals_generate_on_many_prompts(condition: Condition) -> None:
    subject, reference = smollm2()
    check(subject.run(condition, reference), condition)
