"""A Triton kernel that only reads memory. Its rate is the upper bound of all kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_timing import median_seconds


@triton.jit
def _read_kernel(words, out, num_words, num_programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read all words, 4 bytes each; program i reads blocks i, i + num_programs, ..."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for at in range(first, num_words, num_programs * BLOCK):
        total ^= tl.load(words + at + offsets, mask=at + offsets < num_words, other=0)
    tl.store(out + tl.program_id(0), tl.xor_sum(total))


def plain_read(device: torch.device, num_bytes: int, repeats: int) -> float:
    """GB/s of reading one stretch of memory, the best of three grids; 0 without repeats, which only
    compiles the kernels."""
    words = torch.randint(0, 1 << 30, (num_bytes // 4,), dtype=torch.int32, device=device)
    best = 0.0
    for num_programs, block in _grids(device):
        out = torch.empty(num_programs, dtype=torch.int32, device=device)

        def call(n: int = num_programs, b: int = block, out: Tensor = out) -> None:
            _read_kernel[(n,)](words, out, len(words), n, BLOCK=b)

        if not repeats:
            call()
            continue
        best = max(best, num_bytes / seconds_of([call], repeats, device) / 1e9)
    return best


def _grids(device: torch.device) -> list[tuple[int, int]]:
    """Numbers of programs, and of words that each reads at once."""
    if device.type != "cuda":
        return [(4, 64)]
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return [(16 * num_sms, 4096), (8 * num_sms, 8192), (32 * num_sms, 2048)]


def seconds_of(calls: list[Callable[[], object]], repeats: int, device: torch.device) -> float:
    """Seconds per call; on a CPU by the clock, to check that it runs."""
    if device.type == "cuda":
        return median_seconds(calls, repeats)
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls)
