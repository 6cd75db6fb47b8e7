"""Matmuls of 16-bit numbers in float32, by the kernel under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels.linear import wide_linear
from pagespec.kernels.linear.matmul import matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_outs", "width"), [(4, 48), (20, 320), (64, 512)])
def test_sums_are_not_rounded_to_the_dtype(dtype: torch.dtype, num_outs: int, width: int) -> None:
    x = torch.randn(19, 2 * width).to(dtype)[:, width:]
    weight = torch.randn(num_outs, width).to(dtype)
    found = matmul(x, weight, tile=wide_linear._TILE, out_dtype=torch.float32)
    assert found.dtype == torch.float32
    truth = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-4)
    assert not torch.equal(found, found.to(dtype).float())
    for num_rows in (1, 3, 16):
        part = matmul(x[:num_rows], weight, tile=wide_linear._TILE, out_dtype=torch.float32)
        assert torch.equal(part, found[:num_rows])


def test_on_a_cpu_it_is_what_it_replaces() -> None:
    x, weight = torch.randn(2, 5, 32).bfloat16(), torch.randn(6, 32).bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight.float())
    assert torch.equal(wide_linear.wide_linear(x, weight), expected)
