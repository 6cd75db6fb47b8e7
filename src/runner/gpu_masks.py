"""Memory for masks of constrained rows: of the host, pinned, and of the device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from .pinned_ring import IntArray


class MaskMemory:
    """The same masks on both sides, each with its number; they are copied beside the steps.

    Attributes:
        on_device: int32 ``[masks, words]``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.on_device = self._host = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def make_space(self, num_masks: int, num_words: int) -> IntArray:
        """The host's side, zeros. What is there already is read by nobody any more, but for copies
        and kernels that are queued; torch keeps that memory for them."""
        shape, dtype = (num_masks, num_words), torch.int32
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)
        self.on_device = torch.zeros(shape, dtype=dtype, device=self._device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._host.numpy()

    def send(self, numbers: Collection[int]) -> None:
        """Copy these masks, while the step before them computes: what is queued from here on finds
        them. Nothing that is queued reads masks, as a step with some was collected by now, or it is
        the one that they are for."""
        if not numbers:
            return
        first, end = min(numbers), max(numbers) + 1  # those between are copied to no harm
        if self._stream is None:
            self.on_device[first:end].copy_(self._host[first:end])
            return
        with torch.cuda.stream(self._stream):
            self.on_device[first:end].copy_(self._host[first:end], non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
