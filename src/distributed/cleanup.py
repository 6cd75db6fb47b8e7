"""Frees the memory of engines that were deleted. Imports no torch."""

from __future__ import annotations

import gc
import sys


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:  # noqa: ARG001
    """Collect deleted engines, and return their GPU memory to the device.

    Args:
        shutdown_ray: vLLM's; ignored, because no engine starts Ray.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
