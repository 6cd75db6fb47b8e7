"""When a norm and its matmul are one launch, and when two.

tests/kernels/matmul/test_dispatch_gpu.py also compares the bits on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pagespec.kernels.arch import Arch, Implementation
from pagespec.kernels.device import Gpu
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.matmul import dispatch as gpu_linear
from pagespec.kernels.registry import registry

N, K = 2048, 1024


@pytest.fixture
def launched(
    monkeypatch: pytest.MonkeyPatch, as_gpu: Callable[[Gpu], None]
) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of x with which the fused launch was called, as if on a Hopper GPU."""
    shapes: list[tuple[int, ...]] = []

    def matmul(x: Tensor, residual: Tensor, *norm: Any, tile: object, has_gate: bool) -> Any:
        *norm, weight = norm
        assert x.is_contiguous()
        assert residual.is_contiguous()
        shapes.append(tuple(x.shape))
        normed, hidden = fused.add_rms_norm(x, residual, *norm)
        product = gpu_linear.linear_silu_mul if has_gate else gpu_linear.linear
        return product(normed, weight, None, 0), hidden

    def serves(num_rows: int, k_size: int, *_: object) -> bool:
        return 0 < num_rows <= 4 and k_size == K

    class Entry(Implementation):
        """Its functions stand here."""

        __slots__ = ()

        def function(self, name: str) -> Any:
            return {"serves": serves, "matmul": matmul}[name]

    def ours(x: Tensor, weight: Tensor, bias: None, has_gate: bool = False) -> Tensor:
        product = gpu_linear.linear_silu_mul if has_gate else gpu_linear.linear
        return product(x, weight, bias, -1)

    monkeypatch.setattr(gpu_linear, "_ours", ours)  # there is no Gluon on a CPU
    as_gpu(Gpu(132, 227 << 10, Arch("sm90", has_gluon=True)))
    entry = Entry("norm_matmul", "bfloat16", ("sm90",))
    with registry().changed(first=(entry,)):
        yield shapes


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    x: Tensor, residual: Tensor, weight: Tensor, max_custom_rows: int, has_gate: bool
) -> None:
    """Against the two calls that are joined."""
    norm = (normal(x.shape[-1], seed=2).to(x.dtype), 1e-6, "rounded")
    out, found = gpu_linear.norm_linear(x, residual, *norm, weight, max_custom_rows, has_gate)
    normed, hidden = fused.add_rms_norm(x, residual, *norm)
    product = gpu_linear.linear_silu_mul if has_gate else gpu_linear.linear
    assert torch.equal(out, product(normed, weight, None, 0))
    assert torch.equal(found, hidden)


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_few_rows_are_one_launch(
    num_rows: int, has_gate: bool, launched: list[tuple[int, ...]]
) -> None:
    weight = normal(N, K, seed=1)
    assert gpu_linear.has_joined_norm(weight, has_gate)
    x, residual = normal(1, num_rows, K), normal(1, num_rows, K, seed=3)
    check(x, residual, weight, 16, has_gate)
    assert launched == [(num_rows, K)]


def test_all_else_are_two(launched: list[tuple[int, ...]]) -> None:
    weight = normal(N, K, seed=1)
    x, residual = normal(1, 4, K), normal(1, 4, K, seed=3)
    every_other = normal(1, 8, K, seed=4)[:, ::2]
    for a, b in ((every_other, residual), (x, every_other)):
        check(a, b, weight, max_custom_rows=4, has_gate=False)
    check(x, residual, weight, max_custom_rows=3, has_gate=False)  # by the plan, cuBLAS
    five = normal(1, 5, K)
    check(five, five, weight, max_custom_rows=5, has_gate=False)
    check(x[:, :0], residual[:, :0], weight, max_custom_rows=16, has_gate=False)
    half = weight.half()
    check(x.half(), residual.half(), half, max_custom_rows=3, has_gate=True)
    narrow = normal(N, 512, seed=1)
    for other in (half, narrow, weight.float()):
        assert not gpu_linear.has_joined_norm(other, False)
    assert not launched
