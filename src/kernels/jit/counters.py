"""Counts what was compiled so far, and what memory was used at most."""

from __future__ import annotations

import sys

import torch


def count_triton_variants() -> int:
    """Forms of our Triton and Gluon kernels that this process has, on all devices: what it compiled
    and what it found on the disk."""
    triton = sys.modules.get("triton")
    if triton is None:
        return 0
    kernels = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("pagespec.") and module is not None
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    }
    return sum(
        len(per_device[0])
        for kernel in kernels.values()
        for per_device in kernel.device_caches.values()
    )


def peak_memory_bytes(device: torch.device) -> dict[str, int]:
    """{"peak": most bytes torch ever reserved on the GPU since the last reset}; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak": torch.cuda.max_memory_reserved(device)}
