"""The Gluon matmul without a GPU: the shapes that it supports, and its compiled form for Hopper.

Triton's interpreter does not run Gluon; tests/kernels/matmul/test_dispatch_gpu.py runs it.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import astuple
from pathlib import Path

import pytest

from pagespec.kernels.arch import Arch
from tests.support.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


# num_outs, K, has_gate of Qwen3-0.6B and 8B, and what was the quickest on an H100.
MEASURED = {
    (4096, 1024, False): (64, 4, 4),
    (1024, 2048, False): (32, 8, 4),
    (3072, 1024, True): (32, 4, 4),
    (1024, 3072, False): (16, 8, 6),
    (6144, 4096, False): (64, 4, 5),
    (4096, 4096, False): (32, 4, 8),
    (12288, 4096, True): (32, 4, 5),
    (4096, 12288, False): (32, 4, 8),
}

# Of Qwen3-0.6B and SmolLM2-135M, where one launch computes the norm, too.
WITH_NORM = {
    (4096, 1024, False): (64, 4, 4),
    (3072, 1024, True): (32, 4, 4),
    (1536, 576, True): (32, 1, 9),
}


def test_a_tile_takes_what_shared_memory_holds() -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.tiles import choose_prefetch_tile, fastest_custom_rows
    from pagespec.kernels.matmul.tuned_tiles import TUNED_PREFETCH, PrefetchTile

    card = Gpu(132, 227 << 10, Arch("sm90", has_gluon=True))
    for shape, tile in MEASURED.items():
        assert choose_prefetch_tile(16, *shape, card) == PrefetchTile(*tile), shape
    for (n, k, has_gate), tiles in TUNED_PREFETCH.items():
        assert all(tile.fits(n, k, has_gate) for tile in tiles.values()), (n, k)
        chosen = [choose_prefetch_tile(rows, n, k, has_gate, card) for rows in (17, 33, 65, 129)]
        assert chosen == [tiles.get(bucket) for bucket in (32, 64, 128, 256)]
        assert fastest_custom_rows(n, k, has_gate, card) >= max(tiles)
        assert choose_prefetch_tile(257, n, k, has_gate, card) is None
    # Other short weights: enough programs, at most 64 rows.
    assert choose_prefetch_tile(20, 2048, 1024, False, card) == PrefetchTile(64, 4, 4, 32)
    assert choose_prefetch_tile(20, 1024, 1024, False, card) == PrefetchTile(32, 4, 4, 32)
    assert choose_prefetch_tile(64, 1536, 576, True, card) == PrefetchTile(32, 1, 4, 32)
    assert choose_prefetch_tile(65, 2048, 1024, False, card) is None
    assert choose_prefetch_tile(20, 8192, 8192, False, card) is None
    for n, k, has_gate in ((2048, 1024, False), (2560, 960, False), (1536, 576, True)):
        chosen = choose_prefetch_tile(1, n, k, has_gate, card)
        assert chosen is not None
        assert chosen.stages * chosen.atoms * 64 == k
        rows = chosen.part * (1 + has_gate)
        assert (rows + 16) * k * 2 + 1024 <= 227 << 10
    for n, k, has_gate in ((151936, 1024, False), (128256, 4096, False), (25600, 5120, True)):
        chosen = choose_prefetch_tile(1, n, k, has_gate, card)
        assert chosen is not None
        assert chosen.part * (1 + has_gate) == 64, "two programs to a multiprocessor"
    assert choose_prefetch_tile(1, 50257, 1024, False, card) is None  # no whole parts
    assert choose_prefetch_tile(1, 1024, 1000, False, card) is None  # no whole atoms
    assert choose_prefetch_tile(1, 512, 16384, False, card) is None  # too few
    assert not PrefetchTile(128, 1, 4).fits(4096, 1024, has_gate=True)  # 256 rows
    assert not PrefetchTile(32, 4, 4).fits(4090, 1024, has_gate=False)
    assert not PrefetchTile(32, 4, 8).fits(4096, 1024, has_gate=False)  # more stages than steps
    assert not PrefetchTile(48, 4, 4).fits(4800, 1024, has_gate=False)  # no power of two
    assert not PrefetchTile(32, 3, 3).fits(4096, 576, has_gate=False)


def test_it_compiles_for_hopper_and_asks_for_weights_before_it_waits() -> None:
    from pagespec.kernels.arch import is_gluon_known
    from pagespec.kernels.matmul.tuned_tiles import TUNED_PREFETCH

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")
    cases = [
        (False, rows, *shape, *tile, 16) for shape, tile in MEASURED.items() for rows in (2, 16)
    ]
    for n, k in ((1024, 2048), (3072, 1024)):
        for rows, tile in TUNED_PREFETCH[n, k, n == 3072].items():
            cases.append((False, rows, n, k, n == 3072, *astuple(tile)))
    cases += [(True, rows, *shape, *WITH_NORM[shape], 16) for shape in WITH_NORM for rows in (2, 4)]
    # Of Qwen3-30B-A3B's o and Granite-4-H-Tiny's first projection, as few rows take them.
    cases += [
        (False, 2, 2048, 4096, False, 32, 4, 11, 8),
        (False, 2, 6448, 1536, False, 16, 2, 8, 8),
    ]
    script = Path(__file__).with_name("compile_matmul_sm90.py")
    printed = run_apart(str(script), json.dumps(cases))
    for case, order in zip(cases, json.loads(printed), strict=True):
        has_norm, num_rows, n, k_size, has_gate, _, atoms, stages, _ = case
        num_steps = k_size // (64 * atoms)
        ahead, behind = order.split("w")
        # Few rows let the next kernel start behind their wait, others first of all.
        is_late = num_rows <= 4
        assert (ahead[0] == "d", behind[0] == "d") == (not is_late, is_late), (case, order)
        ahead, behind = ahead.lstrip("d"), behind.lstrip("d")
        # They ask for 6 MiB before it at most; all of it, where stages are used again.
        num_asked = stages
        if is_late and num_steps == stages:
            num_asked = min(stages, stages * (6 << 20) // (n * (1 + has_gate) * k_size * 2))
        asked_behind = stages - num_asked
        if has_norm:  # the norm's weight is loaded with the matmul's; x and the residual follow
            loads = (4 if num_rows == 4 else 2) * 2 * "l"
            products = num_steps * atoms * 4 * "m"
            assert ahead == num_asked * "t" + "l", (case, order)
            assert behind == loads + asked_behind * "t" + products, (case, order)
            continue
        assert ahead == num_asked * "t", (case, order)
        # x behind the wait; where stages are used again, both once more in the loop.
        assert behind.startswith(stages * "t"), (case, order)
        num_copies = asked_behind + stages + (2 if num_steps > stages else 0)
        assert behind.count("t") == num_copies, (case, order)
        assert behind.count("m") == 4 * atoms, (case, order)  # 16 summands each


def test_rows_of_four_warps_may_have_their_norm_joined() -> None:
    from pagespec.kernels.arch import is_gluon_known
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.tiles import choose_prefetch_tile
    from pagespec.kernels.matmul.tuned_tiles import PrefetchTile

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")
    from pagespec.kernels.matmul.sm90.matmul_sm90 import serves_norm

    card = Gpu(132, 227 << 10, Arch("sm90", has_gluon=True))
    for shape, tile in WITH_NORM.items():
        chosen = choose_prefetch_tile(1, *shape, card)
        assert chosen == PrefetchTile(*tile, x_rows=8), shape
        assert serves_norm(1, shape[1], chosen, shape[2])
    for n, k, has_gate in ((1024, 512, False), (4096, 2048, False), (6144, 4096, False)):
        chosen = choose_prefetch_tile(1, n, k, has_gate, card)
        assert chosen is not None
        assert not serves_norm(1, k, chosen, has_gate)
    assert not serves_norm(1, 1024, PrefetchTile(64, 4, 3), has_gate=False)  # stages are used again
    assert not serves_norm(1, 1024, PrefetchTile(64, 4, 4), has_gate=True)  # two warpgroups
