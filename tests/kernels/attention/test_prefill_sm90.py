"""The Hopper prefill kernel without a GPU: the shapes that it supports, and its compiled form.

Triton's interpreter does not run Gluon. GPU tests compare the bits.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.apart import by_day_and_night, run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

USUAL = {"hq": 32, "hkv": 8, "dim": 128, "page": 16}
TAKEN: list[dict[str, Any]] = [
    USUAL,
    {"hq": 8, "hkv": 8, "dim": 128, "page": 64, "dtype": "float16"},
    {"hq": 16, "hkv": 8, "dim": 64, "page": 256, "window": 100, "sinks": True},
    {"hq": 14, "hkv": 2, "dim": 128, "page": 32, "softcap": 30.0},
    {"hq": 32, "hkv": 32, "dim": 96, "page": 16, "window": 2047},
    {"hq": 8, "hkv": 4, "dim": 256, "page": 128, "window": 1024, "softcap": 50.0},
    {"hq": 8, "hkv": 1, "dim": 192, "v_dim": 128, "page": 16},
    USUAL | {"scales": True},
    {"hq": 8, "hkv": 4, "dim": 256, "page": 128, "window": 1024, "softcap": 50.0, "scales": True},
    USUAL | {"e4m3": True},
    USUAL | {"e4m3": True, "scales": True, "page": 64},
    {"hq": 9, "hkv": 3, "dim": 64, "page": 32, "window": 128, "sinks": True, "e4m3": True},
]
LEFT: list[dict[str, Any]] = [
    USUAL | {"dtype": "float32"},
    USUAL | {"dim": 32},
    USUAL | {"dim": 72},
    USUAL | {"dim": 64, "v_dim": 128},
    USUAL | {"page": 8},
    USUAL | {"hq": 256, "hkv": 1},
    USUAL | {"transposed": True},
    USUAL | {"e4m3": True, "dim": 256},
    USUAL | {"e4m3": True, "dim": 96},
    USUAL | {"e4m3": True, "dtype": "float32"},
    USUAL | {"e4m3": True, "page": 8},
]


@pytest.mark.parametrize("cases", by_day_and_night(TAKEN, 0, 10))
def test_it_compiles_for_hopper_and_leaves_what_it_does_not_know(
    cases: list[dict[str, Any]],
) -> None:
    from pagespec.kernels.arch import is_gluon_known

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")
    script = Path(__file__).with_name("compile_prefill_sm90.py")
    printed = run_apart(str(script), json.dumps({"fits": TAKEN + LEFT, "build": cases}))
    answer = json.loads(printed)
    # Never on a CPU.
    assert answer["fits"] == [[True, False]] * len(TAKEN) + [[False, False]] * len(LEFT)
    for case, built in zip(cases, answer["built"], strict=True):
        # C7510 and similar warnings: serialised matmuls.
        assert built["warnings"] == [], case
        # Outside of the loops; over e4m3 numbers beside folds and in the loop that masks.
        most = 1200 if case.get("e4m3") else 160 if case["dim"] > 128 else 16
        assert built["spilled"] <= most, case
        assert built["shared"] <= 227 << 10, case
        # Of each warpgroup that multiplies, and of the one that loads, or loads and converts.
        assert ({56, 224} if case.get("e4m3") else {24, 240}) <= set(built["registers"]), case
        assert built["repeated_pairs"] == [], case  # of zeros quantised for padding, say
        rounded = ["div.rn.f32"] if case.get("scales") else []
        assert built["roundings"] == ["div.full.f32", *rounded, "ex2.approx.ftz.f32"], case
