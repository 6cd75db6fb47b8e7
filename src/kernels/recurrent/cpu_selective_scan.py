"""Mamba-1's recurrence in elementwise operations only: a token's bits follow its inputs and its
state, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fused.cpu_activation import elementwise
from .walk import StepRows, Tokens, batches, walk, wide

# Elements of the states of a batch of tokens; 4 MiB.
_PREPARED_ELEMENTS = 1 << 20


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    rows: StepRows,
    dt_softplus: bool,
) -> Tensor:
    """As :func:`.ops.selective_scan`."""
    out = torch.zeros(x.shape, dtype=result_type(x, D, z), device=x.device)
    rates = A.float().t().contiguous()
    most = _PREPARED_ELEMENTS // rates.numel()

    def advance(work: Tensor, tokens: Tokens) -> None:
        for part in batches(tokens, len(work), most):
            step = dt[part] if dt_bias is None else dt[part] + dt_bias.to(dt.dtype)
            if dt_softplus:
                step = elementwise("softplus", step)
            passed = _advance(work, step.float().contiguous(), rates, wide(B, part), wide(x, part))
            # Hugging Face's modules read a state that is rounded to the dtype of their inputs.
            y = _tree_sum(passed.to(x.dtype).float() * wide(C, part).unsqueeze(-1)).to(x.dtype)
            if D is not None:
                y = y + x[part] * D
            if z is not None:
                y = y * elementwise("silu", z[part])
            out[part] = y

    walk(states, rows, advance)
    return out


def result_type(x: Tensor, D: Tensor | None, z: Tensor | None) -> torch.dtype:
    """The dtype of the outputs: that of ``(y + x * D) * z``, y of x's dtype."""
    dtype = x.dtype
    for other in (D, z):
        if other is not None:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def _advance(states: Tensor, dt: Tensor, rates: Tensor, B: Tensor, x: Tensor) -> Tensor:
    """The states ``[n, N, I]`` after each of n tokens; ``states [R, N, I]`` change in place.

    Args:
        dt: ``[n, I]``. rates: ``[N, I]``. B: ``[n, N]``. x: ``[n, I]``.
    """
    passed = (rates * dt.unsqueeze(1)).exp_()
    added = B.unsqueeze(-1) * (dt * x).unsqueeze(1)
    before = states
    num_rows = len(states)
    for now, new in zip(passed.split(num_rows), added.split(num_rows), strict=True):
        before = now.mul_(before).add_(new)
    states.copy_(before)
    return passed


def _tree_sum(x: Tensor) -> Tensor:
    """The sum of ``x [n, N, I]`` over N, in halves."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        rest = x[:, 2 * half :]
        x = x[:, :half] + x[:, half : 2 * half]
        if rest.shape[1]:
            x[:, :1] += rest
    return x[:, 0]
