"""Properties of the GPU in use, options of kernel launches, and counts of compiled kernels; and one
property of the CPU's matmul library.

Triton is imported at first use: a machine without a GPU need not have it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .arch import CPU, Arch

_LARGE_SHARED_BYTES = 227 << 10  # of an H100; the largest tuned tiles use up to 220 KiB


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU that determine tile sizes.

    Attributes:
        num_sms: number of multiprocessors. num_shared_bytes: shared memory that one program may
            use.
        arch: the key by which :mod:`.registry` finds kernels.
    """

    num_sms: int
    num_shared_bytes: int
    arch: Arch = CPU

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        if device.type != "cuda":  # the interpreter
            return cls(1, _LARGE_SHARED_BYTES)
        return _gpu(torch.cuda.current_device() if device.index is None else device.index)

    @property
    def is_large(self) -> bool:
        """Whether it is at least as large as the GPU that the tiles were tuned on."""
        return self.num_shared_bytes >= _LARGE_SHARED_BYTES


@cache
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    num_bytes: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    arch = Arch.of_capability(found.major, found.minor)
    return Gpu(found.multi_processor_count, num_bytes, arch)


MKL_ROW_UNIT = 4
"""Rows of a batch-invariant matmul on a CPU are padded to a multiple of this: MKL has one order of
summation for all such numbers."""


def as_rows(x: Tensor) -> Tensor:
    """``x [..., N]`` as ``[rows, N]``, copied only if its rows are not evenly spaced."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


_LATE_TRIGGER_ROWS = 4


def vector_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Token and head stride of each tensor ``[T, H, D]``, in units of the last result, 16 or 1.

    A stride given as a multiple of 16 lets the compiler load 16 bytes at once, without a version of
    the kernel per kind of stride. Strides of dimensions of size 1 have no meaning and are 0.
    """
    strides = [x.stride(i) if x.shape[i] > 1 else 0 for x in tensors for i in (0, 1)]
    # The head size counts as well: if heads are the outer dimension, their stride is T * D, and
    # with an odd D the step would depend on T.
    step = 1 if any(n % 16 for n in (*strides, *(x.shape[2] for x in tensors))) else 16
    return *(stride // step for stride in strides), step


TUNED_SMS = 132
"""Multiprocessors of the GPUs for which tiles and numbers of programs were tuned (H100 and
H200)."""


@cache
def count_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU. Where kernels are interpreted without a GPU, the number of the
    tuned GPUs."""
    if device.type != "cuda":
        return TUNED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before the preceding kernel has ended (Hopper and later).

    The launch of a kernel takes about a microsecond, for small batches a tenth of the attention
    time. These kernels first let the next one start (``gdc_launch_dependents``; attention does so
    after its wait). Then they wait (``gdc_wait``) before they touch data that kernels write. So
    several kernels may be resident ahead of the running one: a kernel gets a slot only after all
    kernels before it have theirs. :func:`triggers_dependents_late` avoids the cost of this for few
    rows. Each kernel ends after its predecessor, because some program of each waits.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Options of a launch that may overlap with the preceding kernel: the kernel's constant
    ``PDL``, and Triton's ``launch_pdl``."""
    overlap = has_dependent_launch(device)
    return {"PDL": overlap, "launch_pdl": overlap}


def triggers_dependents_late(num_rows: int) -> bool:
    """Whether attention and matmuls of a step of ``num_rows`` let the next kernel start only after
    their own wait.

    A kernel loads its weights when it starts. An early start helps as long as the preceding kernels
    are busy with their own data. Attention of few rows is a chain of short waits: its loads queue
    after megabytes of weights that are not needed yet, and a kernel cannot end before the loads of
    the next one have arrived. On an H100 a late trigger was faster up to four rows, an early one
    from eight on (docs/notes/matmul.md).
    """
    return num_rows <= _LATE_TRIGGER_ROWS


def count_triton_variants() -> int:
    """Number of variants of Triton and Gluon kernels in this process, on all devices: compiled ones
    and those loaded from disk."""
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
