"""Which integers of a config the probe tests, and with which lengths of a forward pass."""

from __future__ import annotations

import pytest

from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.probe.thresholds import (
    MAX_PASS_TOKENS,
    PassCost,
    Threshold,
    plan_reach,
    thresholds_of,
)
from tests.support.models import ARCHITECTURES, WINDOW, tiny_model


def test_finds_integers_in_every_field() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 128}
    model = tiny_model(
        "llama",
        rope_parameters=rope,
        windows=[[None, 77]],
        rates={"a": {"b": 33}},
        flag=True,
        far=99_999,
    )
    loaded = load_model(model)
    found = {t.value: t for t in thresholds_of(loaded, probe_model(loaded))}
    assert found[128].fields == ("rope_parameters.original_max_position_embeddings",)
    assert found[77].fields == ("windows",)
    assert found[33].fields == ("rates.a.b",)
    assert not found[128].is_size
    assert found[48].is_size
    assert found[512].fields == ("max_position_embeddings",)  # more may be packed into a pass
    # Nothing gets as far as this; and flags and floats are no numbers of tokens.
    assert not {0, 1, 99_999, 10_000} & set(found)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_pass_goes_beyond_every_integer_of_a_tiny_model(arch: str) -> None:
    loaded = load_model(tiny_model(arch))
    specs = probe_model(loaded)
    thresholds = thresholds_of(loaded, specs)
    values = {t.value for t in thresholds}
    assert {spec.window for spec in specs} - {0} <= values
    assert WINDOW in values or not any(spec.window for spec in specs)
    plan = plan_reach(thresholds, PassCost(400, 12_000), 3 << 26)
    assert not plan.beyond
    assert plan.longest == max(values) + 1


def test_what_is_no_size_comes_first_where_not_all_is_affordable() -> None:
    window, width, far = (
        Threshold(1000, ("window",), False),
        Threshold(30, ("width",), True),
        Threshold(MAX_PASS_TOKENS + 2, ("far",), False),
    )
    plan = plan_reach([window, far, width], PassCost(1, 1000), 1_050_000)
    assert plan.beyond == (far,)
    assert [length for length, _ in plan.lengths] == [1, 31, 1001]
    plan = plan_reach([window, far, width], PassCost(1, 1000), 1 << 40)
    assert plan.beyond == (far,)
    assert [length for length, _ in plan.lengths] == [1, 29, 30, 31, 999, 1000, 1001]
