"""The Hopper matmul for many rows without a GPU: when it is used, and its compiled form.

Triton's interpreter does not run Gluon; test_matmul_sm90_many_gpu.py runs it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagespec import kernels
from pagespec.kernels import arch
from pagespec.kernels.arch import Arch
from pagespec.kernels.device import Gpu
from pagespec.kernels.fused import dispatch as fused
from tests.support.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# N, K, has_gate: rate at 8,192, 2,048 and 512 rows on an H200, as a part of cuBLAS's.
MEASURED = {
    (12288, 4096, True): (1.096, 1.092, 1.088),
    (3072, 1024, True): (1.370, 1.353, 0.948),
    (14336, 4096, True): (1.099, 1.081, 0.907),
    (6144, 4096, False): (1.034, 1.033, 0.786),
    (4096, 4096, False): (1.023, 1.019, 0.574),
    (4096, 12288, False): (0.960, 1.009, 0.547),
    (4096, 1024, False): (1.143, 1.052, 0.655),
    (1024, 2048, False): (1.011, 0.596, 0.303),
    (1024, 3072, False): (1.002, 0.573, 0.268),
}
UNUSED_GAIN = (4096, 12288, False, 2048)


def test_it_is_taken_where_it_was_measured_to_be_quicker() -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.tiles import is_quicker_for_many_rows

    card = Gpu(132, 227 << 10, Arch("sm90", has_gluon=True))
    for shape, rates in MEASURED.items():
        for num_rows, rate in zip((8192, 2048, 512), rates, strict=True):
            is_expected = rate > 1 and (*shape, num_rows) != UNUSED_GAIN
            assert is_quicker_for_many_rows(num_rows, *shape, card) == is_expected, (
                shape,
                num_rows,
            )


def test_it_is_not_taken_beyond_what_was_measured() -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.tiles import is_quicker_for_many_rows, may_take_many_rows

    card = Gpu(132, 227 << 10, Arch("sm90", has_gluon=True))
    full = 128 * 132  # rows of a whole wave of tiles beside each other

    def is_taken(num_rows: int, num_outs: int, k_size: int, has_gate: bool = False) -> bool:
        taken = is_quicker_for_many_rows(num_rows, num_outs, k_size, has_gate, card)
        assert not taken or may_take_many_rows(num_outs, k_size, has_gate)
        return taken

    assert is_taken(full, 256, 1024)
    assert is_taken(full, 128, 1024, has_gate=True)
    assert is_taken(full, 4096, 5120, has_gate=True)
    assert not is_taken(full, 4096, 5120)
    assert not is_taken(full, 4096, 6144, has_gate=True)
    assert not is_taken(full, 64, 1024)  # three quarters of each tile
    assert not may_take_many_rows(64, 1024, False)
    assert is_taken(full, 248, 1024)
    assert not is_taken(full, 252, 1024)  # rows of the result are no whole 16-byte units
    assert is_taken(full, 256, 320)
    assert not is_taken(full, 256, 256)  # too few steps to store a tile beside
    assert not is_taken(full, 256, 1000)
    assert is_taken(512, 256 * 33, 1024)
    assert not is_taken(511, 256 * 33, 1024)


def test_it_compiles_for_hopper_and_reads_nothing_before_it_waits() -> None:
    """Without spills, and without matmuls that wait for each other (ptxas's C7515 and the like)."""
    from pagespec.kernels.arch import is_gluon_known

    if not is_gluon_known():
        pytest.skip("this Triton has another Gluon; no engine would use the kernel")
    cases = [(3072, 1024, True), (12288, 4096, True), (6144, 4096, False), (264, 320, False)]
    script = Path(__file__).with_name("compile_matmul_sm90_many.py")
    for case, made in zip(
        cases, json.loads(run_apart(str(script), json.dumps(cases))), strict=True
    ):
        # 4 of a stage, twice; the first stage, those beside which a tile is stored, the others.
        assert made["wgmma"] == 4 * 2 * ((1 + 4) + (case[1] > 320)), case
        assert made["ahead"] == 0, case
        assert "0 bytes spill stores, 0 bytes spill loads" in made["told"], (case, made["told"])
        assert "serialized" not in made["told"], (case, made["told"])
        assert made["shared"] <= 227 << 10, case
        assert (made["exponentials"] > 0) == case[2], case


def set_kernel(monkeypatch: pytest.MonkeyPatch, matmul: Any) -> None:
    """Use ``matmul`` in place of the kernel, which is not imported."""
    fake = SimpleNamespace(matmul_many=matmul)
    monkeypatch.setitem(sys.modules, "pagespec.kernels.matmul.sm90.matmul_sm90_many", fake)
    monkeypatch.setattr(kernels.matmul, "matmul_sm90_many", fake, raising=False)
    # Modules are imported once per process, and these stand-ins live for one test.
    uncached = getattr(arch._module_and_name, "__wrapped__", arch._module_and_name)
    monkeypatch.setattr(arch, "_module_and_name", uncached)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, as_gpu: Callable[[Gpu], None]) -> list[Any]:
    """The shapes of rows with which our kernel was called, as if on a Hopper GPU, and whether with
    a gate."""

    seen: list[Any] = []
    as_gpu(Gpu(3, 227 << 10, Arch("sm90", has_gluon=True)))  # of three multiprocessors

    def matmul_many(rows: Tensor, weight: Tensor, has_gate: bool) -> Tensor:
        seen.append((tuple(rows.shape), has_gate))
        out = F.linear(rows, weight)
        return fused.act_mul(*out.chunk(2, -1), "silu") if has_gate else out

    set_kernel(monkeypatch, matmul_many)
    return seen


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("has_gate", [False, True])
def test_many_rows_go_to_it_by_the_rule(has_gate: bool, launched: list[Any]) -> None:
    from pagespec.kernels.matmul import dispatch

    call = dispatch.linear_silu_mul if has_gate else dispatch.linear
    weight = normal(256, 320, seed=1)

    def check(x: Tensor, weight: Tensor = weight, bias: Tensor | None = None) -> Tensor:
        expected = F.linear(x, weight, bias)
        if has_gate:
            expected = fused.act_mul(*expected.chunk(2, -1), "silu")
        assert torch.equal(call(x, weight, bias, 0), expected)
        return expected

    # Tiles for two of three multiprocessors, one and a third waves, two, and three.
    for num_rows in (256, 512, 768, 1100):
        check(normal(1, num_rows, 320))
    norm = normal(320, seed=2), 1e-6, "rounded"
    x = normal(768, 320)
    out, _ = dispatch.norm_linear(x, x, *norm, weight, 0, has_gate)
    assert torch.equal(out, check(fused.add_rms_norm(x, x, *norm)[0]))
    check(normal(768, 640)[:, 320:])
    assert launched == [((n, 320), has_gate) for n in (768, 1100, 768, 768, 768)]
    launched.clear()
    check(x, bias=normal(256))
    check(x.half(), weight.half())
    check(x[:0])
    check(normal(768, 324)[:, :320])  # rows of no whole 16-byte units
    check(x, normal(256, 324)[:, :320])
    check(normal(320, 768).mT)
    assert launched == []


@pytest.mark.parametrize("num_rows", [512, 768])
def test_while_kernels_are_made_those_of_both_ways_are_launched(
    num_rows: int,
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a start makes all whose largest step goes but one way."""
    from pagespec.kernels.jit.parallel_build import parallel_build
    from pagespec.kernels.matmul import dispatch

    x, weight = normal(num_rows, 320), normal(256, 320, seed=1)
    act_mul, activations = fused.act_mul, []

    def watched(*args: Any) -> Tensor:
        activations.append(len(args[0]))
        return act_mul(*args)

    with parallel_build(torch.device("cpu")):
        dispatch.linear(x, weight, None, 0)
        dispatch.linear(x[:, :256], normal(256, 256), None, 0)  # which it cannot compute
        set_kernel(monkeypatch, lambda *args: launched.append(args[2]))
        monkeypatch.setattr(fused, "act_mul", watched)
        dispatch.linear_silu_mul(x, weight, None, 0)
    assert launched == [((num_rows, 320), False), True]
    assert activations == [num_rows]


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_plan_looks_at_its_bits(
    has_gate: bool, torch_calls: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagespec.kernels.matmul import plan as plans
    from pagespec.kernels.matmul.dispatch import ALL_ROWS

    weight = normal(16, 8, dtype=torch.float16)
    asked = []

    def matmul_many(rows: Tensor, weight: Tensor, has_gate: bool) -> Tensor:
        asked.append((len(rows), has_gate))
        # Row by row and in float64, so that the number of rows changes nothing.
        out = (rows.double() @ weight.double().T).half()
        return fused.act_mul(*out.chunk(2, -1), "silu") if has_gate else out

    torch_calls[F.linear] = lambda x, w: matmul_many(x, w, False)
    assert plans.many_differs(weight, None, has_gate) == ()  # no GPU, no kernel
    assert asked == []
    found = SimpleNamespace(function=lambda _: matmul_many)
    monkeypatch.setattr(plans, "many_rows_kernel", lambda *_: found)
    assert plans.many_differs(weight, None, has_gate) == ()
    assert asked[-1] == (plans.MANY_ROWS, has_gate)
    found.function = lambda _: lambda *args: matmul_many(*args) * 2
    assert plans.many_differs(weight, None, has_gate) == (plans.MANY_ROWS,)
    for differing, rows in (((), 16), ((plans.MANY_ROWS,), ALL_ROWS)):
        report = plans.SweepReport((1, 16, 512), (), (), differing)
        assert plans.plan_from(report, 16) == rows
