"""Launches kernels as if on an H100: they are compiled, which needs no GPU, and left out.

Not for a process in which Triton interprets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from tests.kernels.jit.parallel_build_cases import FakeDriver


def compiled(kernel: Any, launch: Callable[[], object]) -> Any:
    """What ``launch`` compiled of ``kernel``, in a process that has no other driver."""
    driver.set_active(FakeDriver())  # type: ignore[arg-type]
    kernel.device_caches.clear()
    launch()
    (made,) = kernel.device_caches[0][0].values()
    return made


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
