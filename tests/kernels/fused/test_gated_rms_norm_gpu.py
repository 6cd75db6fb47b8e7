"""RMSNorm with a gate on a GPU: close to torch's operations; a row's bits do not depend on the
batch.
"""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels.fused import dispatch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_heads_in_wider_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_tokens, num_heads, width = 4099, 32, 128
    merged = torch.randn(1, num_tokens, 12_352, device="cuda", dtype=dtype)
    gate = merged[..., 8192:12_288].view(1, num_tokens, num_heads, width)
    x = torch.randn(num_tokens * num_heads, width, device="cuda", dtype=dtype)
    weight = torch.randn(width, device="cuda", dtype=dtype)
    found = dispatch.gated_rms_norm(x, gate, weight, 1e-6, "rounded")
    normed = dispatch.rms_norm_reference(x, weight, 1e-6, "rounded").float()
    expected = (normed * torch.nn.functional.silu(gate.reshape(x.shape).float())).to(dtype)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=3 * unit, atol=unit)
    assert (found == expected).float().mean() > (0.2 if dtype == torch.float32 else 0.98)
    for token in (0, 1, 4098):
        alone = dispatch.gated_rms_norm(
            x[token * num_heads :][:num_heads], gate[:, token : token + 1], weight, 1e-6, "rounded"
        )
        assert torch.equal(alone, found[token * num_heads :][:num_heads])
