"""The per-step inputs of a captured graph, and a graph whose constants are bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .step_fields import FIELDS, LAST, TORCH_DTYPES, Counts, Field, counts_of, graph_inputs

KVCaches = Sequence[tuple[Tensor, ...]]
"""Per attention call: (keys, values), or (keys,) if it is latent; followed by the index keys if it
has an indexer."""


class RecurrentStates(NamedTuple):
    """The recurrent states of requests. A request's *state table* has a slot for each *interval* of
    its positions (:mod:`..kernels.recurrent.ops`).

    Attributes:
        tensors: per recurrent call, ``[num_slots + 1, ...]``.
        interval: tokens per interval.
    """

    tensors: Sequence[Tensor]
    interval: int


NO_STATES = RecurrentStates((), 0)
"""For a model without recurrent calls."""
MIN_SIZE = 2
"""Smallest T, B, S and M for which the captured graph is valid; smaller steps are padded to it."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, on the device. T, B, S and M are each at least ``MIN_SIZE``.

    Attributes:
        input_ids: int64 ``[1, T]``. position_ids: int64 ``[1, T]``.
        logits_to_keep: int64 ``[S]``, the tokens whose logits are computed.
        slot_mapping: int64 ``[T]``. query_starts: int32 ``[B + 1]``. context_lens: int32 ``[B]``.
        block_tables: int32 ``[R, M]``, R >= B. table_rows: int32 ``[B]``, the row of
            ``block_tables`` for each row. For these five see :mod:`..kernels.ops`.
        state_tables: int32 ``[R, N]``, R as for ``block_tables`` and N at least ``MIN_SIZE``, for a
            model with recurrent calls (:class:`RecurrentStates`).
        more: other inputs by name, each ``[T]``, ``[B]``, ``[B + 1]``, ``[S]`` or ``[1]``; with a
            width, ``[width, T]`` and so on (:mod:`.step_fields`). Of a drafter, also
            :data:`HIDDEN_STATES`.
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_to_keep: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_rows: Tensor
    state_tables: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> StepInputs:
        """From inputs by name, with token ids and positions flat, ``[T]``."""
        own = {name: tensors[name] for name in (*INPUT_NAMES, STATE_TABLES) if name in tensors}
        for name in ("input_ids", "position_ids"):
            own[name] = own[name].unsqueeze(0)
        more = {name: tensor for name, tensor in tensors.items() if name not in own}
        return cls(**own, more=more)

    def named(self) -> dict[str, Tensor]:
        """Every input by name."""
        names = (*INPUT_NAMES, *([] if self.state_tables is None else [STATE_TABLES]))
        return {name: getattr(self, name) for name in names} | dict(self.more)

    def tensor(self, name: str) -> Tensor:
        """The input of that name."""
        found: Tensor = self.more[name] if name in self.more else getattr(self, name)
        return found


class StepOutputs(NamedTuple):
    """The results of a step.

    Attributes:
        logits: ``[S, V]``.
        hidden: the hidden states ``[T, H]`` before the LM head; None if the graph does not expose
            them.
        aux: the hidden states that enter the model's ``aux_layers``, concatenated, ``[T, n * H]``;
            None without such layers.
    """

    logits: Tensor
    hidden: Tensor | None
    aux: Tensor | None = None

    @property
    def for_drafter(self) -> Tensor | None:
        """The hidden states that a drafter reads: those of the ``aux_layers``, if there are any."""
        return self.hidden if self.aux is None else self.aux


STATE_TABLES = "state_tables"
HIDDEN_STATES = "hidden_states"
"""Input of a drafter: the hidden states of another model, ``[T, num_hidden_inputs]``."""
INPUT_NAMES = tuple(f.name for f in fields(StepInputs) if f.name not in (STATE_TABLES, "more"))
"""The inputs that every model has."""
# Distinct, so that no size of the example step is confused with another.
EXAMPLE_SIZES = {"T": 11, "B": 5, "R": 8, "S": 3, "M": 7, "num_blocks": 12, "block_size": 17}
# For models with recurrent calls: columns of a state table, slots, tokens per interval.
EXAMPLE_STATE_SIZES = {"N": 9, "num_slots": 14, "interval": 34}


class BoundGraph:
    """The captured graph with parameters and one set of KV caches and states bound.

    Args:
        function: takes the graph's arguments, returns its results.
        sources: the source of each argument, see :meth:`.Traced.arguments`.
        has_aux: whether its last result is :attr:`.StepOutputs.aux`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        sources: Sequence[tuple[Any, ...]],
        kv_caches: KVCaches,
        states: RecurrentStates = NO_STATES,
        *,
        has_aux: bool = False,
    ) -> None:
        self._function, self._has_aux = function, has_aux
        self._arguments: list[Any] = [None] * len(sources)
        self._input_slots: list[tuple[int, str]] = []
        self._size_slots: list[tuple[int, str, int]] = []
        for slot, (kind, *where) in enumerate(sources):
            if kind == "constant":
                self._arguments[slot] = where[0]
            elif kind == "cache":
                self._arguments[slot] = kv_caches[where[0]][where[1]]
            elif kind == "state":
                self._arguments[slot] = states.tensors[where[0]]
            elif kind == "interval":
                self._arguments[slot] = states.interval
            elif kind == "input":
                self._input_slots.append((slot, where[0]))
            else:
                self._size_slots.append((slot, where[0], where[1]))

    def __call__(self, inputs: StepInputs) -> StepOutputs:
        """The results of a step. Writes its KV into the caches, and its states."""
        arguments = self._arguments.copy()
        for slot, name in self._input_slots:
            arguments[slot] = inputs.tensor(name)
        for slot, name, dim in self._size_slots:
            arguments[slot] = inputs.tensor(name).shape[dim]
        logits, *others = self._function(*arguments)
        aux = others.pop()[0] if self._has_aux else None
        return StepOutputs(logits[0], others[0][0] if others else None, aux)


def example_inputs(
    device: torch.device, has_states: bool, fields: Sequence[Field] = FIELDS
) -> StepInputs:
    """Inputs of the example sizes. Only shapes and dtypes matter: nothing is computed."""
    sizes, num_rows = EXAMPLE_SIZES, EXAMPLE_SIZES["B"]
    tables = {"block_tables": (sizes["R"], sizes["M"])}
    if has_states:
        tables[STATE_TABLES] = (sizes["R"], EXAMPLE_STATE_SIZES["N"])
    zeros = {
        name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in tables.items()
    }
    counts = counts_of(sizes["T"], num_rows, sizes["S"])
    return StepInputs.of(zeros | padding_inputs(graph_inputs(fields), counts, device))


def padding_inputs(
    fields: Sequence[Field], counts: Counts, device: torch.device
) -> dict[str, Tensor]:
    """For each field a tensor of padding."""
    return {
        field.name: torch.full(
            field.shape(counts[field.per]),
            0 if field.padding == LAST else field.padding,
            dtype=TORCH_DTYPES[field.dtype],
            device=device,
        )
        for field in fields
    }


def dynamic_dims(name: str, field: Field | None) -> tuple[int, ...]:
    """The dimensions of an input that change from step to step; ``field`` is None for a table and
    for hidden states."""
    if name == HIDDEN_STATES:
        return (0,)
    if field is None:
        return (0, 1)
    if field.per == "step":
        return ()
    return (1,) if name in ("input_ids", "position_ids") or field.width > 1 else (0,)
