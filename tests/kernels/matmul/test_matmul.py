"""The Triton matmul and its dispatch on the CPU, under Triton's interpreter, at tiny shapes.

The interpreter multiplies with NumPy, which has its own order of summation. So bitwise tests across
tiles use small integers, whose sums are exact: the tests show that every term is added once. The
interpreter truncates to bfloat16 instead of rounding.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagespec.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="Triton's interpreter is off: the kernels are compiled here, not interpreted",
    ),
]

# block_m, block_n, block_k
TILES = [(16, 16, 16), (16, 32, 64), (32, 16, 32), (64, 64, 16)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


def product(
    block: tuple[int, int, int], *args: Tensor | None, swap_ab: bool = False, **options: object
) -> Tensor:
    from pagespec.kernels.matmul.matmul import Tile, matmul

    m, n, k = block
    tile = Tile(block_m=m, block_n=n, block_k=k, num_stages=2, num_warps=1, swap_ab=swap_ab)
    return matmul(*args, tile=tile, **options)  # type: ignore[arg-type]


def integers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("block", TILES, ids=str)
@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (40, 64), (33, 50), (7, 8)])
def test_counts_every_summand_once(
    block: tuple[int, int, int], n: int, k: int, dtype: torch.dtype, swap_ab: bool
) -> None:
    # Integers up to 2,048 are exact in float16. Its whole 16-byte units come by descriptors.
    weight, bias = integers(n, k).to(dtype), integers(n, seed=1).to(dtype)
    for num_rows in (1, 3, 16, 17, 35):
        x = integers(num_rows, k, seed=2).to(dtype)
        exact = (x.float() @ weight.float().T).to(dtype)
        assert torch.equal(product(block, x, weight, swap_ab=swap_ab), exact)
        assert torch.equal(product(block, x, weight, bias, swap_ab=swap_ab), exact + bias)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("swap_ab", [False, True])
def test_rounds_as_separate_operations(dtype: torch.dtype, has_gate: bool, swap_ab: bool) -> None:
    num_rows, n, k = 5, 24, 40
    x = normal(num_rows, k, dtype=dtype)
    weight = normal(2 * n if has_gate else n, k, dtype=dtype, seed=1) / 8
    bias = normal(len(weight), dtype=dtype, seed=2)
    expected = F.linear(x, weight, bias)
    if has_gate:
        expected = F.silu(expected[:, :n]) * expected[:, n:]
    out = product((16, 16, 16), x, weight, bias, has_gate=has_gate, swap_ab=swap_ab)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_gate", [False, True])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, has_gate: bool) -> None:
    block, x, weight = (16, 16, 32), normal(37, 48, dtype=dtype), normal(40, 48, dtype=dtype)
    for swap_ab in (False, True):
        whole = product(block, x, weight, has_gate=has_gate, swap_ab=swap_ab)
        for num_rows in (1, 2, 15, 16, 17, 33):
            part = product(block, x[:num_rows], weight, has_gate=has_gate, swap_ab=swap_ab)
            assert torch.equal(part, whole[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_takes_strided_rows_and_no_rows(dtype: torch.dtype) -> None:
    wide, weight = integers(9, 64).to(dtype), integers(20, 32).to(dtype)
    exact = wide[:, 32:] @ weight.T
    block = (16, 16, 16)
    assert torch.equal(product(block, wide[:, 32:], weight), exact)
    assert torch.equal(product(block, wide[:, 32:].T.contiguous().T, weight), exact)
    other = integers(20, 64).to(dtype)[:, 32:]
    assert torch.equal(product(block, wide[:, 32:], other), wide[:, 32:] @ other.T)
    # Rows that do not begin at whole 16-byte units.
    assert torch.equal(product(block, wide[:, 3:35], other), wide[:, 3:35] @ other.T)
    assert product(block, wide[:0, 32:], weight).shape == (0, 20)


def test_refuses_what_does_not_fit() -> None:
    x, weight, block = integers(2, 8), integers(4, 8), (16, 16, 16)
    with pytest.raises(ValueError, match="does not fit"):
        product(block, x[:, :4], weight)
    with pytest.raises(ValueError, match="does not fit"):
        product(block, x.bfloat16(), weight)
    with pytest.raises(ValueError, match="bias"):
        product(block, x, weight, integers(8))


@pytest.mark.parametrize("max_custom_rows", [0, 3, 100])
@pytest.mark.parametrize("lead", [(3,), (1, 3), (1, 4), (2, 2)])
def test_functions_keep_leading_dims_on_both_ways(
    max_custom_rows: int, lead: tuple[int, ...]
) -> None:
    from pagespec.kernels.matmul import dispatch as gpu_linear

    x, weight, bias = normal(*lead, 32), normal(24, 32, seed=1), normal(24, seed=2)
    close = {"rtol": 1e-5, "atol": 1e-5}
    plain = F.linear(x, weight, bias)
    torch.testing.assert_close(gpu_linear.linear(x, weight, bias, max_custom_rows), plain, **close)
    gate, up = plain.chunk(2, -1)
    out = gpu_linear.linear_silu_mul(x, weight, bias, max_custom_rows)
    torch.testing.assert_close(out, F.silu(gate) * up, **close)


def test_few_rows_decides_the_kernel(torch_calls: dict[Any, Any]) -> None:
    from pagespec.kernels.matmul import dispatch as gpu_linear

    rows: list[int] = []

    def counted(x: Tensor, *rest: Tensor | None) -> Tensor:
        rows.append(x.shape[1])
        return F.linear(x, *rest)

    torch_calls[F.linear] = counted
    for num_rows in (4, 5):
        gpu_linear.linear(integers(1, num_rows, 8), integers(4, 8), max_custom_rows=4)
        gpu_linear.linear_silu_mul(integers(1, num_rows, 8), integers(4, 8), max_custom_rows=4)
    assert rows == [5, 5]


@pytest.mark.parametrize("num_shared_bytes", [227 << 10, 163 << 10])
def test_tiles_follow_the_bucket_and_fit(num_shared_bytes: int) -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.tiles import choose_tile
    from pagespec.kernels.matmul.tuned_tiles import TUNED

    card = Gpu(132, num_shared_bytes)
    gated = [(n, k, 2, True) for n, k in ((3072, 1024), (12288, 4096), (80, 512))]
    plain = [(n, k, 2, False) for n, k in TUNED if (n, k, 2, True) not in gated]
    plain += [(1000, 512, 2, False), (50, 24, 2, False), (50, 25, 2, False), (64, 64, 4, False)]
    for n, k, itemsize, has_gate in gated + plain:
        for rows in (range(1, 17), range(17, 33), range(33, 65), range(257, 9000, 500)):
            tiles = {choose_tile(r, n, k, itemsize, has_gate, card) for r in rows}
            (tile,) = tiles
            size = (tile.block_m + tile.block_n * (1 + has_gate)) * tile.block_k * itemsize
            # Stages, and the barriers of each.
            assert size * tile.num_stages + 64 * tile.num_stages <= num_shared_bytes
            accumulators = tile.block_m * tile.block_n * (1 + has_gate)
            assert accumulators / (32 * tile.num_warps) <= 160  # registers of a thread


@pytest.mark.parametrize(
    ("k", "itemsize", "is_one"),
    [(1024, 2, False), (8, 2, False), (12, 2, True), (50, 2, True), (1024, 4, True), (50, 4, True)],
)
def test_one_tile_for_all_rows_where_tiles_were_not_compared(
    k: int, itemsize: int, is_one: bool
) -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.tiles import choose_tile

    card = Gpu(132, 227 << 10)
    rows = (1, 16, 17, 64, 65, 129, 257, 4096)
    tiles = {choose_tile(r, 4096, k, itemsize, False, card) for r in rows}
    assert (len(tiles) == 1) == is_one


def test_a_plan_trusts_only_what_was_compared() -> None:
    from pagespec.kernels.matmul.dispatch import ALL_ROWS
    from pagespec.kernels.matmul.plan import SweepReport, plan_from

    counts = (1, 2, 8, 15, 16, 17, 31, 32, 64, 65, 512)

    def few(cublas: tuple[int, ...], ours: tuple[int, ...] = (), worth_it: int = 16) -> int:
        return plan_from(SweepReport(counts, cublas, ours), worth_it)

    assert few(()) == 16
    assert few((1, 2, 8)) == 16
    assert few((1, 17)) == 30  # 18 to 30 were not compared
    assert few((32,)) == 63
    assert few((65,)) == ALL_ROWS
    assert few((1, 512)) == ALL_ROWS
    assert few((), (16,)) == ALL_ROWS  # ours is another class: then for all rows
    assert few((), (512,)) == 16  # where ours is not used
    assert few((17,), (17,)) == ALL_ROWS
    assert few((), worth_it=64) == 64
    assert few((65,), worth_it=256) == 511  # 66 to 511 were not compared


@pytest.fixture
def one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of small weights, by 512 rows."""
    from pagespec.kernels.matmul import plan as plans

    monkeypatch.setattr(plans, "LEAST_OUTPUTS", 1)
    monkeypatch.setattr(plans, "_LEAST_RESULTS", 1)


@pytest.fixture
def change_ours(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Make our kernel return ``change(x, result)``."""
    from pagespec.kernels.matmul import dispatch as gpu_linear

    ours = gpu_linear.matmul

    def replace(change: Callable[..., Tensor]) -> None:
        monkeypatch.setattr(
            gpu_linear, "matmul", lambda x, *rest, **options: change(x, ours(x, *rest, **options))
        )

    return replace


def test_a_sweep_finds_what_few_results_show(
    torch_calls: dict[Any, Any], request: pytest.FixtureRequest
) -> None:
    from pagespec.kernels.matmul import plan as plans

    weight, counts = normal(64, 8), (64, 65)
    rows = [plans._rows_to_try(weight, 65, draw)[:, 0] for draw in range(16)]
    rare = rows[0].max()
    assert 0 < sum((x > rare).sum() for x in rows) < 10

    def library(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A library with another order of summation, which one of some thousand rows shows."""
        return F.linear(x, weight, bias) + (x[:, :1] > rare) * (len(x) == 65)

    torch_calls[F.linear] = library
    assert plans.sweep(weight, None, counts, ours_up_to=0).cublas_differs == (65,)
    request.getfixturevalue("one_draw")
    assert plans.sweep(weight, None, counts, ours_up_to=0).cublas_differs == ()


@pytest.mark.usefixtures("one_draw")
def test_a_sweep_names_the_row_counts_that_differ(
    torch_calls: dict[Any, Any], change_ours: Callable[..., None]
) -> None:
    from pagespec.kernels.matmul import plan as plans

    def off_at_three(x: Tensor, *rest: Tensor | None) -> Tensor:
        out = F.linear(x.double(), *(r if r is None else r.double() for r in rest)).float()
        if len(x) == 3:
            out[2, 0] = torch.nextafter(out[2, 0], torch.tensor(9e9))
        return out

    torch_calls[F.linear] = off_at_three
    # One term: only the multiplication rounds, so all kernels agree.
    report = plans.sweep(normal(8, 1), None, (600, 1, 3, 2))
    assert report == plans.SweepReport((1, 2, 3, 600), (3,), ())
    assert plans.sweep(normal(8, 1), None, (1,)).cublas_differs == ()
    change_ours(lambda x, _: off_at_three(x, normal(8, 1)) + 1)
    assert plans.sweep(normal(8, 1), None, (1, 3)).ours_differs == (1, 3)


@pytest.mark.usefixtures("one_draw")
def test_a_plan_tries_our_kernel_as_far_as_it_is_used(
    torch_calls: dict[Any, Any], change_ours: Callable[..., None]
) -> None:
    from pagespec.kernels.matmul import plan as plans

    # One term per output, and no rounding: all kernels agree.
    weight = torch.eye(8, dtype=torch.float16)
    tried: set[int] = set()
    bad: set[int] = set()

    def library(x: Tensor, *rest: Tensor | None) -> Tensor:
        return F.linear(x, *rest) + (len(x) == 65)

    def watched(x: Tensor, out: Tensor) -> Tensor:
        tried.add(len(x))
        return out + (len(x) in bad)

    change_ours(watched)
    assert plans.choose_plan(weight) == 64
    assert tried == {1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64}
    torch_calls[F.linear] = library
    bad.add(1024)  # cuBLAS differs at 65, so our kernel is to compute all rows
    with pytest.raises(UnsupportedModelError, match=r"\[8, 8\].*float16.* at \[1024\]"):
        plans.choose_plan(weight)


@pytest.mark.usefixtures("one_draw")
def test_our_kernel_for_all_rows_must_agree_with_itself(
    torch_calls: dict[Any, Any], change_ours: Callable[..., None]
) -> None:
    from pagespec.kernels.matmul import dispatch as gpu_linear
    from pagespec.kernels.matmul import plan as plans

    weight = torch.eye(8, dtype=torch.float16)
    bad: set[int] = set()

    torch_calls[F.linear] = lambda *args: F.linear(*args) + 1  # one class, but not ours
    change_ours(lambda x, out: out + (len(x) in bad))
    assert plans.choose_plan(weight) == gpu_linear.ALL_ROWS
    bad.add(65)  # beyond what is compared with the library
    with pytest.raises(UnsupportedModelError, match=r"at \[65\]"):
        plans.choose_plan(weight)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 16), torch.float32), ((8, 50), torch.float16), ((63, 16), torch.float16)],
    ids=str,
)
def test_with_one_tile_or_few_outputs_the_library_is_not_called(
    shape: tuple[int, int],
    dtype: torch.dtype,
    torch_calls: dict[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pagespec.kernels.matmul import dispatch as gpu_linear
    from pagespec.kernels.matmul import plan as plans

    def library(*_: object) -> Tensor:
        raise AssertionError("cuBLAS was called")

    torch_calls[F.linear] = library
    monkeypatch.setattr(plans, "_LEAST_RESULTS", 1)
    # One summand an output: the interpreter's matmuls agree about no more.
    assert plans.choose_plan(torch.eye(*shape, dtype=dtype)) == gpu_linear.ALL_ROWS


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, ":16:8"), (":4096:2", ":16:8"), (":16:2:16:8", ":16:8"), (":16:4", ":16:4")],
)
def test_split_k_is_forbidden_for_the_rest_of_the_process(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back, torch would take a workspace of 128 KiB for one of 32 MiB."""
    from pagespec.kernels.matmul.cublas import without_split_k

    flags = torch.backends.cuda.matmul
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before or "")
    if before is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    allowed = flags.allow_bf16_reduced_precision_reduction
    with without_split_k():
        assert not flags.allow_bf16_reduced_precision_reduction
        assert not flags.allow_fp16_reduced_precision_reduction
    assert flags.allow_bf16_reduced_precision_reduction == allowed
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "1"
