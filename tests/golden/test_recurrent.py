"""Models with recurrent layers match Hugging Face `generate` under all golden conditions."""

from __future__ import annotations

import pytest

from tests.golden.harness import Condition, check
from tests.golden.subjects import MAX_RELATIVE_ERRORS, RECURRENT_CONDITIONS, tiny
from tests.support.tiny_configs import RECURRENT

# By day: one of each recurrence, a model whose layers have attention and a scan beside each other,
# and one without attention; under those conditions that meet the others' cases too.
_BY_DAY = ("lfm2", "qwen3_next", "kimi_linear", "falcon_h1", "jamba", "mamba2")
_DAY_CONDITIONS = ("tiny pool+cache", "budget 16")


_RUNS = [
    pytest.param(
        arch,
        condition,
        id=f"{arch}-{condition.name.replace(' ', '-')}",
        marks=() if arch in _BY_DAY and condition.name in _DAY_CONDITIONS else pytest.mark.nightly,
    )
    for arch in RECURRENT
    for condition in RECURRENT_CONDITIONS
]


@pytest.mark.parametrize(("arch", "condition"), _RUNS)
def test_recurrent_models_equal_generate(arch: str, condition: Condition) -> None:
    subject, reference = tiny(arch)
    check(subject.run(condition, reference), condition, MAX_RELATIVE_ERRORS[arch])
