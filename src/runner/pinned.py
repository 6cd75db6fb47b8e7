"""Pinned host memory, from which the device copies and to which it writes results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int32]
ALIGNMENT = 4
"""int32 words per alignment unit: 16 bytes, on which Triton specialises kernels."""


def to_device(array: IntArray, device: torch.device) -> Tensor:
    """An asynchronous copy of an array. torch keeps the pinned memory until the copy is complete,
    and then reuses it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def parts_to_device(arrays: Sequence[IntArray], device: torch.device) -> list[Tensor]:
    """Copy several arrays at once, each aligned."""
    starts = np.cumsum([0, *(-(-a.size // ALIGNMENT) * ALIGNMENT for a in arrays)]).tolist()
    whole = np.zeros(starts[-1], np.int32)
    places = [slice(at, at + a.size) for a, at in zip(arrays, starts, strict=False)]
    for array, place in zip(arrays, places, strict=True):
        whole[place] = array.reshape(-1)
    sent = to_device(whole, device)
    return [sent[place].view(a.shape) for a, place in zip(arrays, places, strict=True)]


class PinnedRing:
    """Pinned host buffers. Each is free again once the last copy that uses it is complete.

    Args:
        num_buffers: at least one more than the number of steps that can be in flight.
        num_elements: per buffer.

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
        """(index, tensor, the same memory as an array) of the next buffer, after waiting for it."""
        index = self._next
        self._next = (index + 1) % len(self._tensors)
        self.wait_for(index)
        return index, self._tensors[index], self._arrays[index]

    def wait_for(self, index: int) -> None:
        """Wait until no queued work uses buffer ``index``."""
        event = self._events[index]
        if event is not None:
            event.synchronize()

    def release(self, index: int) -> torch.cuda.Event:
        """Mark the work queued so far as the last that uses buffer ``index``; returns its event."""
        event = self._events[index]
        if event is None:
            event = self._events[index] = torch.cuda.Event()
        event.record()
        return event


class MaskMemory:
    """Bitmasks on the host and on the device, by index. They are copied in parallel to the steps.

    Attributes:
        on_device: int32 ``[masks, words]``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.on_device = self._host = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def make_space(self, num_masks: int, num_words: int) -> IntArray:
        """Allocate the host side, zeros. Only queued copies and kernels still read the previous
        memory, which torch keeps for them."""
        shape, dtype = (num_masks, num_words), torch.int32
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)
        self.on_device = torch.zeros(shape, dtype=dtype, device=self._device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._host.numpy()

    def send(self, numbers: Collection[int]) -> None:
        """Copy these masks while the preceding step computes. Kernels queued later read them. No
        queued kernel reads masks, because each earlier step with masks was collected."""
        if not numbers:
            return
        first, end = min(numbers), max(numbers) + 1  # masks between them are unchanged
        if self._stream is None:
            self.on_device[first:end].copy_(self._host[first:end])
            return
        with torch.cuda.stream(self._stream):
            self.on_device[first:end].copy_(self._host[first:end], non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
