"""The Hopper latent prefill kernel without a GPU: supported shapes, and its compiled form.

Triton's interpreter does not run Gluon. GPU tests compare the bits.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

USUAL = {"heads": 16, "rank": 512, "rope": 64, "page": 16}
TAKEN: list[dict[str, Any]] = [
    USUAL,
    USUAL | {"heads": 128, "page": 64, "dtype": "float16"},
    USUAL | {"heads": 128, "page": 256},
    {"heads": 40, "rank": 256, "rope": 32, "page": 32},
]
LEFT: list[dict[str, Any]] = [
    USUAL | {"dtype": "float32"},
    USUAL | {"rank": 128},
    USUAL | {"rope": 0},
    USUAL | {"rope": 12},
    USUAL | {"page": 8},
    USUAL | {"transposed": True},
]


def test_it_compiles_for_hopper_and_leaves_what_it_does_not_know() -> None:
    from pagespec.kernels.arch import is_gluon_known

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")
    script = Path(__file__).with_name("compile_prefill_sm90.py")
    printed = run_apart(str(script), json.dumps({"fits": TAKEN + LEFT, "build": TAKEN}))
    answer = json.loads(printed)
    # Never on a CPU.
    assert answer["fits"] == [[True, False]] * len(TAKEN) + [[False, False]] * len(LEFT)
    for case, built in zip(TAKEN, answer["built"], strict=True):
        # C7510 and similar warnings: serialised matmuls.
        assert built["warnings"] == [], case
        # Outside of the loops.
        assert built["spilled"] <= 32, case
        assert built["shared"] <= 227 << 10, case
        # Of the warpgroups that sum, the one that weighs, and the warp that loads.
        assert {200, 88, 24} <= set(built["registers"]), case
        assert built["roundings"] == ["div.full.f32", "ex2.approx.ftz.f32"], case
