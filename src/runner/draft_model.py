"""What a runner needs of a drafter: a second model that computes draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ..compile.step_inputs import KVCaches, StepInputs

Draw = Callable[[StepInputs, Tensor | None], tuple[Tensor, Tensor | None]]
"""From a step's inputs and hidden states ``[T, H]`` to logits ``[S, V]`` and hidden states."""


class DraftModel(Protocol):
    """A captured drafter.

    Attributes:
        needs_hidden: whether it computes position p from the token at p + 1 and the target's
            hidden states at p. If not, from the token at p.
    """

    @property
    def needs_hidden(self) -> bool: ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVCaches: ...

    def bind(self, kv_caches: KVCaches) -> Draw: ...


class GpuDraftModel(DraftModel, Protocol):
    """A captured drafter that computes KV without logits, too."""

    def bind_fill(self, kv_caches: KVCaches) -> Callable[[StepInputs, Tensor | None], None]: ...
