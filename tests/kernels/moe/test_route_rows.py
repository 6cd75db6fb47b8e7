"""Router, sort and copy of few tokens in one launch.

Under Triton's interpreter, it must be bit-identical to the three separate kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from pagespec.kernels.jit.parallel_build import parallel_build
from pagespec.kernels.moe import route_rows as kernel
from pagespec.kernels.moe.route import route
from tests.kernels.moe.conftest import Skip


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apart(
    logits: Tensor, tokens: Tensor, top_k: int, *rest: object, query_starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The router's kernel, then torch's operations: the kernels of sort and copy, whose own tests
    hold them to the same, take seconds for many experts."""
    num_experts = logits.shape[1]
    weights, ids = route(logits, top_k, *rest)
    ids = ids.clone()
    if query_starts is not None:
        ids[int(query_starts[-1]) :] = num_experts
    ids = ids.view(-1)
    order = torch.sort(ids, stable=True)[1]
    inverse = torch.argsort(order)
    offs = torch.bincount(ids, minlength=num_experts + 1)[:-1].cumsum(0).int()
    return tokens[order // top_k], weights, inverse, offs


def assert_is_one_launch(
    monkeypatch: pytest.MonkeyPatch,
    logits: Tensor,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    hidden_size: int = 144,
    num_real: int | None = None,
) -> None:
    tokens = normal(len(logits), hidden_size, dtype=torch.bfloat16, seed=1)
    starts = None if num_real is None else torch.tensor([0, 0, num_real], dtype=torch.int32)
    for normalisation in ("all", "renormalised", "chosen"):
        expected = apart(logits, tokens, top_k, normalisation, dtype, query_starts=starts)
        with monkeypatch.context() as patch:
            patch.delattr(kernel, "route")
            found = kernel.route_rows(logits, tokens, top_k, normalisation, dtype, starts)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            # Bits: NaN is a result as well.
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 128, 8), (16, 32, 8), (5, 60, 4), (3, 1, 1), (2, 129, 10), (7, 8, 8)],
)
def test_results_are_those_of_three_kernels(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
) -> None:
    logits = normal(num_tokens, num_experts, dtype=dtype)
    assert_is_one_launch(monkeypatch, logits, top_k, dtype)
    # All tokens to the same experts, and none with a reason to prefer any.
    assert_is_one_launch(monkeypatch, logits[:1].expand(num_tokens, -1), top_k, dtype)
    assert_is_one_launch(monkeypatch, torch.zeros_like(logits), top_k, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_select_experts(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    logits = normal(4, 60)
    logits[0, 7] = value
    logits[2] = value
    assert_is_one_launch(monkeypatch, logits, 6, torch.float32)


@pytest.mark.parametrize("num_real", [0, 1, 4, 5])
def test_padding_goes_to_no_expert(monkeypatch: pytest.MonkeyPatch, num_real: int) -> None:
    logits = normal(5, 16)
    assert_is_one_launch(monkeypatch, logits, 3, num_real=num_real)
    starts = torch.tensor([0, num_real], dtype=torch.int32)
    *_, inverse, offs = kernel.route_rows(
        logits, normal(5, 8), 3, "renormalised", torch.float32, starts
    )
    assert offs[-1] == 3 * num_real
    alone = kernel.route_rows(
        logits[:num_real], normal(num_real, 8), 3, "renormalised", torch.float32
    )
    assert torch.equal(offs, alone[3])
    assert torch.equal(inverse[: 3 * num_real], alone[2])


def test_rows_may_be_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.full((3, 70), float("nan"))
    wide[:, 3:63] = normal(3, 60)
    assert_is_one_launch(monkeypatch, wide[:, 3:63], 4, hidden_size=300)


@pytest.mark.parametrize(("num_tokens", "num_real"), [(0, 0), (17, 17), (40, 33)])
def test_many_rows_take_three_kernels_and_have_the_same_bits(
    skip_launches: Skip, num_tokens: int, num_real: int
) -> None:
    logits, tokens = normal(num_tokens, 9), normal(num_tokens, 24, seed=1)
    starts = torch.tensor([0, num_real], dtype=torch.int32)
    given = (logits, tokens, 8, "renormalised", torch.float32)
    expected = apart(*given, query_starts=starts)
    launched = skip_launches(kernel, "_route_rows_kernel")
    found = kernel.route_rows(*given, starts)
    assert launched == []
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_results_of_a_skipped_launch_are_indices(skip_launches: Skip) -> None:
    skip_launches(kernel, "_route_rows_kernel")
    given = (normal(3, 8), normal(3, 16), 2, "renormalised", torch.float32)
    with parallel_build(torch.device("cpu")):
        *_, inverse, offs = kernel.route_rows(*given)
    assert (inverse == 0).all()
    assert (offs == 0).all()
