"""Hypothesis drives the GPU runner's staging buffers in lockstep with the specification.

The inputs that its kernels unpack from each plan must be those that the specification has for the
plan's rows. Runs on a GPU if there is one, else under Triton's interpreter.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from spec.state import Scope
from tests.property.crowded_walk import walk
from tests.property.test_lockstep_machine import LockstepMachine
from tests.support.packers import CpuPacker, GpuStaging
from tests.support.refinement import Packer

pytest.importorskip("triton")

_MAX_DEPTH = 1  # tokens of older steps are not on the device
IS_INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here: its kernels are compiled"
)


def make_packers(scope: Scope, device: str) -> list[Packer]:
    staging = GpuStaging(
        num_blocks=scope.num_blocks,
        block_size=scope.block_size,
        max_num_tokens=scope.budget,
        max_num_rows=scope.cap,
        max_num_blocks=scope.num_blocks,
        device=device,
    )
    return [CpuPacker(num_blocks=scope.num_blocks, block_size=scope.block_size), staging]


def walk_all(num_walks: int, device: str) -> int:
    """Random walks with both packers in the loop; returns the number of steps that they packed."""
    pairs = [
        walk(seed, lambda scope: make_packers(scope, device), max_depth=_MAX_DEPTH, max_drafts=0)
        for seed in range(num_walks)
    ]
    return sum(pair.num_packed_steps for pair in pairs)


class StagingMachine(LockstepMachine):
    max_depth = _MAX_DEPTH
    max_scale = 2
    max_drafts = 0  # the runner on a GPU samples one token per row
    device = "cpu"

    def packers(self, scope: Scope) -> list[Packer]:
        return make_packers(scope, self.device)


class GpuStagingMachine(StagingMachine):
    device = "cuda"


@IS_INTERPRETED
class TestInterpreted(StagingMachine.TestCase):
    settings = settings(stateful_step_count=30, max_examples=60)


@pytest.mark.gpu
class TestOnGpu(GpuStagingMachine.TestCase):
    settings = settings(stateful_step_count=60, max_examples=300)


@IS_INTERPRETED
def test_walks_interpreted() -> None:
    assert walk_all(60, "cpu") > 500


@pytest.mark.gpu
def test_walks_on_the_gpu() -> None:
    num_steps = walk_all(800, "cuda")
    print(f"{num_steps} steps packed")
    assert num_steps > 8_000
