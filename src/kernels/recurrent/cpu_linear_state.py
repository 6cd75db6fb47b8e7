"""The gated delta rule and Mamba-2, token by token: their state is a matrix S of keys and values.

With decay a, key k, value v and query q of a token, S becomes ``a S + k (x) d`` and the output is
``q S``. Mamba-2 has ``d = v``; the delta rule writes what is missing, ``d = beta (v - k a S)``.
Both reads of S are taken before it changes, ``q S = (a q) S_before + (q . k) d``: one matmul for
both, and one pass that changes S.

What does not depend on S is computed for many tokens at once, each in the same operations. The bits
of a token follow its own inputs and S: all operations are elementwise, sums along the last
dimension, and batched matmuls of four rows, for which MKL has one order of summation
(:mod:`..linear_cpu.invariant`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..device import MKL_ROW_UNIT
from ..fused.cpu_activation import elementwise
from .walk import StepRows, Tokens, batches, walk, wide

_L2_EPS = 1e-6
# Elements of what the tokens of a batch are prepared to; 4 MiB.
_PREPARED_ELEMENTS = 1 << 20


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: StepRows,
    scale: float,
    l2norm: bool,
) -> Tensor:
    """As :func:`.ops.delta_rule`."""
    out = query.new_zeros(value.shape)
    most = _most_tokens(states)

    def advance(work: Tensor, tokens: Tokens) -> None:
        for part in batches(tokens, len(work), most):
            both = torch.cat((query[part], key[part]), 1).float()
            if l2norm:
                # Not rsqrt, whose vector code rounds otherwise than that for the end of a range.
                both = both / ((both * both).sum(-1, keepdim=True) + _L2_EPS).sqrt()
            q, k = both.chunk(2, 1)
            a = wide(decay, part).exp()
            a = a if a.dim() == 3 else a.unsqueeze(-1)
            b = wide(beta, part).unsqueeze(-1)
            y = _advance(work, q * scale, k, wide(value, part), b, a)
            out[part] = y.to(out.dtype)

    walk(states, rows, advance)
    return out


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    rows: StepRows,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """As :func:`.ops.ssd_scan`."""
    out = x.new_zeros(x.shape, dtype=torch.float32)
    most = _most_tokens(states)

    def advance(work: Tensor, tokens: Tokens) -> None:
        for part in batches(tokens, len(work), most):
            step = dt[part] if dt_bias is None else dt[part] + dt_bias.to(dt.dtype)
            if dt_softplus:
                step = elementwise("softplus", step)
            step = step.clamp(dt_min, dt_max).float().contiguous()
            v = wide(x, part)
            a = (A.float() * step).exp().unsqueeze(-1)
            q, k = wide(C, part), wide(B, part)
            y = _advance(work, q, k, v * step.unsqueeze(-1), None, a)
            if D is not None:
                y += D.unsqueeze(-1) * v
            out[part] = y

    walk(states, rows, advance)
    return out


def _most_tokens(states: Tensor) -> int:
    return _PREPARED_ELEMENTS // (states.shape[1] * MKL_ROW_UNIT * max(states.shape[2:]))


def _advance(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, a: Tensor
) -> Tensor:
    """Outputs ``[n, H, V]`` of n tokens, time after time; ``states [R, H, K, V]`` change in place.

    Args:
        q: ``[n, Hk, K]``. k: alike. v: ``[n, H, V]``.
        beta: ``[n, H, 1]``, or None for Mamba-2. a: ``[n, H, 1]`` or ``[n, H, K]``.
    """
    num_rows, num_heads, num_keys, num_values = states.shape
    num_times = len(v) // num_rows
    groups = q.shape[1], num_heads // q.shape[1]  # heads that share a key lie side by side
    q, k = q.unsqueeze(2), k.unsqueeze(2)
    v, a = v.unflatten(1, groups), a.unflatten(1, groups)
    reads = v.new_zeros(len(v), *groups, MKL_ROW_UNIT, num_keys)
    torch.mul(q, a, out=reads[..., 0, :])
    if beta is not None:
        beta = beta.unflatten(1, groups)
        torch.mul(k * beta, a, out=reads[..., 1, :])
        v = v * beta
    read = v.new_empty(len(v), *groups, MKL_ROW_UNIT, num_values)
    first, known = read[..., 0, :], read[..., 1, :]
    write = torch.empty_like(v) if beta is not None else v

    matrices = states.view(-1, num_keys, num_values)
    states = states.view(num_rows, *groups, num_keys, num_values)
    change = torch.empty_like(states)

    def times(x: Tensor) -> Iterable[Tensor]:
        return x.unflatten(0, (num_times, num_rows)).unbind() if num_times > 1 else (x,)

    per_time = zip(
        reads.view(num_times, -1, MKL_ROW_UNIT, num_keys).unbind(),
        read.view(num_times, -1, MKL_ROW_UNIT, num_values).unbind(),
        times(known),
        times(v),
        times(write),
        times(write.unsqueeze(-2)),
        times(k.unsqueeze(-1)),
        times(a.unsqueeze(-1)),
        strict=True,
    )
    for left, both, old, target, d, d_row, k_column, a_column in per_time:
        torch.bmm(left, matrices, out=both)
        if beta is not None:
            torch.sub(target, old, out=d)
        # addcmul would save a seventh, but whether it rounds the product is up to the machine.
        torch.mul(k_column, d_row, out=change)
        states.mul_(a_column).add_(change)
    y = first + (q * k).sum(-1, keepdim=True) * write
    return y.flatten(1, 2)
