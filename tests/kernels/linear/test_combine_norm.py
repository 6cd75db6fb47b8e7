"""The sum over experts, the residual and the norm in one launch, under the interpreter, against
the two kernels bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from pagespec.kernels.fused import rms_norm
from pagespec.kernels.linear import combine_norm as kernel
from pagespec.kernels.linear.expert_rows import combine_experts

Change = Callable[[list[Any]], None]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(
    num_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype, weights_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, int, Tensor, Tensor]:
    num_rows = num_tokens * top_k
    inverse = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows))
    return (
        normal(num_rows, hidden_size, dtype=dtype),
        normal(num_rows, dtype=weights_dtype, seed=1).abs(),
        inverse,
        top_k,
        normal(1, num_tokens, hidden_size, dtype=dtype, seed=2),
        normal(hidden_size, dtype=dtype, seed=3),
    )


def apart(
    rows: Tensor,
    weights: Tensor,
    inverse: Tensor,
    top_k: int,
    residual: Tensor,
    norm_weight: Tensor,
    form: str,
) -> tuple[Tensor, Tensor]:
    x = combine_experts(rows, weights, inverse, top_k, residual.dtype).view(residual.shape)
    return rms_norm.add_rms_norm(x, residual, norm_weight, 1e-6, form)


@pytest.mark.parametrize("form", ["rounded", "wide", "plus_one"])
@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size"), [(1, 8, 64), (2, 1, 304), (64, 4, 48)]
)
def test_bits_are_those_of_two_kernels(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
    form: str,
) -> None:
    given = operands(num_tokens, top_k, hidden_size, dtype, weights_dtype)
    expected = apart(*given, form)
    with monkeypatch.context() as patch:
        patch.delattr(kernel, "combine_experts")  # it is one launch
        found = kernel.combine_add_rms_norm(*given, 1e-6, form)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)


def _many(given: list[Any]) -> None:
    many = operands(65, 2, 48, torch.float32, torch.float32)
    given[:] = list(many)


def _odd_width(given: list[Any]) -> None:
    given[:] = list(operands(3, 2, 40, torch.float32, torch.float32))


def _another_dtype(given: list[Any]) -> None:
    given[0] = given[0].half()


def _strided_residual(given: list[Any]) -> None:
    given[4] = normal(1, 3, 50)[..., :48]


def _no_tokens(given: list[Any]) -> None:
    given[:] = list(operands(0, 2, 48, torch.float32, torch.float32))


@pytest.mark.parametrize(
    "change", [_many, _odd_width, _another_dtype, _strided_residual, _no_tokens]
)
def test_what_it_has_no_launch_for_takes_two(
    monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    given = list(operands(3, 2, 48, torch.float32, torch.float32))
    change(given)
    monkeypatch.setattr(kernel.fused, "add_rms_norm", rms_norm.add_rms_norm)
    monkeypatch.delattr(kernel, "_combine_norm_kernel")
    found = kernel.combine_add_rms_norm(*given, 1e-6, "rounded")
    for a, b in zip(found, apart(*given, "rounded"), strict=True):
        assert torch.equal(a, b)
