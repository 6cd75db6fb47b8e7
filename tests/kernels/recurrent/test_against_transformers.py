"""The recurrent ops give the results of Hugging Face's functions, for every family of models."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagespec.kernels.recurrent import ops

NUM_TOKENS = 75
BF16 = torch.bfloat16
CONVOLUTIONS = [
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "zamba",
    "zamba2",
]
DELTA_RULES = ["olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"]
MAMBA_2 = ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"]
MAMBA_1 = ["falcon_mamba", "jamba", "mamba", "zamba"]


def modelling(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def rows(states: Tensor) -> tuple[Any, ...]:
    """One row of all tokens, in slot 0."""
    starts, contexts = torch.tensor([0, NUM_TOKENS]), torch.tensor([NUM_TOKENS])
    table = torch.zeros(1, 3)
    of_row = torch.zeros(1)
    return states, *(x.to(torch.int32) for x in (starts, contexts, table, of_row)), 32, None


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to ``tolerance`` of the largest value."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    largest = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * largest)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_short_conv(family: str, activation: str | None, dtype: torch.dtype) -> None:
    module = modelling(family)
    x = torch.randn(1, 24, NUM_TOKENS).to(dtype)
    weight, bias = torch.randn(24, 4).to(dtype), torch.randn(24).to(dtype)
    theirs = module.causal_conv1d_fn(x, weight, bias, activation=activation)
    states = torch.zeros(2, 3, 24, dtype=dtype)
    ours = ops.short_conv(x[0].t(), weight, bias, *rows(states), activation or "")
    # In bfloat16, one unit in the last place where a sum is on a rounding boundary.
    assert_close(ours, theirs[0].t(), 1e-5 if dtype == torch.float32 else 2**-8)
    assert torch.equal(states[0], x[0, :, -3:].t())

    # One more token, from the state.
    new = torch.randn(1, 24, 1).to(dtype)
    theirs = module.causal_conv1d_update(new, x[:, :, -3:].clone(), weight, bias, activation)
    one = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([NUM_TOKENS + 1]).int()
    table = torch.zeros(1, 3, dtype=torch.int32)
    ours = ops.short_conv(
        new[0].t(), weight, bias, states, *one, table, table[0, :1], 32, None, activation or ""
    )
    assert_close(ours, theirs[0].t(), 1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
def test_short_conv_activations(activation: str) -> None:
    x, weight = torch.randn(1, 24, NUM_TOKENS), torch.randn(24, 2)
    theirs = modelling("lfm2").causal_conv1d_fn(x, weight, activation=activation)
    states = torch.zeros(2, 1, 24)
    ours = ops.short_conv(x[0].t(), weight, None, *rows(states), activation)
    assert_close(ours, theirs[0].t())


def delta_inputs(num_heads: int, num_key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    query, key = torch.randn(2, 1, NUM_TOKENS, num_key_heads, 32)
    value = torch.randn(1, NUM_TOKENS, num_heads, 24)
    beta = torch.rand(1, NUM_TOKENS, num_heads)
    return [x.to(dtype) for x in (query, key, value, beta)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (BF16, 2**-8)])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", DELTA_RULES)
def test_gated_delta_rule(family: str, form: str, dtype: torch.dtype, tolerance: float) -> None:
    query, key, value, beta = delta_inputs(4, 2, dtype)
    # Of Qwen3-Next's range: a state loses from nothing to nearly all.
    decay = -(torch.rand(1, NUM_TOKENS, 4) ** 4) * 8
    function = getattr(modelling(family), f"torch_{form}_gated_delta_rule")
    repeated = (x.repeat_interleave(2, 2) for x in (query, key))
    theirs, state = function(
        *repeated,
        value,
        g=decay,
        beta=beta,
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states = torch.zeros(2, 4, 32, 24)
    inputs = (x[0] for x in (query, key, value, decay, beta))
    ours = ops.delta_rule(*inputs, *rows(states), 32**-0.5, True)
    assert_close(ours, theirs[0], tolerance)
    assert_close(states[0], state[0])


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_kimi_delta_attention(form: str, l2norm: bool) -> None:
    query, key, value, beta = delta_inputs(3, 3, torch.float32)
    if not l2norm:
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    decay = -(torch.rand(1, NUM_TOKENS, 3, 32) ** 4) * 8
    theirs, state = getattr(modelling("kimi_linear"), f"{form}_kimi_delta_attention")(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
    )
    states = torch.zeros(2, 3, 32, 24)
    inputs = (x[0] for x in (query, key, value, decay, beta))
    ours = ops.delta_rule(*inputs, *rows(states), 32**-0.5, l2norm)
    assert_close(ours, theirs[0])
    assert_close(states[0], state[0])


@pytest.mark.parametrize(("dtype", "limits"), [(torch.float32, (0.0, float("inf"))),
                                               (torch.float32, (0.2, 1.5)),
                                               (BF16, (0.0, float("inf")))])  # fmt: skip
@pytest.mark.parametrize("family", MAMBA_2)
def test_mamba_2(family: str, dtype: torch.dtype, limits: tuple[float, float]) -> None:
    module = modelling(family)
    x = torch.randn(1, NUM_TOKENS, 4, 24).to(dtype)
    dt = torch.randn(1, NUM_TOKENS, 4).to(dtype)
    B, C = torch.randn(2, 1, NUM_TOKENS, 2, 16).to(dtype)
    rates, skip, bias = -torch.rand(4) * 4, torch.randn(4).to(dtype), torch.randn(4).to(dtype)
    theirs, state = module.mamba2_chunk_scan(
        x,
        dt,
        rates,
        B,
        C,
        chunk_size=32,
        D=skip,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    states = torch.zeros(2, 4, 16, 24)
    inputs = (x[0], dt[0], rates, B[0], C[0], skip, bias)
    ours = ops.ssd_scan(*inputs, *rows(states), True, *limits)
    assert_close(ours, theirs[0])
    assert_close(states[0], state[0].mT)


def test_mamba_2_token_by_token() -> None:
    """The form for decoding, which does not clamp dt."""
    module = modelling("mamba2")
    x, dt = torch.randn(NUM_TOKENS, 4, 24), torch.randn(NUM_TOKENS, 4)
    B, C = torch.randn(2, NUM_TOKENS, 1, 16)
    rates, skip, bias = -torch.rand(4) * 4, torch.randn(4), torch.randn(4)
    state = torch.zeros(1, 4, 24, 16)
    each = [
        module.mamba2_selective_state_update(
            state,
            x[t : t + 1],
            dt[t : t + 1, :, None].expand(-1, -1, 24),
            rates[:, None, None].expand(-1, 24, 16),
            B[t : t + 1],
            C[t : t + 1],
            skip[:, None].expand(-1, 24),
            bias[:, None].expand(-1, 24),
            dt_softplus=True,
        )
        for t in range(NUM_TOKENS)
    ]
    states = torch.zeros(2, 4, 16, 24)
    infinite = float("inf")
    ours = ops.ssd_scan(x, dt, rates, B, C, skip, bias, *rows(states), True, 0.0, infinite)
    assert_close(ours, torch.cat(each))
    assert_close(states[0], state[0].mT)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (BF16, 2**-8)])
@pytest.mark.parametrize("family", MAMBA_1)
def test_mamba_1(family: str, dtype: torch.dtype, tolerance: float, has_gate: bool) -> None:
    module = modelling(family)
    x, dt, z = torch.randn(3, 1, 24, NUM_TOKENS).to(dtype)
    B, C = torch.randn(2, 1, 10, NUM_TOKENS).to(dtype)
    rates, skip, bias = -torch.rand(24, 10) * 4, torch.randn(24), torch.randn(24)
    theirs, state = module.mamba_selective_scan(
        x,
        dt,
        rates,
        B,
        C,
        D=skip,
        z=z if has_gate else None,
        delta_bias=bias,
        delta_softplus=True,
        return_last_state=True,
    )
    states = torch.zeros(2, 10, 24)
    tokens = [one[0].t() for one in (x, dt, B, C, z)]
    ours = ops.selective_scan(
        *tokens[:2],
        rates,
        *tokens[2:4],
        skip,
        tokens[4] if has_gate else None,
        bias,
        *rows(states),
        True,
    )
    assert_close(ours, theirs[0].t(), tolerance)
    assert_close(states[0], state[0].t())
