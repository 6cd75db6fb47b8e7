"""The step that a thread computes, and the functions that a model calls in it instead of its own:
attention, recurrences and indexers over the caches of the step.

Many models do not pass keyword arguments down, so the inputs of a step are in :data:`current`,
which is set around the call of the model's ``forward``. In a trace they are nevertheless plain
inputs of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import ops
from ...kernels.attention.attention_spec import AttentionSpec
from ...kernels.recurrent import ops as _recurrent_ops  # noqa: F401 - called by name
from ..step_inputs import KVCaches, RecurrentStates, StepInputs


class ModelStep(NamedTuple):
    """Data that the attention and recurrent calls of a step share.

    ``turns`` counts the attention calls of modules that make several, by the number of the first
    call.
    """

    inputs: StepInputs
    kv_caches: KVCaches
    states: RecurrentStates
    specs: Sequence[AttentionSpec]
    turns: dict[int, int]


class RecurrentCall(NamedTuple):
    """One call of a recurrence, in the form that the op of its kind takes.

    Attributes:
        kind: name of the op. tensors, settings: its first and its last arguments, without those of
            the states.
        others: the remaining arguments, which the probe checks.
    """

    kind: str
    tensors: tuple[Tensor | None, ...]
    settings: tuple[Any, ...]
    others: dict[str, Any]


class IndexCall(NamedTuple):
    """One call of an indexer.

    Attributes:
        query: ``[T, H, D]``. key: ``[T, D]``. weights: ``[T, H]``.
        mask: added to scores by the model.
        scale: factor on the dot products. num_chosen: number of positions to select.
    """

    query: Tensor
    key: Tensor
    weights: Tensor
    mask: Any
    scale: float
    num_chosen: int


class Functions(NamedTuple):
    """The functions that a model calls instead of its own.

    Attributes:
        attention: transformers' contract, see :func:`attend_on_caches`.
        recurrence: returns the result of a call.
        choose: the positions that an indexer selects for each token, int32 ``[1, T, num_chosen]``.
        mask: transformers' contract for masks; None if no masks are needed.
    """

    attention: Callable[..., tuple[Tensor, None]]
    recurrence: Callable[[RecurrentCall], Tensor]
    choose: Callable[[nn.Module, IndexCall], Tensor]
    mask: Callable[..., Tensor] | None = None


def attend_on_caches(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (models may pass it by name)
    *,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Store the new KV, then attend over pages.

    Transformers' attention contract: ``query [1, Hq, T, Dk]``, ``key [1, Hkv, T, Dk]``,
    ``value [1, Hkv, T, Dv]`` to ``([1, T, Hq, Dv], None)``.

    Scale, mask, softcap and slopes come from the spec, which the probe derived from the same
    arguments and from the model's mask. The probe also checked the remaining keyword arguments.
    """
    step = current.step
    assert step is not None
    inputs = step.inputs
    call: int = module.pagespec_call  # type: ignore[assignment]
    if hasattr(module, "pagespec_calls"):
        turn = step.turns.get(call, 0)
        step.turns[call] = turn + 1
        calls: Any = module.pagespec_calls
        call = calls[turn]
    spec = step.specs[call]
    k_cache, v_cache = step.kv_caches[call][:2]
    ops.kv_store(
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        k_cache,
        v_cache,
        inputs.slot_mapping,
    )
    out = ops.paged_attention(
        query.squeeze(0).transpose(0, 1),
        k_cache,
        v_cache,
        inputs.query_starts,
        inputs.context_lens,
        inputs.block_tables,
        inputs.table_rows,
        spec.scale,
        spec.window,
        spec.softcap,
        s_aux if spec.has_sinks else None,
        spec.chunk,
        spec.alibi_slopes or None,
        None if indices is None else indices.squeeze(0),
    )
    return out.unsqueeze(0), None


def run_on_states(call: RecurrentCall) -> Tensor:
    """The recurrence over the states of the step's requests."""
    step = current.step
    assert step is not None
    number = current.num_recurrent_calls
    current.num_recurrent_calls = number + 1
    inputs, states = step.inputs, step.states
    out: Tensor = getattr(torch.ops.pagespec, call.kind)(
        *call.tensors,
        states.tensors[number],
        inputs.query_starts,
        inputs.context_lens,
        inputs.state_tables,
        inputs.table_rows,
        states.interval,
        inputs.more.get("num_drafts"),
        *call.settings,
    )
    return out


def choose_on_caches(module: nn.Module, call: IndexCall) -> Tensor:
    """The selection among the positions of the step's requests."""
    step = current.step
    assert step is not None
    number: int = module.pagespec_index_call  # type: ignore[assignment]
    inputs = step.inputs
    chosen = ops.index_topk(
        call.query,
        call.key,
        call.weights,
        step.kv_caches[number][-1],
        inputs.slot_mapping,
        inputs.query_starts,
        inputs.context_lens,
        inputs.block_tables,
        inputs.table_rows,
        call.scale,
        call.num_chosen,
    )
    return chosen.unsqueeze(0)


ON_CACHES = Functions(attend_on_caches, run_on_states, choose_on_caches)


class _Current(threading.local):
    """Inputs of a thread's forward pass besides its arguments.

    Attributes:
        num_recurrent_calls: number of calls so far in the pass.
        position_ids: ``[1, T]``.
        aux: receives the hidden states ``[1, T, H]`` of a model's ``aux_layers``, by number.
    """

    step: ModelStep | None = None
    num_recurrent_calls: int = 0
    position_ids: Tensor | None = None
    aux: dict[int, Tensor] | None = None
    functions: Functions = ON_CACHES


current = _Current()


class RunningCall(NamedTuple):
    """A call of a module that has not returned."""

    part: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Scope(ExitStack):
    """Changes that are undone at the end of the context, the last one first."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the object itself, not of its class."""
        own = vars(owner)
        if name in own:
            self.callback(setattr, owner, name, own[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def hook(
        self,
        part: nn.Module,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> None:
        """Call ``before(part, args, kwargs)`` and ``after(part, args, output)`` with each call."""
        if before is not None:
            self.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
        if after is not None:
            self.callback(part.register_forward_hook(after).remove)

    def running(self, parts: Iterable[nn.Module]) -> list[RunningCall]:
        """The running calls of these parts, innermost last, kept up to date."""
        calls: list[RunningCall] = []

        def leave(*_: Any) -> None:
            calls.pop()

        for part in parts:
            self.hook(part, lambda *call: calls.append(RunningCall(*call)), leave)
        return calls

    def implementation(self, configs: Sequence[Any], name: str | None) -> None:
        """Make the configs name this attention function."""
        for config in configs:
            self.set(config, "_attn_implementation_internal", name)
