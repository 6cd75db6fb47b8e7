"""The compiled form of the Hopper latent decode kernel, without a GPU.

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

LITE = {"heads": 16, "rank": 512, "rope": 64, "page": 16, "by_token": True, "is_split": True}
CASES: list[dict[str, Any]] = [
    LITE,
    LITE | {"is_split": False},
    LITE | {"by_token": False, "dtype": "float16"},
    LITE | {"page": 64},
    LITE | {"heads": 8, "rank": 256, "rope": 32},
]


def test_it_compiles_for_hopper() -> None:
    from pagespec.kernels.arch import is_gluon_known

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")
    script = Path(__file__).with_name("compile_decode_sm90.py")
    printed = run_apart(str(script), json.dumps(CASES))
    for case, built in zip(CASES, json.loads(printed), strict=True):
        # C7510 and similar warnings: serialised matmuls.
        assert built["warnings"] == [], case
        # Outside of the loops.
        assert built["spilled"] <= 32, case
        assert built["shared"] <= 227 << 10, case
        # Of the warp that loads, and of the warpgroup beside it.
        assert {40, 232} <= set(built["registers"]), case
        assert (
            {"ex2.approx.ftz.f32"}
            <= set(built["roundings"])
            <= {
                "ex2.approx.ftz.f32",
                "div.full.f32",
            }
        ), case
