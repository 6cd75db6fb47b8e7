"""The Hopper matmul for many rows on a GPU, bit against bit: our other kernels, and cuBLAS."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagespec.kernels.fused import dispatch as fused
from tests.support.apart import run_apart
from tests.support.hopper import has_hopper_kernels

pytestmark = pytest.mark.gpu

# N, K, has_gate; the last of each: tiles that are not whole, and the least number of steps.
SHAPES = [
    (4096, 1024, False),
    (1024, 3072, False),
    (264, 320, False),
    (3072, 1024, True),
    (136, 320, True),
]
# Less than a tile; bands of 16 tiles of rows and more; several tiles a program.
ROWS = (1, 63, 64, 65, 127, 128, 129, 1000, 2049, 4173)


@pytest.fixture(autouse=True)
def _hopper_with_poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN: whatever a kernel does not write shows."""

    if not has_hopper_kernels():
        pytest.skip("not a Hopper GPU, or another Gluon")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(64, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def by_triton(x: Tensor, weight: Tensor, has_gate: bool) -> Tensor:
    from pagespec.kernels.matmul.matmul import Tile, matmul

    tile = Tile(block_m=64, block_n=64, block_k=64, num_stages=3, num_warps=4)
    return matmul(x, weight, tile=tile, has_gate=has_gate)


@pytest.mark.parametrize(("n", "k", "has_gate"), SHAPES, ids=str)
def test_bits_for_any_number_of_rows(n: int, k: int, has_gate: bool) -> None:
    from pagespec.kernels.matmul.sm90.matmul_sm90_many import matmul_many

    x, weight = normal(ROWS[-1], k), normal(n * (1 + has_gate), k, seed=1) / k**0.5
    expected = by_triton(x, weight, has_gate)
    for num_rows in ROWS:
        out = matmul_many(x[:num_rows], weight, has_gate)
        assert torch.equal(out, expected[:num_rows]), num_rows
    assert matmul_many(x[:0], weight, has_gate).shape == (0, n)
    wide = torch.cat([x, x + 1, x], 1)
    both = torch.cat([weight, weight + 1], 1)
    for rows in (x, wide[:, 2 * k :]):
        assert torch.equal(matmul_many(rows, both[:, :k], has_gate), expected)
    with pytest.raises(ValueError, match="does not suit"):
        matmul_many(x[:, : k - 64], weight, has_gate)


def test_one_build_serves_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a start makes it once, for a largest step; a later step must not wait for the compiler."""
    from triton import knobs

    from pagespec.kernels.matmul.sm90.matmul_sm90_many import matmul_many

    x, weight = normal(4173, 1024), normal(2048, 1024, seed=1)
    wide = torch.cat([x, x], 1)[:, 1024:]
    for has_gate in (False, True):
        matmul_many(x[:1000], weight, has_gate)
        asked: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                knobs.runtime, "jit_cache_hook", lambda *, asked=asked, **_: asked.append(1)
            )
            for num_rows in ROWS:
                matmul_many(x[:num_rows], weight, has_gate)
                matmul_many(wide[:num_rows], weight, has_gate)
        assert not asked


def test_silu_of_all_bfloat16() -> None:
    from tests.kernels.matmul.sm90.silu_sm90 import silu

    x = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    expected = fused.act_mul(x, torch.ones_like(x), "silu")
    differs = silu(x).view(torch.int16) != expected.view(torch.int16)
    assert not differs.any(), x[differs][:20].tolist()


def test_gates_of_all_sizes() -> None:
    """Of a whole matmul: every finite bfloat16 as a gate, with another number as up."""
    from pagespec.kernels.matmul.sm90.matmul_sm90_many import matmul_many

    gates = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16)
    gates = gates.view(torch.bfloat16)
    rows = torch.zeros(65536, 320, dtype=torch.bfloat16, device="cuda")
    rows[:, 0] = torch.where(gates.isfinite(), gates, 0)
    rows[:, 1] = normal(65536)
    weight = torch.zeros(16, 320, dtype=torch.bfloat16, device="cuda")
    weight[:8, 0] = weight[8:, 1] = 1
    out = matmul_many(rows, weight, has_gate=True)
    assert torch.equal(out, by_triton(rows, weight, has_gate=True))


def test_a_captured_chain_waits_for_its_rows_and_its_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel starts before the one has ended whose result it multiplies, or multiplies by."""
    from pagespec.kernels.matmul.sm90.matmul_sm90_many import matmul_many

    # Filling memory puts a kernel between any two of ours, and nothing would overlap.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    weights = [normal(2048, 1024, seed=i) / 32 for i in range(2, 6)]
    down = normal(1024, 1024, seed=9) / 32

    def chain(x: Tensor, wait: bool) -> Tensor:
        def done(x: Tensor) -> Tensor:
            if wait:
                torch.cuda.synchronize()
            return x

        for weight in weights:
            # A weight that a kernel with dependent launch has just written.
            made = fused.act_mul(weight, torch.ones_like(weight), "silu") * 4
            made = done(fused.act_mul(made, torch.ones_like(weight), "silu"))
            x = done(matmul_many(x, made, True))
            x = done(matmul_many(x, down))
            x = done(fused.rms_norm(x, torch.ones_like(x[0]), 1e-6, "rounded"))
        return x

    given = normal(1500, 1024)
    chain(given, wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(given, wait=False)
    for seed in range(20):
        given.copy_(normal(1500, 1024, seed=seed))
        graph.replay()
        assert torch.equal(out, chain(given, wait=True)), seed
    assert out.isfinite().all()


PINNED = """
import json
import torch
import torch.nn.functional as F
from pagespec.kernels.device import Gpu
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.matmul.cublas import without_split_k
from pagespec.kernels.matmul.dispatch import linear, linear_silu_mul
from pagespec.kernels.matmul.plan import choose_plan, many_differs
from pagespec.kernels.matmul.tiles import is_quicker_for_many_rows

ROWS = (1, 16, 17, 64, 65, 256, 257, 512, 513, 1000, 1408, 2048, 3000, 4095, 8191, 8192)
card = Gpu.of(torch.device("cuda"))
found = []
with without_split_k(), torch.inference_mode():
    for n, k, has_gate in ((4096, 1024, 0), (6144, 4096, 0), (3072, 1024, 1), (12288, 4096, 1)):
        torch.manual_seed(0)
        weight = torch.randn(n * (1 + has_gate), k, device="cuda").bfloat16() / k**0.5
        x = torch.randn(1, ROWS[-1], k, device="cuda").bfloat16()
        call = linear_silu_mul if has_gate else linear
        limit = choose_plan(weight, None, bool(has_gate))
        whole = F.linear(x, weight)
        if has_gate:
            whole = fused.act_mul(*whole.chunk(2, -1), "silu")
        found.append({
            "shape": [n, k, has_gate],
            "limit": limit,
            "differs": many_differs(weight, None, bool(has_gate)),
            "ours": [m for m in ROWS if m > limit
                     and is_quicker_for_many_rows(m, n, k, bool(has_gate), card)],
            "changed": [m for m in ROWS
                        if not torch.equal(call(x[:, :m], weight, None, limit), whole[:, :m])],
        })
print(json.dumps(found))
"""


def test_rows_have_the_bits_of_cublas_on_both_sides_of_the_switch() -> None:
    """In a process of its own, as cuBLAS reads its settings once."""
    found = json.loads(run_apart("-c", PINNED).splitlines()[-1])
    assert [f["changed"] for f in found] == [[], [], [], []], found
    assert [f["differs"] for f in found] == [[], [], [], []], found
    for each in found:
        assert each["limit"] <= 256, each
        assert 8192 in each["ours"], each
        assert 257 not in each["ours"], each
