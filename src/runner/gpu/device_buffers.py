"""Static device buffers of a step: its input and output tensors, at fixed addresses.

CUDA graphs contain addresses, and steps run one after the other on one stream. So all steps share
one set: a step's inputs are written only after the preceding step has read its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compile.step_inputs import MIN_SIZE, StepInputs
from ...kernels.sampling.logprob_rows import LOGPROB_FIELDS
from ...kernels.sampling.top_k_top_p import TRUNCATED_FIELDS
from ..layout import LAYOUT, Layout, StepShape
from .logprobs import max_logprob_rows

_MAX_VIEWS = 128  # shapes whose views are kept


class StepBuffers:
    """The device tensors that every step reads and writes, allocated once.

    Args:
        max_num_tokens: most tokens per step. max_num_rows: most requests per step.
        max_num_blocks: most blocks per request.
        max_num_intervals: most entries of a request's state table; 0 for a model without states.
        staging_elements: int32 elements that a step may stage.
        layout: the layout of the steps.

    Attributes:
        num_tokens, num_rows: the largest per step, at least ``MIN_SIZE``.
        derived: the fields that kernels derive, by name (:meth:`.Layout.allocate`).
        table_store: int32 ``[rows, M]``, one row per running request: its block table.
        state_store: int32 ``[rows, N]``, their state tables; None for a model without states.
        stored_tables: int32, flat: ``table_store``, then ``state_store``.
        sampled: int64 ``[rows]``, the tokens of the preceding step, then of this one.
        staged: int32, sent by the host for this step.
        result_row: int32 ``[1]``, the destination of this step's tokens on the host.
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
        layout: Layout = LAYOUT,
    ) -> None:
        num_tokens, num_rows = max(max_num_tokens, MIN_SIZE), max(max_num_rows, MIN_SIZE)
        self.layout, self.num_tokens, self.num_rows = layout, num_tokens, num_rows
        width = max(max_num_blocks, MIN_SIZE)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.derived = layout.allocate(StepShape.mixed(num_tokens, num_rows), device)
        # Decode steps keep the logits of all tokens, in order.
        self.derived["logits_to_keep"].copy_(torch.arange(num_rows))
        state_width = max(max_num_intervals, MIN_SIZE) if max_num_intervals else 0
        self.stored_tables = zeros(num_rows * (width + state_width), dtype=torch.int32)
        self.table_store = self.stored_tables[: num_rows * width].view(num_rows, width)
        self.state_store: Tensor | None = None
        if state_width:
            states = self.stored_tables[num_rows * width :]
            self.state_store = states.view(num_rows, state_width)
        self.temperatures = zeros(num_rows, dtype=torch.float32)
        self.seeds = zeros(num_rows)
        self.sample_positions = zeros(num_rows)
        self.sampled = zeros(num_rows)
        self.staged = zeros(staging_elements, dtype=torch.int32)
        self.result_row = zeros(1, dtype=torch.int32)
        self.width, self.state_width = width, state_width
        self._views: dict[StepShape, tuple[dict[str, Tensor], StepInputs]] = {}

    @property
    def draws(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tensors that samplers read and write per row: temperatures, seeds, positions, tokens."""
        return self.temperatures, self.seeds, self.sample_positions, self.sampled

    def packed(self, shape: StepShape) -> dict[str, Tensor]:
        """The fields that the host sent for a step of this shape, by name."""
        return self._views_of(shape)[0]

    def inputs(self, shape: StepShape) -> StepInputs:
        """The inputs of the graph. A mixed step keeps logits of as many tokens as it has rows."""
        return self._views_of(shape)[1]

    def _views_of(self, shape: StepShape) -> tuple[dict[str, Tensor], StepInputs]:
        """Created once for each of the most recent shapes."""
        found = self._views.get(shape)
        if found is not None:
            return found
        packed = self.layout.views(self.staged, shape)
        tensors = self.layout.inputs(packed, self.derived, shape)
        tensors["block_tables"] = self.table_store
        if self.state_store is not None:
            tensors["state_tables"] = self.state_store
        if len(self._views) == _MAX_VIEWS:
            del self._views[next(iter(self._views))]
        self._views[shape] = packed, StepInputs.of(tensors)
        return self._views[shape]

    @staticmethod
    def elements_to_stage(max_num_tokens: int, max_num_rows: int, layout: Layout = LAYOUT) -> int:
        """int32 elements that any step of these sizes stages, without writes and copies."""
        num_tokens, num_rows = max(max_num_tokens, MIN_SIZE), max(max_num_rows, MIN_SIZE)
        shapes = StepShape.mixed(num_tokens, num_rows), StepShape.decode(num_rows)
        fields = max(map(layout.num_words, shapes))
        logprobs = LOGPROB_FIELDS * max_logprob_rows(num_tokens, num_rows)
        return fields + TRUNCATED_FIELDS * num_rows + logprobs
