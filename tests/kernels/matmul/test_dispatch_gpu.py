"""Few-row matmuls on a GPU: against float64, bit against bit, and against cuBLAS in fixed order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagespec.kernels.fused import dispatch as fused

pytestmark = pytest.mark.gpu

# Largest error relative to the size of an output: rounding of it, and of a gate before.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# block_m, block_n, block_k, num_stages, num_warps; matrix instructions of a warp and of four
Block = tuple[int | str, ...]
TILES: list[Block] = [
    (16, 16, 64, 3, 4),
    (16, 8, 256, 3, 2),
    (16, 64, 128, 3, 4),
    (32, 32, 32, 2, 4),
    (64, 16, 64, 3, 4),
    (64, 64, 64, 3, 4),
    (128, 64, 64, 3, 8),
    (16, 64, 128, 4, 4, "swap"),
    (16, 64, 64, 3, 4, "swap"),
    (32, 64, 128, 3, 4, "swap"),
    (64, 128, 64, 3, 4, "swap"),
]
TILES_IEEE = [(16, 32, 32, 3, 4), (64, 32, 32, 3, 4), (16, 16, 16, 2, 4), (32, 32, 64, 2, 8)]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN: whatever a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(64, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def product(block: Block, *args: Tensor | None, **options: object) -> Tensor:
    from pagespec.kernels.matmul.matmul import Tile, matmul

    m, n, k, stages, warps, *swap = block
    tile = Tile(
        block_m=m,
        block_n=n,
        block_k=k,
        num_stages=stages,
        num_warps=warps,
        swap_ab=bool(swap),
    )
    return matmul(*args, tile=tile, **options)  # type: ignore[arg-type]


def tiles_of(dtype: torch.dtype) -> list[Block]:
    return list(TILES_IEEE if dtype == torch.float32 else TILES)


def operands(
    num_rows: int, n: int, k: int, dtype: torch.dtype, has_gate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x ``[num_rows, K]``, weight and bias, for N outputs of about unit size."""
    num_weights = 2 * n if has_gate else n
    weight = normal(num_weights, k, dtype=dtype, seed=1) / k**0.5
    return normal(num_rows, k, dtype=dtype), weight, normal(num_weights, dtype=dtype, seed=2)


def short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=short)
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize(("n", "k"), [(256, 512), (200, 328), (33, 50)])
def test_every_tile_matches_float64(dtype: torch.dtype, has_gate: bool, n: int, k: int) -> None:
    x, weight, bias = operands(70, n, k, dtype, has_gate)
    expected = x.double() @ weight.double().T + bias.double()
    if has_gate:
        expected = F.silu(expected[:, :n]) * expected[:, n:]
    for block in tiles_of(dtype):
        out = product(block, x, weight, bias, has_gate=has_gate)
        error = (out.double() - expected).abs() / expected.abs().clamp(min=1)
        assert error.max().item() <= 2 * TOLERANCE[dtype], block  # false for NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("has_gate", [False, True])
# At K = 128 some tiles need no loop, and must add the bias last all the same.
@pytest.mark.parametrize(("n", "k"), [(256, 512), (200, 328), (96, 128)])
def test_bits_from_every_tile_where_rows_are_whole_16_byte_units(
    dtype: torch.dtype, has_gate: bool, n: int, k: int
) -> None:
    x, weight, bias = operands(70, n, k, dtype, has_gate)
    first = product(TILES[0], x, weight, bias, has_gate=has_gate)
    for block in TILES:
        for rows in (1, 2, 16, 17, 70):
            out = product(block, x[:rows], weight, bias, has_gate=has_gate)
            assert torch.equal(out, first[:rows]), (block, rows)
        moved = product(block, x.roll(5, 0), weight, bias, has_gate=has_gate)
        assert torch.equal(moved.roll(-5, 0), first), block


@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [
        (torch.float32, 256, 512),
        (torch.float32, 33, 50),
        (torch.bfloat16, 33, 50),
        (torch.float16, 33, 50),
        (torch.float16, 200, 332),
    ],
    ids=short,
)
@pytest.mark.parametrize("has_gate", [False, True])
def test_other_rows_keep_their_bits_with_the_chosen_tile(
    dtype: torch.dtype, n: int, k: int, has_gate: bool
) -> None:
    from pagespec.kernels.matmul import dispatch as gpu_linear
    from pagespec.kernels.matmul import plan as plans

    x, weight, bias = operands(520, n, k, dtype, has_gate)
    max_custom_rows = plans.choose_plan(weight, bias)
    call = gpu_linear.linear_silu_mul if has_gate else gpu_linear.linear
    whole = call(x, weight, bias, max_custom_rows)
    assert whole.isfinite().all()
    for rows in (*range(1, 35), 63, 64, 65, 128, 129, 256, 257, 512):
        assert torch.equal(call(x[:rows], weight, bias, max_custom_rows), whole[:rows]), rows
    moved = call(x.roll(5, 0), weight, bias, max_custom_rows)
    assert torch.equal(moved.roll(-5, 0), whole)


def test_silu_is_torchs_for_every_gate() -> None:
    """All finite bfloat16 gates, bit for bit but for what is next to nothing."""

    def rounded_off(values: Tensor) -> Tensor:  # subnormal numbers become 0 on some of the ways
        return torch.where(values.abs() < 1e-30, 0, values)

    gates = torch.arange(65536, device="cuda").to(torch.int16).view(torch.bfloat16)
    gates = torch.where(gates.isfinite(), gates, 0)
    ups = normal(65536)
    ups = torch.where((F.silu(gates) * ups).isfinite(), ups, 0)
    expected = rounded_off(F.silu(gates) * ups)
    identity = torch.eye(2, 16, device="cuda", dtype=torch.bfloat16)
    columns = torch.zeros(65536, 16, device="cuda", dtype=torch.bfloat16)
    columns[:, 0], columns[:, 1] = gates, ups
    out = product((16, 16, 16, 2, 4), columns, identity, has_gate=True)
    assert torch.equal(rounded_off(out.view(-1)), expected)


def test_strided_rows() -> None:
    wide, weights = normal(20, 1024), normal(96, 1024, seed=1)
    x, weight = wide[:, 512:], weights[:, 256:768]
    for block in TILES:
        plain = product(block, x.contiguous(), weight.contiguous())
        assert torch.equal(product(block, x, weight), plain), block


def test_a_captured_chain_gives_the_bits_of_single_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels that start before their input is there must wait for it, and for their weight."""
    from pagespec.kernels.matmul import dispatch as gpu_linear

    # Filling memory puts a kernel between any two of ours, and nothing would overlap.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    width = 512
    weights = [normal(width, width, seed=i) / width**0.5 for i in range(12)]

    def chain(x: Tensor, wait: bool) -> Tensor:
        for weight in weights:
            out = x + gpu_linear.linear(x, weight)
            if wait:
                torch.cuda.synchronize()
            x = out / out.float().square().mean().sqrt().to(out.dtype)
            for _ in range(3):
                x = gpu_linear.linear(x, weights[1])
                if wait:
                    torch.cuda.synchronize()
            x = x.clamp(-4, 4)
        return x

    given = normal(3, width)
    chain(given, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(given, False)
    for seed in range(20):
        given.copy_(normal(3, width, seed=seed))
        graph.replay()
        assert torch.equal(out, chain(given.clone(), True)), seed
    assert out.isfinite().all()


PINNED = """
import json, torch
from pagespec.kernels.matmul.dispatch import linear
from pagespec.kernels.matmul.plan import SWEEP_ROWS, choose_plan, sweep
from pagespec.kernels.matmul.cublas import without_split_k

found = []
with without_split_k():
    for n, k, has_bias in ((1024, 3072, 0), (1024, 2048, 0), (1152, 896, 1), (4096, 4096, 0)):
        torch.manual_seed(0)
        weight = torch.randn(n, k, device="cuda").bfloat16()
        bias = torch.randn(n, device="cuda").bfloat16() if has_bias else None
        report, max_custom_rows = sweep(weight, bias), choose_plan(weight, bias)
        x = torch.randn(1, 1024, k, device="cuda").bfloat16()
        whole = linear(x, weight, bias, max_custom_rows=max_custom_rows)
        changed = [
            m for m in SWEEP_ROWS
            if not torch.equal(linear(x[:, :m], weight, bias, max_custom_rows), whole[:, :m])
        ]
        found.append({"shape": [n, k], "has_bias": has_bias,
                      "max_custom_rows": max_custom_rows,
                      "changed": changed, "cublas": report.cublas_differs,
                      "ours": report.ours_differs})
print(json.dumps(found))
"""


def test_rows_keep_their_bits_under_a_plan() -> None:
    """In a process of its own, as cuBLAS reads its settings once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run(
        [sys.executable, "-c", PINNED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert [f["changed"] for f in found] == [[], [], [], []], found
    if torch.cuda.get_device_capability() == (9, 0):
        # Measured on an H100: our order is the one cuBLAS keeps to, so speed alone decides.
        assert [f["max_custom_rows"] for f in found if not f["has_bias"]] == [256, 256, 64], found
        assert [f["ours"] for f in found if not f["has_bias"]] == [[]] * 3, found


# Rows of weights that Gluon takes: all of K in shared memory, and stages that are used again.
EARLY = [
    (4096, 1024, False, (64, 4, 4)),
    (1024, 2048, False, (32, 8, 4)),
    (3072, 1024, True, (32, 4, 4)),
    (1024, 3072, False, (16, 8, 6)),
    (256, 576, False, (8, 1, 9)),
    (256, 576, True, (16, 1, 9)),
    (512, 4096, False, (32, 4, 5)),
    (512, 4096, True, (32, 2, 6)),
    (512, 4096, False, (64, 4, 3)),
    (4096, 1024, False, (64, 4, 4, 32)),
    (1024, 2048, False, (16, 8, 4, 32)),
    (1024, 3072, False, (32, 4, 4, 64)),
    (3072, 1024, True, (32, 1, 4, 64)),
    (3072, 1024, True, (64, 2, 4, 64)),
    (4096, 1024, False, (64, 2, 4, 128)),
    (512, 576, False, (128, 1, 4, 256)),
    (512, 576, True, (16, 1, 5, 32)),
    (2048, 4096, False, (32, 4, 11, 8)),
    (5120, 2048, False, (64, 4, 6, 8)),
    (6448, 1536, False, (16, 2, 8, 8)),
    (2816, 2048, True, (32, 4, 6, 8)),
]


@pytest.mark.parametrize(("n", "k", "has_gate", "early"), EARLY, ids=str)
def test_bits_of_the_product_in_gluon(
    n: int, k: int, has_gate: bool, early: tuple[int, ...]
) -> None:
    from pagespec.kernels.matmul.sm90 import matmul_sm90
    from pagespec.kernels.matmul.tuned_tiles import PrefetchTile

    tile = PrefetchTile(*early)
    last = 3 * tile.x_rows + 5 if tile.x_rows > 16 else 16
    x, weight, _ = operands(last, n, k, torch.bfloat16, has_gate)
    expected = product(TILES[0], x, weight, has_gate=has_gate)
    for rows in {*range(1, 18), tile.x_rows - 1, tile.x_rows, tile.x_rows + 1, last}:
        if rows > last:
            continue
        out = matmul_sm90.matmul(x[:rows], weight, tile=tile, has_gate=has_gate)
        assert torch.equal(out, expected[:rows]), rows
    wide = torch.cat([x, x], 1)[:, k:]
    assert torch.equal(matmul_sm90.matmul(wide, weight, tile=tile, has_gate=has_gate), expected)
    assert matmul_sm90.matmul(x[:0], weight, tile=tile, has_gate=has_gate).shape == (0, n)
    with pytest.raises(ValueError, match="does not fit"):
        matmul_sm90.matmul(x[:, : k - 64], weight, tile=tile, has_gate=has_gate)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 20, 64, 100, 256])
def test_a_chain_in_gluon_waits_for_its_rows(rows: int) -> None:
    """Each kernel starts before the one has ended whose result it multiplies."""
    from pagespec.kernels.matmul import dispatch as gpu_linear

    shapes = [(4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False)]
    weights = [
        [normal(n, k, seed=10 * i + j) / k**0.5 for j, (n, k, _) in enumerate(shapes)]
        for i in range(6)
    ]

    def chain(x: Tensor, ours: bool) -> Tensor:
        for layer in weights:
            for weight, (_, k, has_gate) in zip(layer, shapes, strict=True):
                part = x[:, :k]
                if ours:
                    x = gpu_linear._ours(part, weight, None, has_gate)
                else:
                    x = product(TILES[0], part, weight, has_gate=has_gate)
            x = x / x.float().square().mean(1, keepdim=True).sqrt().bfloat16()
        return x

    x = normal(rows, 1024)
    chain(x, ours=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, ours=True)
    for seed in range(30):
        x.copy_(normal(rows, 1024, seed=100 + seed))
        graph.replay()
        assert torch.equal(out, chain(x, ours=False)), seed


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_chain_with_norms_waits_for_its_rows(rows: int) -> None:
    """What is added and normalised is what the kernel before has written."""
    from pagespec.kernels.matmul import dispatch as gpu_linear

    norm_weight = 1 + normal(1024, seed=2) / 4
    ups = [normal(6144, 1024, seed=10 + i) / 32 for i in range(8)]
    downs = [normal(1024, 3072, seed=20 + i) / 55 for i in range(8)]

    def chain(x: Tensor, residual: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
        for up, down in zip(ups, downs, strict=True):
            if joined:
                y, residual = gpu_linear.norm_linear(
                    x, residual, norm_weight, 1e-6, "rounded", up, 16, True
                )
                x = gpu_linear.linear(y, down)
            else:
                y, residual = fused.add_rms_norm(x, residual, norm_weight, 1e-6, "rounded")
                y = product(TILES[0], y, up, has_gate=True)
                x = product(TILES[0], y, down)
        return x, residual

    x, residual = normal(rows, 1024), normal(rows, 1024, seed=1)
    chain(x, residual, joined=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x, residual, joined=True)
    for seed in range(30):
        x.copy_(normal(rows, 1024, seed=100 + seed))
        graph.replay()
        for a, b in zip(found, chain(x, residual, joined=False), strict=True):
            assert torch.equal(a, b), seed


@pytest.mark.parametrize("form", ["rounded", "wide", "plus_one"])
@pytest.mark.parametrize(
    ("n", "k", "has_gate"),
    [(4096, 1024, False), (3072, 1024, True), (1536, 576, True), (960, 576, False)],
)
def test_a_product_and_the_norm_before_it_in_one_launch(
    n: int, k: int, has_gate: bool, form: fused.NormForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of two launches, for both results, and a row's own whatever stands beside it."""
    from pagespec.kernels.matmul import dispatch as gpu_linear
    from pagespec.kernels.matmul.sm90 import matmul_sm90
    from pagespec.kernels.matmul.tuned_tiles import PrefetchTile

    weight = normal(n * (1 + has_gate), k, seed=1) / k**0.5
    norm_weight = 1 + normal(k, seed=2) / 4
    # Rows of all sizes: sums of squares of many exponents.
    size = 2.0 ** torch.arange(-20, 44, device="cuda")[:, None]
    x = (normal(64, k, seed=3).float() * size).bfloat16()
    residual = (normal(64, k, seed=4).float() * size.roll(7, 0)).bfloat16()
    normed, hidden = fused.add_rms_norm(x, residual, norm_weight, 1e-6, form)
    product = gpu_linear.linear_silu_mul if has_gate else gpu_linear.linear
    expected = product(normed, weight, None, len(x))
    assert gpu_linear.has_joined_norm(weight, has_gate)
    calls = []
    matmul = matmul_sm90.norm_matmul
    monkeypatch.setattr(
        matmul_sm90, "norm_matmul", lambda *a, **k: calls.append(len(a[0])) or matmul(*a, **k)
    )
    for num_rows in (1, 2, 3, 4, 5):
        for begin in range(0, 64 - num_rows, 3):
            rows = slice(begin, begin + num_rows)
            out, found = gpu_linear.norm_linear(
                x[rows][None], residual[rows][None], norm_weight, 1e-6, form, weight, 16, has_gate
            )
            assert torch.equal(out[0], expected[rows]), (rows, "product")
            assert torch.equal(found[0], hidden[rows]), (rows, "sum")
    assert set(calls) == set(range(1, matmul_sm90.MAX_NORM_ROWS + 1))
    with pytest.raises(ValueError, match="rows"):
        matmul(x, residual, norm_weight, 1e-6, form, weight, tile=PrefetchTile(64, 4, 4))
