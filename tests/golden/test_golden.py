"""Token-for-token and logit-for-logit equality with Hugging Face `generate`, under conditions
from friendly to hostile. `python -m tests.golden` prints the table of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.harness import Condition, check
from tests.golden.subjects import (
    BEYOND_CONDITIONS,
    SMOLLM2_CONDITIONS,
    TINY_CONDITIONS,
    beyond,
    reach,
    smollm2,
    tiny,
)
from tests.support.models import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("condition", TINY_CONDITIONS, ids=lambda c: c.name.replace(" ", "-"))
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


# Each condition is run on every tiny model; on the large one those that meet the others' cases too.
SMOLLM2_BY_DAY = ("plain", "tiny pool+cache", "overlap", "budget 16")


def smollm2_cases() -> list[Any]:
    names = [condition.name for condition in SMOLLM2_CONDITIONS]
    assert set(SMOLLM2_BY_DAY) <= set(names)
    return [
        pytest.param(
            condition,
            id=condition.name.replace(" ", "-"),
            marks=() if condition.name in SMOLLM2_BY_DAY else pytest.mark.nightly,
        )
        for condition in SMOLLM2_CONDITIONS
    ]


@pytest.mark.smollm2
@pytest.mark.parametrize("condition", smollm2_cases())
def test_smollm2_equals_generate(condition: Condition) -> None:
    subject, reference = smollm2()
    check(subject.run(condition, reference), condition)
