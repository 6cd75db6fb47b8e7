"""Settings under which cuBLAS sums in the plain order, whatever the number of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


@contextmanager
def fp32_accumulation() -> Iterator[None]:
    """Inside, matmuls of bfloat16 and float16 keep float32 sums to the end.

    Sets ``allow_bf16_reduced_precision_reduction`` and ``allow_fp16_reduced_precision_reduction``
    of ``torch.backends.cuda.matmul`` to False and puts them back; what a CUDA graph captured
    inside keeps them.
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


@contextmanager
def without_split_k() -> Iterator[None]:
    """Keep cuBLAS from splitting K, for this process.

    Sets ``CUBLAS_WORKSPACE_CONFIG=:16:8`` and ``CUBLASLT_WORKSPACE_SIZE=1`` (KiB) in the
    environment, which leaves split-K no room for its partial sums, and enters
    :func:`fp32_accumulation`. All are put back at the end.

    **Enter it before the first matmul on the GPU.** torch and cuBLAS read the two variables once
    a process, at their first matmul, and keep what they read: entered later it changes nothing,
    and what was read inside stays after the end. Only :func:`.plan.sweep` shows what is in force.
    """
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        with fp32_accumulation():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
