"""Causal depthwise convolution over a few positions, in elementwise operations only: a token's bits
follow its inputs and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..fused.cpu_activation import elementwise
from .walk import StepRows, Stretch, as_tokens, load, save, stretches

ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "gelu": ("gelu", {}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
    "swish": ("silu", {}),
}
"""What may follow a short convolution, under the names of Hugging Face's modules; 0 stays 0."""

# Elements of a row's outputs that are computed at once, to stay in the processor's cache.
_PIECE_ELEMENTS = 1 << 17


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
    return activated(out, activation).to(x.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    """``x`` behind an activation of ``ACTIVATIONS``, or as it is for ""."""
    if not activation:
        return x
    name, arguments = ACTIVATIONS[activation]
    return elementwise(name, x, **arguments)


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
    products = window.to(out.dtype).float() * taps
    out[tokens] = _total(products.unbind(1), bias).to(out.dtype)
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
    step = max(1, _PIECE_ELEMENTS // x.shape[1])
    for first in range(0, end - begin, step):
        last = min(first + step, end - begin)
        wide = inputs[first : last + len(taps) - 1].to(out.dtype).float()
        products = [wide[i : i + last - first] * tap for i, tap in enumerate(taps.unbind())]
        out[begin + first : begin + last] = _total(products, bias)
    for part in parts:
        after = part.end - begin
        states[part.slot] = inputs[after : after + len(taps) - 1]


def _total(products: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Their sum, in order. The products were rounded before: whether addcmul does so is up to the
    machine."""
    total = products[0]
    for product in products[1:]:
        total += product
    if bias is not None:
        total += bias
    return total
