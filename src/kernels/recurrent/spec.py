"""The static parameters of one recurrent call: its op, the state it keeps, its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What one recurrent call of the model keeps of a request, found by the probe.

    Attributes:
        call: its number in order of execution, 0, 1, 2, ...
        kind: the op of :mod:`.ops` that computes it.
        state_shape: of what one slot holds. state_dtype: by name.
        settings: the numbers of the call that are no tensors, in the op's order.
    """

    call: int
    kind: str
    state_shape: tuple[int, ...]
    state_dtype: str
    settings: tuple[Any, ...]

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

    @property
    def num_bytes(self) -> int:
        """Of one slot."""
        return math.prod(self.state_shape) * self.dtype.itemsize
