"""The recurrent layers on a CPU. The bits of a token depend only on its own inputs and its state.

Mamba-1 and the short convolution use only elementwise operations.

The gated delta rule and Mamba-2 have a matrix S of keys and values. With decay a, key k, value v
and query q of a token, S becomes ``a S + k (x) d`` and the output is ``q S``. Mamba-2 has ``d =
v``. The delta rule writes the difference, ``d = beta (v - k a S)``. Both reads of S happen before
it changes, ``q S = (a q) S_before + (q . k) d``: one matmul for both, and one pass that changes S.
Everything that does not depend on S is computed for many tokens at once: elementwise operations,
sums along the last dimension, and batched matmuls of four rows, for which MKL has one order of
summation (:mod:`..matmul.cpu.invariant`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..arguments import DeltaInputs, ScanInputs, SsdInputs
from ..device import MKL_ROW_UNIT
from ..fused.cpu_activation import elementwise
from .walk import StepRows, Stretch, Tokens, as_tokens, batches, load, save, stretches, walk, wide


def selective_scan(inputs: ScanInputs, states: Tensor, rows: StepRows, dt_softplus: bool) -> Tensor:
    """Same as :func:`.ops.selective_scan`."""
    x, dt, A, B, C, D, z, dt_bias = inputs
    out = x.new_zeros(x.shape, dtype=result_type(inputs))
    rates = A.float().t().contiguous()
    most = _PREPARED_ELEMENTS // rates.numel()

    def advance(work: Tensor, tokens: Tokens) -> None:
        for part in batches(tokens, len(work), most):
            step = _step_sizes(dt[part], dt_bias, dt_softplus)
            passed = _scan(work, step.float().contiguous(), rates, wide(B, part), wide(x, part))
            # Hugging Face's modules read a state that is rounded to the dtype of their inputs.
            y = _tree_sum(passed.to(x.dtype).float() * wide(C, part).unsqueeze(-1)).to(x.dtype)
            if D is not None:
                y = y + x[part] * D
            if z is not None:
                y = y * elementwise("silu", z[part])
            out[part] = y

    walk(states, rows, advance)
    return out


def result_type(inputs: ScanInputs) -> torch.dtype:
    """The dtype of the outputs: that of ``(y + x * D) * z``, with y of x's dtype."""
    dtype = inputs.x.dtype
    for other in (inputs.D, inputs.z):
        if other is not None:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def _scan(states: Tensor, dt: Tensor, rates: Tensor, B: Tensor, x: Tensor) -> Tensor:
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
    """The sum of ``x [n, N, I]`` over N, by halving."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        rest = x[:, 2 * half :]
        x = x[:, :half] + x[:, half : 2 * half]
        if rest.shape[1]:
            x[:, :1] += rest
    return x[:, 0]


ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "gelu": ("gelu", {}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
    "swish": ("silu", {}),
}
"""Functions that may follow a short convolution, by their names in Hugging Face's modules; all map
0 to 0."""

# Elements of a row's outputs computed at once, so that they stay in the processor's cache.
_PIECE_ELEMENTS = 1 << 17


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StepRows, activation: str
) -> Tensor:
    """Same as :func:`.ops.short_conv`."""
    taps = weight.float().t().contiguous()
    out = x.new_zeros(x.shape, dtype=weight.dtype)
    found = stretches(rows)
    single = [parts[0] for parts in found if parts[-1].end - parts[0].begin == 1]
    if single:
        _convolve_single(x, taps, bias, states, single, out)
    for parts in found:
        if parts[-1].end - parts[0].begin > 1:
            _convolve_row(x, taps, bias, states, parts, out)
    return activated(out, activation).to(x.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    """``x`` after an activation of ``ACTIVATIONS``; unchanged for ""."""
    if not activation:
        return x
    name, arguments = ACTIVATIONS[activation]
    return elementwise(name, x, **arguments)


def _convolve_single(
    x: Tensor, taps: Tensor, bias: Tensor | None, states: Tensor, parts: list[Stretch], out: Tensor
) -> None:
    """All rows with one token."""
    tokens = as_tokens([part.begin for part in parts], x.device)
    before = load(states, [part.source for part in parts])
    window = torch.cat((before, x[tokens].unsqueeze(1)), 1)
    products = window.to(out.dtype).float() * taps
    out[tokens] = _total(products.unbind(1), bias).to(out.dtype)
    save(states, [part.slot for part in parts], window[:, 1:])


def _convolve_row(
    x: Tensor, taps: Tensor, bias: Tensor | None, states: Tensor, parts: list[Stretch], out: Tensor
) -> None:
    """A row of several tokens: its inputs after the last ones of the state, shifted."""
    begin, end = parts[0].begin, parts[-1].end
    inputs = torch.cat((load(states, [parts[0].source])[0], x[begin:end]))
    step = max(1, _PIECE_ELEMENTS // x.shape[1])
    for first in range(0, end - begin, step):
        last = min(first + step, end - begin)
        wide = inputs[first : last + len(taps) - 1].to(out.dtype).float()
        products = [wide[i : i + last - first] * tap for i, tap in enumerate(taps.unbind())]
        out[begin + first : begin + last] = _total(products, bias)
    for part in parts:
        if part.slot >= 0:
            after = part.end - begin
            states[part.slot] = inputs[after : after + len(taps) - 1]


def _total(products: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The sum, in order. The summands are rounded first: whether addcmul does so depends on the
    machine."""
    total = products[0]
    for product in products[1:]:
        total += product
    if bias is not None:
        total += bias
    return total


_L2_EPS = 1e-6
# Elements to which the tokens of a batch are expanded; 4 MiB.
_PREPARED_ELEMENTS = 1 << 20


def delta_rule(
    inputs: DeltaInputs, states: Tensor, rows: StepRows, scale: float, l2norm: bool
) -> Tensor:
    """Same as :func:`.ops.delta_rule`."""
    query, key, value, decay, beta = inputs
    out = query.new_zeros(value.shape)
    most = _most_tokens(states)

    def advance(work: Tensor, tokens: Tokens) -> None:
        for part in batches(tokens, len(work), most):
            both = torch.cat((query[part], key[part]), 1).float()
            if l2norm:
                # Not rsqrt: its vector code rounds differently from its code for the end of a
                # range.
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
    inputs: SsdInputs,
    states: Tensor,
    rows: StepRows,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """Same as :func:`.ops.ssd_scan`."""
    x, dt, A, B, C, D, dt_bias = inputs
    out = x.new_zeros(x.shape, dtype=torch.float32)
    most = _most_tokens(states)

    def advance(work: Tensor, tokens: Tokens) -> None:
        for part in batches(tokens, len(work), most):
            step = _step_sizes(dt[part], dt_bias, dt_softplus)
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


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """``softplus(dt + bias)``, rounded to the dtype of dt after each operation."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return elementwise("softplus", dt) if softplus else dt


def _most_tokens(states: Tensor) -> int:
    return _PREPARED_ELEMENTS // (states.shape[1] * MKL_ROW_UNIT * max(states.shape[2:]))


def _advance(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, a: Tensor
) -> Tensor:
    """Outputs ``[n, H, V]`` of n tokens, step by step; ``states [R, H, K, V]`` change in place.

    Args:
        q: ``[n, Hk, K]``. k: likewise. v: ``[n, H, V]``.
        beta: ``[n, H, 1]``, or None for Mamba-2. a: ``[n, H, 1]`` or ``[n, H, K]``.
    """
    num_rows, num_heads, num_keys, num_values = states.shape
    num_times = len(v) // num_rows
    groups = q.shape[1], num_heads // q.shape[1]  # heads that share a key are side by side
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
        # addcmul would save a seventh, but whether it rounds the multiplication depends on the
        # machine.
        torch.mul(k_column, d_row, out=change)
        states.mul_(a_column).add_(change)
    y = first + (q * k).sum(-1, keepdim=True) * write
    return y.flatten(1, 2)
