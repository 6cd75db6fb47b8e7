"""Run the real packers and return the inputs that the model and its kernels read for each row.

`CpuPacker` is the packer of the CPU runner. `GpuStaging` writes the staging buffers of the GPU
runner and unpacks them with its kernels: on a GPU, or under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagespec.compile.step_inputs import StepInputs
from pagespec.engine.plan import StepPlan
from pagespec.runner.cpu.edits import CpuEdits
from pagespec.runner.cpu.pack import CpuStepPacker, PackedStep
from pagespec.runner.layout import StepShape
from tests.support.tables import RowSeen

_MAX_SAMPLED = 1024


def rows_seen(inputs: StepInputs, num_rows: int, block_size: int) -> list[RowSeen]:
    """The inputs that embedding and attention read, row by row, without padding."""
    starts = inputs.query_starts.tolist()
    lengths = inputs.context_lens.tolist()
    flat = (inputs.input_ids.flatten(), inputs.position_ids.flatten(), inputs.slot_mapping)
    lists = [tensor.tolist() for tensor in flat]
    tables = inputs.block_tables[inputs.table_rows].tolist()
    return [
        RowSeen(
            *(values[starts[row] : starts[row + 1]] for values in lists),
            tables[row][: -(-lengths[row] // block_size)],
        )
        for row in range(num_rows)
    ]


class CpuPacker:
    """The inputs that the CPU runner packs, and the histories that it keeps."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._packer = CpuStepPacker(
            block_size=block_size, num_blocks=num_blocks, device=torch.device("cpu")
        )
        self._edits = CpuEdits()
        self._sampled: list[int] = []

    def histories(self) -> dict[str, list[int]]:
        return self._edits.histories

    def read(self, plan: StepPlan) -> list[RowSeen]:
        packed = self._packer.pack(plan)
        assert PackedStep.from_arrays(packed.to_arrays()).copies == list(plan.copies)
        self._edits.take(plan, packed.inputs.input_ids)
        return rows_seen(packed.inputs, len(plan), self._block_size)

    def sampled(self, token_ids: Sequence[int]) -> None:
        """What the step of the plan read last sampled."""
        self._sampled = [*token_ids, *self._sampled][:_MAX_SAMPLED]
        self._packer.remember(np.array(self._sampled, np.int64))

    def reset(self) -> None:
        """As the runner's after a failed step."""
        self._packer.reset()
        self._edits.reset()


class PassedEvent:
    """A CUDA event without a GPU: all queued work is done."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class GpuStaging:
    """The staging buffers of the GPU runner, unpacked by its kernels.

    Args:
        device: "cuda", or "cpu" under Triton's interpreter.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_tokens: int,
        max_num_rows: int,
        max_num_blocks: int,
        device: str,
    ) -> None:
        from pagespec.runner.gpu.device_buffers import StepBuffers
        from pagespec.runner.gpu.pack import GpuStepPacker
        from pagespec.runner.pinned import PinnedRing

        self._num_blocks, self._block_size = num_blocks, block_size
        self._buffers = StepBuffers(
            max_num_tokens=max_num_tokens + 3,
            max_num_rows=max_num_rows + 1,
            max_num_blocks=max_num_blocks,
            staging_elements=StepBuffers.elements_to_stage(max_num_tokens + 3, max_num_rows + 1),
            device=torch.device(device),
        )
        self._packer = GpuStepPacker(len(self._buffers.table_store), self._buffers.width)
        self._ring = PinnedRing(3, len(self._buffers.staged), torch.int32)
        if device == "cpu":
            ring: Any = self._ring
            ring._events = [PassedEvent() for _ in ring._events]
        self._num_steps = 0

    def histories(self) -> None:
        """They are written where rows are edited, not here."""

    def read(self, plan: StepPlan) -> list[RowSeen]:
        from pagespec.runner.gpu.pack import StagedStep, send
        from pagespec.runner.gpu.unpack_kernels import unpack

        b, num_rows = self._buffers, len(plan)
        null_slot = self._num_blocks * self._block_size
        self._num_steps += 1
        is_padded = self._num_steps % 2 == 0
        shape = None
        if plan.is_decode_only:
            bucket = max(2, num_rows + is_padded)
            shape = StepShape.decode(bucket)
        elif is_padded:
            shape = StepShape.mixed(max(2, plan.total_num_tokens + 3), max(2, num_rows + 1))
        index, _, array = self._ring.take()
        staged, array = self._packer.pack(plan, shape, 0, array)
        assert StagedStep.from_array(staged.to_array()) == staged
        _, copies = send(b, staged, self._ring, index, array)
        assert copies.view(2, -1).T.tolist() == [list(pair) for pair in plan.copies]
        inputs = unpack(b, staged.shape, self._block_size, null_slot)
        return rows_seen(inputs, num_rows, self._block_size)

    def sampled(self, token_ids: Sequence[int]) -> None:
        """What the step of the plan read last sampled: on the device, where kernels find it."""
        if token_ids:
            self._buffers.sampled[: len(token_ids)] = torch.tensor(token_ids)

    def reset(self) -> None:
        """As the runner's after a failed step."""
        self._packer.reset()
