"""The static parameters of one recurrent call: its op, the state it keeps, its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .chunk_layout import slot_shape


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What one recurrent call of the model keeps of a request, found by the probe.

    Attributes:
        call: its number in order of execution, 0, 1, 2, ...
        kind: the op of :mod:`.ops` that computes it.
        state_shape: of its state. state_dtype: by name.
        settings: the numbers of the call that are no tensors, in the op's order.
        input_dtypes: of its keys and values, by name, where a GPU computes it in chunks.
    """

    call: int
    kind: str
    state_shape: tuple[int, ...]
    state_dtype: str
    settings: tuple[Any, ...]
    input_dtypes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecurrentSpec:
        """Of what ``asdict`` gave, after JSON has made lists of tuples."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.state_dtype)
        return found

    def slot_shape(self, device: torch.device | str) -> tuple[int, ...]:
        """Of what one slot holds: the state, or on a GPU what :mod:`.chunk_layout` says."""
        if torch.device(device).type == "cpu" or not self.input_dtypes:
            return self.state_shape
        num_heads, num_keys, num_values = self.state_shape
        key_dtype, value_dtype = (getattr(torch, name) for name in self.input_dtypes)
        return slot_shape(num_heads, num_keys, num_values, key_dtype, value_dtype)

    def num_bytes(self, device: torch.device | str) -> int:
        """Of one slot."""
        return math.prod(self.slot_shape(device)) * self.dtype.itemsize
