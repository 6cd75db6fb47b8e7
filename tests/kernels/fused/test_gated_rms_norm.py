"""RMSNorm with a gate, under Triton's interpreter, against torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from pagespec.kernels.fused import dispatch
from pagespec.kernels.fused.rms_norm import gated_rms_norm

EPS = 1e-6


def inputs(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_rows)
    x, gate = torch.randn(2, num_rows, width).to(dtype)
    return x, gate, torch.randn(width).to(dtype)


@pytest.mark.parametrize("form", ["rounded", "wide", "plus_one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (33, 96), (5, 2304)])
def test_results_are_those_of_torch(
    form: dispatch.NormForm, dtype: torch.dtype, num_rows: int, width: int
) -> None:
    x, gate, weight = inputs(num_rows, width, dtype)
    found = gated_rms_norm(x, gate, weight, EPS, form)
    assert found.dtype == dtype
    expected = dispatch.gated_rms_norm(x, gate, weight, EPS, form)
    # The sum of squares has another order, which may round the normalised value otherwise.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=3 * unit, atol=unit)
    assert (found == expected).float().mean() > (0.2 if dtype == torch.float32 else 0.98)


def test_a_row_has_the_same_bits_in_any_batch_and_layout() -> None:
    x, gate, weight = inputs(40, 128, torch.bfloat16)
    whole = gated_rms_norm(x, gate, weight, EPS, "rounded")
    for row in (0, 17, 39):
        alone = gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, EPS, "rounded")
        assert torch.equal(alone[0], whole[row])
    # Ten tokens of four heads, inside wider rows, as a merged matmul leaves them.
    merged = torch.zeros(10, 4 * 128 + 48, dtype=torch.bfloat16)
    merged[:, 48:] = gate.view(10, 512)
    heads = merged[None, :, 48:].view(1, 10, 4, 128)
    assert not heads.is_contiguous()
    assert torch.equal(gated_rms_norm(x, heads, weight, EPS, "rounded"), whole)
