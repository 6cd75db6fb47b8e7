"""Trace a Hugging Face module's unmodified ``forward`` into one graph with Dynamo.

Every per-step size is dynamic. The result contains the source of each graph input, so that running
it needs nothing of Dynamo, in particular no guards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ...errors import UnsupportedModelError
from ...kernels.attention.attention_spec import AttentionSpec
from ..fx.nodes import example, recurrent_interval
from ..kv_cache import allocate_kv_caches, allocate_states
from ..model.attention import attention_implementation
from ..model.aux_states import aux_states_recorded
from ..model.current_step import ModelStep, current
from ..model.forward import PackedForward
from ..model.loaded import LoadedModel
from ..step_fields import FIELDS, Field, graph_inputs
from ..step_inputs import (
    EXAMPLE_SIZES,
    EXAMPLE_STATE_SIZES,
    HIDDEN_STATES,
    KVCaches,
    RecurrentStates,
    StepInputs,
    dynamic_dims,
    example_inputs,
)
from .graph_json import Source, Traced
from .process_key import DYNAMO_SETTINGS


class _Captured(BaseException):
    """Ends the trace in the backend, before Dynamo builds guards that are never checked.

    Not an Exception: Dynamo treats those as failures of the backend.
    """


def trace(
    loaded: LoadedModel, specs: Sequence[AttentionSpec], fields: Sequence[Field] = FIELDS
) -> Traced:
    """Trace a probed model.

    Args:
        fields: of its steps. Those that are inputs of the graph are inputs of the trace.

    Raises:
        UnsupportedModelError: ``forward`` does not trace into one graph.
    """
    module, device = loaded.module, loaded.device
    sizes = EXAMPLE_SIZES
    kv_caches = allocate_kv_caches(
        specs, sizes["num_blocks"], sizes["block_size"], loaded.dtype, device
    )
    state_sizes = EXAMPLE_STATE_SIZES
    states = allocate_states(
        loaded.recurrent, state_sizes["num_slots"], state_sizes["interval"], device
    )
    inputs = example_inputs(device, bool(loaded.recurrent), fields)
    if loaded.num_hidden_inputs:
        shape = sizes["T"], loaded.num_hidden_inputs
        hidden = {HIDDEN_STATES: torch.zeros(shape, dtype=loaded.dtype, device=device)}
        inputs = replace(inputs, more={**inputs.more, **hidden})
    declared = {field.name: field for field in graph_inputs(fields)}
    for name, tensor in inputs.named().items():
        for dim in dynamic_dims(name, declared.get(name)):
            torch._dynamo.mark_dynamic(tensor, dim)
    # The sizes of the caches are the example's integers: only pagespec's ops read caches in the
    # graph, and they read the sizes when they run. Symbols for these sizes would take a tenth of
    # the time.
    given: list[tuple[GraphModule, list[Any]]] = []
    packed = PackedForward(module)

    def step(
        inputs: StepInputs, kv_caches: KVCaches, states: RecurrentStates
    ) -> tuple[Tensor, ...]:
        return forward(packed, ModelStep(inputs, kv_caches, states, specs, {}), loaded.aux_layers)

    def backend(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        # A copy, because Dynamo clears its own graph when it returns.
        given.append((GraphModule(gm, copy.deepcopy(gm.graph)), examples))
        raise _Captured

    # Dynamo keeps its cache on the code object, which all captures would share. A copy of the code
    # object starts with an empty cache and is freed after this call.
    fresh = FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
    try:
        with (
            torch.inference_mode(),
            _plain_buffers(module),
            attention_implementation(module),
            aux_states_recorded(loaded),
            torch._dynamo.config.patch(DYNAMO_SETTINGS),
        ):
            torch.compile(fresh, fullgraph=True, backend=backend)(inputs, kv_caches, states)
    except _Captured:
        return _described(loaded, *given[0], ModelStep(inputs, kv_caches, states, specs, {}))
    except UnsupportedModelError:
        raise
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch.fx")):
            raise
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(
            f"{loaded.architecture}: its forward pass is not one graph "
            f"({type(error).__name__}: {reason})"
        ) from error
    raise UnsupportedModelError(f"{loaded.architecture}: no graph was captured")


@contextmanager
def _plain_buffers(module: nn.Module) -> Iterator[None]:
    """Within the context, none of the module's buffers is an ``nn.Buffer``: Dynamo cannot trace
    code that sets such a buffer to itself, as CTRL's code does."""
    marked: list[Any] = [b for b in module.buffers() if getattr(b, "_is_buffer", False)]
    for buffer in marked:
        buffer._is_buffer = False
    try:
        yield
    finally:
        for buffer in marked:
            buffer._is_buffer = True


def forward(
    packed: PackedForward, step: ModelStep, aux_layers: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """Logits ``[1, S, V]`` of a step, from the unmodified module. Writes its KV into the caches,
    and its states. With ``aux_layers``, which :func:`.aux_states_recorded` must record, also their
    hidden states ``[1, T, n * H]``."""
    current.step, inputs = step, step.inputs
    current.num_recurrent_calls = 0
    aux: dict[int, Tensor] = {}
    current.aux = aux
    try:
        logits = packed(inputs.input_ids, inputs.position_ids, inputs.logits_to_keep)
    finally:
        current.step = current.aux = None
    if not aux_layers:
        return (logits,)
    return logits, torch.cat([aux[number] for number in aux_layers], -1)


def _described(
    loaded: LoadedModel, gm: GraphModule, examples: list[Any], step: ModelStep
) -> Traced:
    """Find the source of every placeholder of ``gm``, which was traced with ``step``."""
    module, states = loaded.module, step.states
    places: dict[int, Source] = {}
    for name, tensor in step.inputs.named().items():
        places[id(tensor)] = ("input", name)
    for call, caches in enumerate(step.kv_caches):
        for which, cache in enumerate(caches):
            places[id(cache)] = ("cache", call, which)
        if step.specs[call].index_dim:  # last, also where a pass removes the values
            places[id(caches[-1])] = ("cache", call, -1)
    for call, state in enumerate(states.tensors):
        places[id(state)] = ("state", call)
    owned = {id(t) for t in [*module.parameters(), *module.buffers()]}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources: dict[str, Source] = {}
    symbols: dict[str, Source] = {}
    constants: dict[str, Tensor] = {}
    for node, value in zip(placeholders, examples, strict=True):
        if not isinstance(value, Tensor):
            continue
        if id(value) in places:
            source = places[id(value)]
            for dim, size in enumerate(example(node).shape):  # type: ignore[attr-defined]
                if isinstance(size, torch.SymInt):
                    symbols.setdefault(str(size), ("size", *source[1:], dim))
            sources[node.name] = source
        elif id(value) in owned:
            constants[node.name] = value
    for node in placeholders:
        if node.name not in sources and node.name not in constants:
            sources[node.name] = _size_source(loaded, node, symbols)
    if states.tensors:
        sources[_interval_input(gm, states.interval)] = ("interval",)
    return Traced(gm, constants, sources)


def _interval_input(gm: GraphModule, traced: int) -> str:
    """Make the interval of the states, an integer in the trace, an input of the graph."""
    graph = gm.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        interval = graph.placeholder("state_interval")
    interval.meta["example_value"] = traced
    for node in graph.nodes:
        place = recurrent_interval(node)
        if place is not None:
            node.update_arg(place, interval)
    return interval.name


def _size_source(loaded: LoadedModel, node: Node, symbols: dict[str, Source]) -> Source:
    """Where each step reads the value of a SymInt placeholder."""
    source = symbols.get(str(example(node)))
    if source is None:
        raise UnsupportedModelError(
            f"{loaded.architecture}: the graph has an input of unknown origin, {node.name}"
        )
    return source
