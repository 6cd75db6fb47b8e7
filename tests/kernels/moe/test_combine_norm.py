"""The sum over experts, a shared expert, the residual and the norm in one launch.

Under Triton's interpreter, it must be bit-identical to the separate kernels and operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from pagespec.kernels.fused import rms_norm
from pagespec.kernels.moe import expert_rows as kernel
from pagespec.kernels.moe.expert_rows import combine_experts

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
    shared: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    x = combine_experts(rows, weights, inverse, top_k, residual.dtype).view(residual.shape)
    if shared is not None:
        x = x + shared
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


def gated(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A shared expert's rows, and logits of its gate as a merged matmul leaves them."""
    merged = 3 * normal(num_tokens, 9, seed=5)
    return normal(1, num_tokens, hidden_size, dtype=dtype, seed=4), merged.to(dtype)[:, 4:5]


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size"), [(1, 8, 64), (3, 1, 304), (64, 2, 48), (65, 2, 48)]
)
@pytest.mark.usefixtures("interpreted_norm")
def test_a_shared_expert_is_added_as_by_operations_in_turn(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    has_gate: bool,
) -> None:
    given = operands(num_tokens, top_k, hidden_size, dtype, dtype)
    shared, gate = gated(num_tokens, hidden_size, dtype)
    residual, norm_weight = given[4:]
    x = combine_experts(*given[:4], dtype).view(residual.shape)
    # In float32 torch's own exponential may have another last bit.
    sigmoid = torch.sigmoid(gate)
    if dtype == torch.float32:
        sigmoid = torch.from_numpy(1 / (np.exp(-gate.numpy()) + 1))
        torch.testing.assert_close(sigmoid, torch.sigmoid(gate), rtol=1e-6, atol=0)
    expected = rms_norm.add_rms_norm(
        x + (sigmoid * shared if has_gate else shared), residual, norm_weight, 1e-6, "rounded"
    )
    assert not torch.equal(x, x + (sigmoid * shared if has_gate else shared))
    # One launch, or two: no operation between them.
    monkeypatch.delattr(kernel, "combine_experts" if num_tokens <= 64 else "_combine_norm_kernel")
    found = kernel.combine_add_rms_norm(*given, 1e-6, "rounded", shared, gate if has_gate else None)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)


@pytest.mark.usefixtures("interpreted_norm")
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_its_bits_among_few_and_many(dtype: torch.dtype, has_gate: bool) -> None:
    top_k, hidden_size = 2, 48
    rows, weights, _, _, residual, norm_weight = operands(65, top_k, hidden_size, dtype, dtype)
    shared, gate = gated(65, hidden_size, dtype)
    inverse = torch.arange(65 * top_k)

    def of(begin: int, end: int) -> tuple[Tensor, Tensor]:
        of_experts, tokens = slice(begin * top_k, end * top_k), slice(begin, end)
        return kernel.combine_add_rms_norm(
            rows[of_experts], weights[of_experts], inverse[: (end - begin) * top_k], top_k,
            residual[:, tokens], norm_weight, 1e-6, "rounded", shared[:, tokens],
            gate[tokens] if has_gate else None,
        )  # fmt: skip

    whole = of(0, 65)
    for begin, end in [(0, 1), (64, 65), (3, 40), (1, 65)]:
        for a, b in zip(of(begin, end), whole, strict=True):
            assert torch.equal(a, b[:, begin:end])


def _strided_shared(given: list[Any]) -> None:
    given.append(normal(1, 3, 50, seed=4)[..., :48])


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
    "change",
    [_many, _odd_width, _another_dtype, _strided_residual, _strided_shared, _no_tokens],
)
@pytest.mark.usefixtures("interpreted_norm")
def test_what_it_has_no_launch_for_takes_two(
    monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    given = list(operands(3, 2, 48, torch.float32, torch.float32))
    change(given)
    given, shared = given[:6], given[6:]
    monkeypatch.delattr(kernel, "_combine_norm_kernel")
    found = kernel.combine_add_rms_norm(*given, 1e-6, "rounded", *shared)
    for a, b in zip(found, apart(*given, "rounded", *shared), strict=True):
        assert torch.equal(a, b)
