"""Stand-ins for attention, recurrences and indexers that mix no tokens: the result for a token
depends only on the arguments for that token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .current_step import Functions, IndexCall, RecurrentCall


def no_choice(_module: nn.Module, call: IndexCall) -> Tensor:
    """A result of an indexer's shape, which :func:`local_attention` does not read."""
    chosen = call.query.new_zeros(1, 1, 1, dtype=torch.int32)
    return chosen.expand(1, len(call.query), call.num_chosen)


def local_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """A stand-in that depends only on each token's own query, key and value."""
    group_size = query.shape[1] // value.shape[1]

    def gate(x: Tensor) -> Tensor:
        ramp = torch.linspace(-1.0, 1.0, x.shape[-1], dtype=x.dtype, device=x.device)
        return torch.tanh((x * ramp).sum(-1, keepdim=True))

    out = value.repeat_interleave(group_size, 1) * (1 + gate(query))
    out = out * (1 + gate(key).repeat_interleave(group_size, 1))
    return out.transpose(1, 2).contiguous(), None


# Which tensors of a recurrence have one row per token, in the order of its op. The first has the
# shape of the result.
_PER_TOKEN = {
    "short_conv": (0,),
    "delta_rule": (2, 0, 1, 3, 4),
    "ssd_scan": (0, 1, 3, 4),
    "selective_scan": (0, 1, 3, 4, 6),
}


def per_token(call: RecurrentCall) -> list[Tensor]:
    """The inputs of a recurrence per token: ``[T, ...]``."""
    tensors = [call.tensors[place] for place in _PER_TOKEN[call.kind]]
    return [tensor for tensor in tensors if tensor is not None]


def local_recurrence(call: RecurrentCall) -> Tensor:
    """Same as :func:`local_attention`."""
    out, *others = per_token(call)
    for other in others:
        flat = other.flatten(1)
        ramp = torch.linspace(-1.0, 1.0, flat.shape[1], dtype=flat.dtype, device=flat.device)
        gate = 1 + torch.tanh((flat * ramp).sum(-1)).to(out.dtype)
        out = out * gate.view(-1, *[1] * (out.dim() - 1))
    return out


LOCAL = Functions(local_attention, local_recurrence, no_choice)
