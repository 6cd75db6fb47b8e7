"""Causal depthwise convolution over a few positions, in elementwise operations only: a token's bits
follow its inputs and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fused.cpu_activation import elementwise
from .walk import StepRows, Stretch, as_tokens, load, save, stretches

ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "gelu": ("gelu", {}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": "tanh"}),
    "sigmoid": ("sigmoid", {}),
    "silu": ("silu", {}),
    "swish": ("silu", {}),
}
"""What may follow a short convolution, under the names of Hugging Face's modules."""


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StepRows, activation: str
) -> Tensor:
    """As :func:`.ops.short_conv`."""
    taps = weight.float().t().contiguous()
    out = x.new_zeros(x.shape, dtype=weight.dtype)
    found = stretches(rows)
    single = [parts[0] for parts in found if parts[-1].end - parts[0].begin == 1]
    if single:
        _convolve_single(x, taps, bias, states, single, out)
    for parts in found:
        if parts[-1].end - parts[0].begin > 1:
            _convolve_row(x, taps, bias, states, parts, out)
    if activation:
        name, arguments = ACTIVATIONS[activation]
        out = elementwise(name, out, **arguments)
        if name == "sigmoid":
            out[int(rows.query_starts[-1]) :] = 0
    return out.to(x.dtype)


def _convolve_single(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    states: Tensor,
    parts: list[Stretch],
    out: Tensor,
) -> None:
    """All rows of one token."""
    tokens = as_tokens([part.begin for part in parts], x.device)
    before = load(states, [part.source for part in parts])
    window = torch.cat((before, x[tokens].unsqueeze(1)), 1)
    wide = window.to(out.dtype).float()
    out[tokens] = _weighted([wide[:, i] for i in range(len(taps))], taps, bias).to(out.dtype)
    save(states, [part.slot for part in parts], window[:, 1:])


def _convolve_row(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    states: Tensor,
    parts: list[Stretch],
    out: Tensor,
) -> None:
    """A row of several tokens: its inputs behind the last ones of the state, shifted."""
    begin, end = parts[0].begin, parts[-1].end
    inputs = torch.cat((load(states, [parts[0].source])[0], x[begin:end]))
    wide = inputs.to(out.dtype).float()
    shifted = [wide[i : i + end - begin] for i in range(len(taps))]
    out[begin:end] = _weighted(shifted, taps, bias).to(out.dtype)
    for part in parts:
        after = part.end - begin
        states[part.slot] = inputs[after : after + len(taps) - 1]


def _weighted(shifted: list[Tensor], taps: Tensor, bias: Tensor | None) -> Tensor:
    # No addcmul: whether it rounds the product would be up to the machine.
    total = shifted[0] * taps[0]
    for inputs, tap in zip(shifted[1:], taps[1:], strict=True):
        total += inputs * tap
    return total if bias is None else total.add_(bias)
