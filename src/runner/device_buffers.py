"""Static device buffers of a step: its input and output tensors, at addresses that never change.

CUDA graphs bake addresses in, and steps run one after the other on one stream, so one set serves
every step: a step's inputs are written only after the step before has read its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compile.step_inputs import MIN_SIZE, StepInputs
from ..kernels.sampling.logprob_rows import LOGPROB_FIELDS
from ..kernels.sampling.top_k_top_p import TRUNCATED_FIELDS
from .gpu_logprobs import max_logprob_rows

DECODE_FIELDS = 7
"""int32 fields a row in the staged form of a decode step, each an array ``[bucket]``: token id,
position, row of the table store (-1: padding), new block id (-1: none), seed (low word, high word),
bits of the float32 temperature. Two more words follow: the number of rows that are no padding, and
where the step's tokens are to go."""


def decode_size(bucket: int) -> int:
    """int32 elements of the staged form of a decode step."""
    return DECODE_FIELDS * bucket + 2


class StepBuffers:
    """The device tensors that every step reads and writes, allocated once.

    Args:
        max_num_tokens: most tokens of a step. max_num_rows: most requests of a step.
        max_num_blocks: most blocks of a request.
        max_num_intervals: most entries of a request's state table; 0 of a model without states.
        staging_elements: int32 elements a step may stage.

    Attributes:
        table_store: int32 ``[rows, M]``, the block table of a running request per row.
        state_store: int32 ``[rows, N]``, their state tables; None of a model without states.
        stored_tables: int32, flat: the one, then the other.
        table_rows: int32 ``[rows]``, the row of ``table_store`` of each row of the step.
        state_tables: int32 ``[rows, N]``, where the step looks at them; None without states.
        sampled: int64 ``[rows]``, the tokens of the step before, then of this one.
        staged: int32, what the host sent for this step.
        result_row: int32 ``[1]``, where this step's tokens are to go on the host.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_rows: int,
        max_num_blocks: int,
        staging_elements: int,
        device: torch.device,
        max_num_intervals: int = 0,
    ) -> None:
        num_tokens, num_rows = max(max_num_tokens, MIN_SIZE), max(max_num_rows, MIN_SIZE)
        width = max(max_num_blocks, MIN_SIZE)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids = zeros(num_tokens)
        self.position_ids = zeros(num_tokens)
        self.slot_mapping = zeros(num_tokens)
        self.logit_rows = zeros(num_rows)
        # What a graph captured for decode keeps: all tokens, in order.
        self.all_tokens = torch.arange(num_rows, device=device)
        self.query_starts = zeros(num_rows + 1, dtype=torch.int32)
        self.context_lens = zeros(num_rows, dtype=torch.int32)
        self.table_rows = zeros(num_rows, dtype=torch.int32)
        state_width = max(max_num_intervals, MIN_SIZE) if max_num_intervals else 0
        self.stored_tables = zeros(num_rows * (width + state_width), dtype=torch.int32)
        self.table_store = self.stored_tables[: num_rows * width].view(num_rows, width)
        self.state_store: Tensor | None = None
        self.state_tables: Tensor | None = None
        if state_width:
            states = self.stored_tables[num_rows * width :]
            self.state_store = states.view(num_rows, state_width)
            self.state_tables = torch.zeros_like(self.state_store)
        self.temperatures = zeros(num_rows, dtype=torch.float32)
        self.seeds = zeros(num_rows)
        self.sample_positions = zeros(num_rows)
        self.sampled = zeros(num_rows)
        self.staged = zeros(staging_elements, dtype=torch.int32)
        self.result_row = zeros(1, dtype=torch.int32)
        self.width, self.state_width = width, state_width

    def decode_inputs(self, bucket: int) -> StepInputs:
        """Of a decode step of ``bucket`` rows."""
        return StepInputs(
            input_ids=self.input_ids[:bucket].unsqueeze(0),
            position_ids=self.position_ids[:bucket].unsqueeze(0),
            logits_to_keep=self.all_tokens[:bucket],
            slot_mapping=self.slot_mapping[:bucket],
            query_starts=self.query_starts[: bucket + 1],
            context_lens=self.context_lens[:bucket],
            block_tables=self.table_store,
            table_rows=self.table_rows[:bucket],
            state_tables=None if self.state_tables is None else self.state_tables[:bucket],
        )

    def mixed_inputs(self, num_tokens: int, num_rows: int) -> StepInputs:
        """Of any step; logits are kept for as many tokens as there are rows."""
        return StepInputs(
            input_ids=self.input_ids[:num_tokens].unsqueeze(0),
            position_ids=self.position_ids[:num_tokens].unsqueeze(0),
            logits_to_keep=self.logit_rows[:num_rows],
            slot_mapping=self.slot_mapping[:num_tokens],
            query_starts=self.query_starts[: num_rows + 1],
            context_lens=self.context_lens[:num_rows],
            block_tables=self.table_store,
            table_rows=self.table_rows[:num_rows],
            state_tables=None if self.state_tables is None else self.state_tables[:num_rows],
        )

    @staticmethod
    def elements_to_stage(max_num_tokens: int, max_num_rows: int) -> int:
        """int32 elements that any step of these sizes stages."""
        num_tokens, num_rows = max(max_num_tokens, MIN_SIZE), max(max_num_rows, MIN_SIZE)
        mixed = 3 * num_tokens + 3 * num_rows + 1 + 4 * num_rows + 1
        asked = LOGPROB_FIELDS * max_logprob_rows(num_tokens, num_rows)
        return max(mixed, decode_size(num_rows)) + TRUNCATED_FIELDS * num_rows + asked
