"""Run captured models and drafters over one request, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagespec.compile.captured_drafter import CapturedDrafter, DraftOutputs, capture_drafter
from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.kv_cache import allocate_kv_caches, allocate_states
from pagespec.compile.model.loaded import LoadedDrafter, LoadedModel
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.step_inputs import StepInputs, StepOutputs
from tests.support.captures import graph_cache

BLOCK_SIZE, NUM_BLOCKS = 16, 8
# Blocks of the request, in an order that is not that of their memory.
BLOCKS = (3, 0, 5, 2, 6, 1)


def step(ids: Sequence[int], begin: int, *, has_states: bool = False) -> StepInputs:
    """The inputs of a request's tokens from position ``begin`` on; logits of all of them."""

    def table(rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32)

    num_tokens = len(ids)
    ids = [*ids, *[0] * (2 - num_tokens)]  # a step has two tokens or more
    positions = torch.arange(begin, begin + len(ids))
    blocks = torch.tensor(BLOCKS)[positions // BLOCK_SIZE]
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    slots[num_tokens:] = NUM_BLOCKS * BLOCK_SIZE
    null = [NUM_BLOCKS] * len(BLOCKS)
    return StepInputs(
        input_ids=torch.tensor([ids]),
        position_ids=positions.unsqueeze(0),
        logits_to_keep=torch.arange(len(ids)),
        slot_mapping=slots,
        query_starts=torch.tensor([0, num_tokens, len(ids)], dtype=torch.int32),
        context_lens=torch.tensor([begin + num_tokens, len(ids) - num_tokens], dtype=torch.int32),
        block_tables=table([list(BLOCKS), null]),
        table_rows=torch.tensor([0, 1], dtype=torch.int32),
        state_tables=table([[0, 0], [2, 2]]) if has_states else None,
    )


class Target:
    """A captured model that computes the tokens of one request."""

    def __init__(self, loaded: LoadedModel, compile: str = "graph") -> None:
        specs = probe_model(loaded)
        cache = None if compile == "eager" else graph_cache()
        self.captured: CapturedModel = capture_model(
            loaded, specs, CaptureOptions(compile), graph_cache=cache
        )
        caches = allocate_kv_caches(
            self.captured.specs, NUM_BLOCKS, BLOCK_SIZE, loaded.dtype, "cpu"
        )
        states = allocate_states(loaded.recurrent, 2, 128, "cpu")
        self._run: Any = self.captured.bind(caches, states)
        self._has_states = bool(loaded.recurrent)

    def __call__(self, ids: Sequence[int], begin: int = 0) -> StepOutputs:
        """The results of these tokens, without padding."""
        with torch.inference_mode():
            outputs = self._run(step(ids, begin, has_states=self._has_states))
        return StepOutputs(*(None if x is None else x[: len(ids)].clone() for x in outputs))


class Drafting:
    """A captured drafter that computes the slots of one request."""

    def __init__(self, drafter: LoadedDrafter, compile: str = "graph", **settings: Any) -> None:
        self.captured: CapturedDrafter = capture_drafter(
            drafter,
            options=lambda _: CaptureOptions(compile),
            graph_cache=None if compile == "eager" else graph_cache(),
            **settings,
        )
        self._run = self.captured.bind(self.captured.allocate_kv(NUM_BLOCKS, BLOCK_SIZE))

    def __call__(
        self, ids: Sequence[int], hidden: Tensor | None = None, begin: int = 0
    ) -> DraftOutputs:
        """The results of these tokens in the slots from ``begin`` on, without padding."""
        inputs = step(ids, begin)
        num_padding = inputs.input_ids.shape[1] - len(ids)
        with torch.inference_mode():
            if hidden is not None:
                hidden = torch.cat([hidden, hidden.new_zeros(num_padding, hidden.shape[1])])
            logits, hidden = self._run(inputs, hidden)
        return DraftOutputs(
            logits[: len(ids)].clone(), None if hidden is None else hidden[: len(ids)].clone()
        )

    def greedy(self, ids: Sequence[int], hidden: Tensor, begin: int, num_drafts: int) -> list[int]:
        """Draft tokens with the largest logits: the first from a pass over the given slots, each
        further one from a pass over one more slot, with the hidden states of the pass before.

        Args:
            ids, hidden, begin: as of a call.
        """
        drafts: list[int] = []
        while len(drafts) < num_drafts:
            outputs = self(ids, hidden, begin)
            assert outputs.hidden is not None
            drafts.append(int(outputs.logits[-1].argmax()))
            begin, ids, hidden = begin + len(ids), drafts[-1:], outputs.hidden[-1:]
        return drafts
