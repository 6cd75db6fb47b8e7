"""The product in Gluon without a GPU: which shapes it takes, and that it compiles for Hopper.

Triton's interpreter does not run Gluon; tests/kernels/test_gpu_linear_gpu.py runs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_a_tile_takes_what_shared_memory_holds() -> None:
    from pagespec.kernels.linear_tiles import TUNED_EARLY, Card, EarlyTile, choose_early_tile

    card = Card(132, 227 << 10, has_early=True)
    for (n, k), tile in TUNED_EARLY.items():
        has_gate = n in (3072, 12288)
        assert tile.fits(n, k, has_gate)
        assert choose_early_tile(16, n, k, has_gate, card) == tile
        assert choose_early_tile(17, n, k, has_gate, card) is None
        assert choose_early_tile(1, n, k, has_gate, Card(132, 227 << 10)) is None
    for n, k, has_gate in ((2048, 1024, False), (2560, 960, False), (1536, 576, True)):
        chosen = choose_early_tile(1, n, k, has_gate, card)
        assert chosen is not None
        assert chosen.stages * chosen.atoms * 64 == k
        rows = chosen.part * (1 + has_gate)
        assert (rows + 16) * k * 2 + 1024 <= 227 << 10
    assert choose_early_tile(1, 151936, 1024, False, card) is None  # too many programs
    assert choose_early_tile(1, 1024, 1000, False, card) is None  # no whole atoms
    assert choose_early_tile(1, 4096, 16384, False, card) is None  # too long
    assert not EarlyTile(64, 4, 4).fits(4096, 1024, has_gate=True)  # 128 rows
    assert not EarlyTile(32, 4, 4).fits(4090, 1024, has_gate=False)
    assert not EarlyTile(32, 4, 8).fits(4096, 1024, has_gate=False)  # more stages than steps


def test_it_compiles_for_hopper_and_asks_for_weights_before_it_waits() -> None:
    from pagespec.kernels.linear_tiles import TUNED_EARLY, is_gluon_known

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")
    cases = [
        (rows, n, k, n in (3072, 12288), tile.part, tile.atoms, tile.stages)
        for (n, k), tile in TUNED_EARLY.items()
        for rows in (2, 16)
    ]
    cases.append((2, 4096, 12288, False, 32, 4, 5))  # stages used again and again
    script = Path(__file__).with_name("compile_gluon.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(cases)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for case, order in zip(cases, json.loads(done.stdout), strict=True):
        stages, num_steps = case[6], case[2] // (64 * case[5])
        ahead, behind = order.split("w")
        assert ahead == "d" + stages * "t", (case, order)
        # x behind the wait; where stages are used again, both once more in the loop.
        assert behind.startswith(stages * "t"), (case, order)
        assert behind.count("t") == stages + (2 if num_steps > stages else 0), (case, order)
        assert behind.count("m") == 4 * case[5], (case, order)  # 16 summands each
