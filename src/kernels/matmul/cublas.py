"""Settings with which cuBLAS sums in plain order, whatever the number of rows.

The environment variables stay set for the rest of the process. torch creates a workspace per thread
and stream at its first matmul, with the size from the environment at that time. torch 2.11 reads
the environment again for each matmul and passes that size to cuBLAS, whatever the size of the
workspace. If the settings were restored, cuBLAS could split K again and write 32 MiB into a
workspace of 128 KiB (docs/notes/matmul.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE, _LT_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"
_SMALL, _SMALL_KIB = ":16:8", 16 * 8  # eight buffers of 16 KiB
_LT_KIB = 1


@contextmanager
def fp32_accumulation() -> Iterator[None]:
    """Within the context, keep float32 accumulators to the end in matmuls of bfloat16 and float16.

    Sets ``allow_bf16_reduced_precision_reduction`` and ``allow_fp16_reduced_precision_reduction``
    of ``torch.backends.cuda.matmul`` to False, and restores them. A CUDA graph captured within
    keeps the settings.
    """
    flags = torch.backends.cuda.matmul
    bf16 = flags.allow_bf16_reduced_precision_reduction
    fp16 = flags.allow_fp16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    flags.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction = bf16
        flags.allow_fp16_reduced_precision_reduction = fp16


def forbid_split_k() -> None:
    """Prevent cuBLAS from splitting K, for the rest of this process.

    Sets ``CUBLAS_WORKSPACE_CONFIG=:16:8`` and ``CUBLASLT_WORKSPACE_SIZE=1`` (KiB) in the
    environment, which leaves split-K no memory for its partial sums. A smaller setting is kept,
    because workspaces of that size may exist.

    **Call it before the first matmul on the GPU**: later versions of torch read both once per
    process. Only :func:`.plan.sweep` shows the settings in effect.
    """
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get(_WORKSPACE, ""))
    if not sizes or sum(int(size) * int(count) for size, count in sizes) > _SMALL_KIB:
        os.environ[_WORKSPACE] = _SMALL
    if os.environ.get(_LT_WORKSPACE) != "0":
        os.environ[_LT_WORKSPACE] = str(_LT_KIB)


@contextmanager
def without_split_k() -> Iterator[None]:
    """Apply :func:`forbid_split_k`, which lasts, and within the context
    :func:`fp32_accumulation`."""
    forbid_split_k()
    with fp32_accumulation():
        yield
