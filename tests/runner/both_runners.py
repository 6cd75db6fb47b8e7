"""Either runner for a small model on a CPU; the GPU runner's kernels are interpreted."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pagespec.compile.captured_model import CapturedModel
from pagespec.runner.cpu.runner import ModelRunner
from tests.runner.gpu.test_runner import Recomputed

BLOCK_SIZE, MAX_NUM_SEQS = 4, 5
RUNNERS = ["cpu"]
if os.environ.get("TRITON_INTERPRET") == "1":
    RUNNERS.append("gpu")


def make_runner(
    captured: CapturedModel,
    kind: str,
    num_blocks: int,
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_blocks: int,
    max_num_tokens: int = 24,
    **settings: Any,
) -> Any:
    """A runner of ``kind`` "cpu" or "gpu". The GPU runner has steps of every shape, recomputed at
    each replay."""
    settings |= {
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "max_num_tokens": max(max_num_tokens, max_num_seqs),
        "max_num_rows": max_num_seqs,
        "max_num_blocks": max_num_blocks,
    }
    if kind == "cpu":
        return ModelRunner(captured, **settings)
    gpu_runner = pytest.importorskip("pagespec.runner.gpu.runner")
    runner = gpu_runner.GpuRunner(captured, **settings)
    sizes = settings["max_num_tokens"], settings["max_num_rows"]
    runner._graphs = Recomputed(runner.run_staged, sizes)
    return runner
