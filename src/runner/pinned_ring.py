"""Pinned host memory: a ring of buffers that the device copies from and writes results to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int32]


def to_device(array: IntArray, device: torch.device) -> Tensor:
    """A copy of an array that the host does not wait for. torch keeps the pinned memory until the
    copy is done, and gives it out again."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class PinnedRing:
    """Pinned host buffers, each free again once the copy that last read or wrote it is done.

    Args:
        num_buffers: at least one more than the steps that can be in flight.
        num_elements: of each buffer.

    Attributes:
        tensor: all of them, ``[num_buffers, num_elements]``.
    """

    def __init__(self, num_buffers: int, num_elements: int, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(
            num_buffers, num_elements, dtype=dtype, pin_memory=torch.cuda.is_available()
        )
        self._tensors = list(self.tensor)
        self._arrays = [tensor.numpy() for tensor in self._tensors]
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def take(self) -> tuple[int, Tensor, NDArray[Any]]:
        """(number, tensor, the same memory as an array) of the next buffer, waited for."""
        index = self._next
        self._next = (index + 1) % len(self._tensors)
        self.wait_for(index)
        return index, self._tensors[index], self._arrays[index]

    def wait_for(self, index: int) -> None:
        """Until nothing that is queued uses buffer ``index``."""
        event = self._events[index]
        if event is not None:
            event.synchronize()

    def release(self, index: int) -> torch.cuda.Event:
        """The work queued so far is the last to use buffer ``index``; returns its event."""
        event = self._events[index]
        if event is None:
            event = self._events[index] = torch.cuda.Event()
        event.record()
        return event
