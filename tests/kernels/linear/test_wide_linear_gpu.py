"""Routers' matmuls in float32 on a GPU: as exact as the library's, and the same bits for all
numbers of rows."""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels.linear.wide_linear import wide_linear

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_outs", "width"), [(64, 2048), (256, 7168), (160, 5120), (72, 2560), (4, 48), (10, 50)]
)
def test_bits_do_not_follow_the_number_of_rows(
    num_outs: int, width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(1030, width, device="cuda").to(dtype)
    weight = torch.randn(num_outs, width, device="cuda").to(dtype) / width**0.5
    whole = wide_linear(x, weight)
    truth = x.double() @ weight.double().T
    by_library = torch.nn.functional.linear(x.float(), weight.float())
    error, limit = ((found - truth).abs().max() for found in (whole, by_library))
    assert error <= 4 * limit
    for count in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 256, 500, 1024):
        first = 7 * count % (1030 - count)
        own = wide_linear(x[first : first + count].clone(), weight)
        assert torch.equal(own, whole[first : first + count]), count
