"""The few-rows linear against the plain one."""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels.linear import linear_few_rows


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9, 16, 64, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(num_rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, num_rows, 48), torch.randn(160, 48)
    b = torch.randn(160) if bias else None
    out = linear_few_rows(x, weight, b)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, b), rtol=1e-5, atol=1e-4)
    assert out.is_contiguous()
    strided = torch.randn(1, num_rows, 96)[..., :48]
    torch.testing.assert_close(
        linear_few_rows(strided, weight, b),
        torch.nn.functional.linear(strided, weight, b),
        rtol=1e-5,
        atol=1e-4,
    )
