"""The recurrent states of requests: a tensor of slots a recurrent call, and the bytes of a slot.

A *slot* holds what one request needs of all recurrent layers: the last inputs of short
convolutions, and the states of scans (docs/recurrent.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..kernels.recurrent.spec import RecurrentSpec
from .step_inputs import RecurrentStates


def allocate_states(
    specs: Sequence[RecurrentSpec], num_slots: int, interval: int, device: torch.device | str
) -> RecurrentStates:
    """One tensor ``[num_slots + 1, *slot_shape]`` a recurrent call, the null slot as the last one.

    Nothing reads a slot that was not written, but the null slot.
    """

    def zeros(spec: RecurrentSpec) -> Tensor:
        shape = (num_slots + 1, *spec.slot_shape(device))
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=spec.dtype, device=device)
        # As the pages of the KV cache: memory is taken only once it is written.
        memory = np.zeros(math.prod(shape) * spec.dtype.itemsize, np.uint8)
        return torch.from_numpy(memory).view(spec.dtype).view(shape)

    return RecurrentStates([zeros(spec) for spec in specs], interval)


def check_interval(specs: Iterable[RecurrentSpec], interval: int) -> None:
    """Refuse intervals that hold less than what a convolution keeps: its kernel would read of a
    state what it wrote.

    Raises:
        InvalidInputError: field "state_interval".
    """
    longest = max((s.state_shape[0] for s in specs if s.kind == "short_conv"), default=0)
    if interval < longest:
        limit = f"must be {longest} or more on a GPU: a convolution keeps as many inputs"
        raise InvalidInputError("state_interval", interval, limit)


def bytes_per_slot(specs: Iterable[RecurrentSpec], device: torch.device | str) -> int:
    """Bytes that one state slot takes in the tensors of all recurrent calls."""
    return sum(spec.num_bytes(device) for spec in specs)
