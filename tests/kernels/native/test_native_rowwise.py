"""Native norms, activations and rotation: against torch's operations, and a row's bits in any
batch.
"""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels.arguments import RopeInputs
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.native import calls
from pagespec.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built")
FORMS: list[fused.NormForm] = ["rounded", "wide", "plus_one"]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [576, 50, 7])
def test_norm(width: int, form: fused.NormForm) -> None:
    x, residual, weight = torch.randn(1, 70, width), torch.randn(1, 70, width), torch.randn(width)
    normed = calls.rms_norm(x, weight, 1e-5, form)
    torch.testing.assert_close(normed, fused.rms_norm_reference(x, weight, 1e-5, form), **CLOSE)
    found = calls.add_rms_norm(x, residual, weight, 1e-5, form)
    assert torch.equal(found[1], x + residual)
    assert torch.equal(found[0], calls.rms_norm(x + residual, weight, 1e-5, form))
    for row in range(70):
        assert torch.equal(
            calls.rms_norm(x[:, row : row + 1], weight, 1e-5, form)[0], normed[0, row : row + 1]
        )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1536, 50, 7])
def test_activation(width: int, kind: fused.Activation) -> None:
    merged = 4 * torch.randn(1, 70, 2 * width)
    merged[0, 0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = merged.split(width, -1)
    found = calls.act_mul(gate, up, kind)
    torch.testing.assert_close(found, fused.act_mul(gate, up, kind), rtol=2e-6, atol=2e-6)
    for row in range(70):
        alone = calls.act_mul(gate[:, row : row + 1], up[:, row : row + 1], kind)
        assert torch.equal(alone[0], found[0, row : row + 1])


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (64, 32), (24, 20)])
def test_rope_store(dim: int, rotary_dim: int, is_normed: bool, is_half: bool) -> None:
    num_tokens, value_dim = 70, 40
    merged = torch.randn(num_tokens, 5 * dim + 2 * value_dim)
    query, key, value = merged.split([3 * dim, 2 * dim, 2 * value_dim], -1)
    heads = query.view(-1, 3, dim), key.view(-1, 2, dim), value.view(-1, 2, value_dim)
    cos, sin = torch.randn(2, 1, num_tokens, rotary_dim // 2 if is_half else rotary_dim)
    weights = (torch.randn(dim), torch.randn(dim)) if is_normed else (None, None)
    inputs = RopeInputs(*heads, cos, sin, rotary_dim, *weights, 1e-5, "plus_one")
    slots = torch.randperm(100)[:num_tokens]
    caches = [(torch.zeros(25, 4, 2, dim), torch.zeros(25, 4, 2, value_dim)) for _ in range(3)]
    found = calls.norm_rope_store(inputs, *caches[0], slots)
    expected = fused.norm_rope_store(inputs, *caches[1], slots)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0][0], caches[1][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[0][1], caches[1][1])
    for t in range(num_tokens):
        row = slice(t, t + 1)
        alone = inputs._replace(
            query=heads[0][row],
            key=heads[1][row],
            value=heads[2][row],
            cos=cos[:, row],
            sin=sin[:, row],
        )
        assert torch.equal(calls.norm_rope_store(alone, *caches[2], slots[row]), found[row])
    assert all(map(torch.equal, caches[2], caches[0]))
