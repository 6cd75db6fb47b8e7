"""A model that drafts tokens for another one, its target: loaded, captured and ready to be bound.

Three kinds have one interface:

- "draft_model": a causal language model with the target's tokens. It reads token ids only.
- "mtp": the multi-token prediction layer in the target's own checkpoint.
- "eagle3": a decoder layer that was trained for the target.

The last two compute, for slot p, from the token at position p + 1 and the target's hidden states at
position p. All kinds keep the KV of slot p in the block and the offset that the target's tables
give to position p, in tensors of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..errors import InvalidInputError
from ..kernels.attention.attention_spec import AttentionSpec
from .captured_model import CapturedModel, CaptureOptions, capture_model
from .kv_cache import allocate_kv_caches, kv_bytes_per_block, kv_dtype
from .load.drafters import MODEL_KEY
from .model.loaded import Kind, LoadedDrafter
from .step_inputs import HIDDEN_STATES, NO_STATES, KVCaches, StepInputs

if TYPE_CHECKING:
    from .capture.graph_cache import GraphCache


class DraftOutputs(NamedTuple):
    """The results of a drafter's step.

    Attributes:
        logits: ``[S, V]`` with the target's vocabulary. A token that the drafter lacks has -inf.
        hidden: ``[T, H]``, the hidden states with which the drafter is applied again: for the next
            slot, with the token drafted in this one. None for a draft model.
    """

    logits: Tensor
    hidden: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class CapturedDrafter:
    """A drafter and how to run it. Independent of the number and size of KV blocks.

    Attributes:
        kv_cache_dtype: "fp8" for caches in e4m3, see :func:`.kv_dtype`.
    """

    drafter: LoadedDrafter
    captured: CapturedModel
    kv_cache_dtype: str = "auto"

    @property
    def kind(self) -> Kind:
        return self.drafter.kind

    @property
    def needs_hidden(self) -> bool:
        """Whether a step reads the target's hidden states: :attr:`.StepOutputs.aux` of "eagle3",
        and :attr:`.StepOutputs.hidden` of "mtp"."""
        return self.kind != "draft_model"

    def allocate_kv(self, num_blocks: int, block_size: int) -> list[tuple[Tensor, ...]]:
        """Caches for the block ids of the target, see :func:`.allocate_kv_caches`."""
        loaded = self.captured.loaded
        dtype = kv_dtype(loaded, self.kv_cache_dtype)
        return allocate_kv_caches(self.captured.specs, num_blocks, block_size, dtype, loaded.device)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes per block of ``block_size`` tokens in the caches of all attention calls."""
        dtype = kv_dtype(self.captured.loaded, self.kv_cache_dtype)
        return kv_bytes_per_block(dtype, self.captured.specs, block_size)

    def bind(self, kv_caches: KVCaches) -> Callable[[StepInputs, Tensor | None], DraftOutputs]:
        """A function from a step's inputs and hidden states to its results, bound to caches.

        The inputs are those of the target's step, except ``input_ids``: for "mtp" and "eagle3" slot
        p has the token at position p + 1. ``position_ids`` are the slots, for all kinds. The hidden
        states are those of the target, or :attr:`DraftOutputs.hidden` of an earlier step; None for
        a draft model. Which of the two is known by their width.
        """
        run, own = self.captured.bind(kv_caches, NO_STATES), self.drafter
        complete = self._completed()

        def forward(inputs: StepInputs, hidden: Tensor | None) -> DraftOutputs:
            logits, before_head, aux = run(complete(inputs, hidden))
            logits = on_target_ids(logits, own.token_ids, own.target_vocab_size)
            if not self.needs_hidden:
                return DraftOutputs(logits, None)
            return DraftOutputs(logits, aux if own.recycles_aux else before_head)

        return forward

    def bind_fill(self, kv_caches: KVCaches) -> Callable[[StepInputs, Tensor | None], None]:
        """Like :meth:`bind`, for steps of which only the KV is wanted."""
        run = self.captured.bind_without_head(kv_caches, NO_STATES)
        complete = self._completed()

        def fill(inputs: StepInputs, hidden: Tensor | None) -> None:
            run(complete(inputs, hidden))

        return fill

    def _completed(self) -> Callable[[StepInputs, Tensor | None], StepInputs]:
        """The inputs of the graph, from the arguments of a call."""
        own = self.drafter
        vocab_size, combine = own.loaded.vocab_size, own.combine
        is_smaller = own.kind == "draft_model" and vocab_size < own.target_vocab_size

        def complete(inputs: StepInputs, hidden: Tensor | None) -> StepInputs:
            if is_smaller:
                ids = inputs.input_ids.clamp(max=vocab_size - 1)
                inputs = replace(inputs, input_ids=ids)
            if hidden is None:
                return inputs
            if combine is not None and hidden.shape[1] == combine.in_features:
                hidden = combine(hidden)
            return replace(inputs, more={**inputs.more, HIDDEN_STATES: hidden})

        return complete


def on_target_ids(logits: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits ``[S, vocab_size]`` by the target's ids, from those of a drafter ``[S, V_draft]``.

    Args:
        token_ids: see :class:`LoadedDrafter`. None: rows that only one of the models has are
            dropped, or -inf.
    """
    if token_ids is None and logits.shape[1] >= vocab_size:
        return logits[:, :vocab_size]
    whole = logits.new_full((logits.shape[0], vocab_size), float("-inf"))
    if token_ids is None:
        whole[:, : logits.shape[1]] = logits
        return whole
    return whole.index_copy_(1, token_ids, logits)


def capture_drafter(
    drafter: LoadedDrafter,
    *,
    options: Callable[[Sequence[AttentionSpec]], CaptureOptions],
    kv_cache_dtype: str = "auto",
    graph_cache: GraphCache | None = None,
) -> CapturedDrafter:
    """Probe and capture a drafter.

    Args:
        options: of its capture, for these attention calls.

    Raises:
        InvalidInputError: it has recurrent layers, or a weight contains NaN or infinity.
        UnsupportedModelError: the probe or the capture refuses it.
    """
    from .probe.probe import probe_model

    loaded = drafter.loaded
    specs = probe_model(loaded)
    if loaded.recurrent:
        limit = "must have attention only: a drafter's recurrent states are not supported"
        raise InvalidInputError(MODEL_KEY, loaded.architecture, limit)
    captured = capture_model(loaded, specs, options(specs), graph_cache=graph_cache)
    return CapturedDrafter(drafter, captured, kv_cache_dtype)
