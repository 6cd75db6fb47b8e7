"""Trace a few layers of a model instead of all, if the others repeat them.

Dynamo takes a quarter of a second per layer. Layers repeat one by one, or in groups: five with a
window and one without, three delta rules and one attention. The first groups and the last one are
traced as if the model had no others, and their graph is extended to that of the whole model
(:mod:`.repeat_layers`). Three checks support the result. The omitted layers have the same classes,
attributes and kinds of parameters as those one group before. The graph between the first two groups
equals that between the last two. And for a small step the result computes exactly the bits of the
unmodified module, in the logits and in every layer's keys, values and states. Otherwise the whole
model is traced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter

from ...errors import UnsupportedModelError
from ...kernels.attention.attention_spec import AttentionSpec
from ..kv_cache import allocate_kv_caches, allocate_states
from ..model.attention import attention_implementation
from ..model.current_step import ModelStep
from ..model.forward import PackedForward
from ..model.layers import FEWEST_LAYERS, LayerList, find_layers, layer_forms
from ..model.linear_weights import expanded_linears
from ..model.loaded import LoadedModel, named_tensors, same_bits
from ..step_fields import FIELDS, Field, counts_of, graph_inputs
from ..step_inputs import INPUT_NAMES, BoundGraph, KVCaches, StepInputs, padding_inputs
from .dynamo import forward, trace
from .graph_json import Traced, decode, encode
from .layer_groups import GroupCalls, LayerGroups, LayersDiffer
from .repeat_layers import repeat_layers
from .results import NotSerializable

logger = logging.getLogger("pagespec")

_INTERVAL = 64  # tokens per interval of recurrent states


def trace_layers(
    loaded: LoadedModel, specs: Sequence[AttentionSpec], fields: Sequence[Field] = FIELDS
) -> tuple[Traced, dict[str, Any]] | None:
    """The graph of a probed model, from a trace of some layers, and its :func:`.encode` result;
    None if a check fails.

    During the trace the module has no other layers, so no other code may use the module.
    """
    found = find_layers(loaded.module, len(specs))
    # The numbers of layers with recorded inputs are those of the whole model.
    if found is None or loaded.aux_layers or loaded.num_hidden_inputs:
        return None
    forms = layer_forms(found, specs)
    # The first layer that needs a value shared by all layers may compute it; then a later pair is
    # equal.
    for num_first in (2, 3):
        groups = find_groups(forms, num_first)
        if groups is None:
            return None
        try:
            return _trace_some(loaded, specs, found, groups, fields)
        except LayersDiffer as error:
            logger.info("%s, %s: not alike: %s", loaded.architecture, groups, error)
        # Tracing the whole may succeed where a part fails.
        except (NotSerializable, UnsupportedModelError) as error:
            logger.info("%s, %s: %s", loaded.architecture, groups, error)
            break
    return None


def find_groups(forms: Sequence[Any], num_first: int) -> LayerGroups | None:
    """The groups that leave the most layers untraced. None if that does not justify the comparison:
    fewer than six single layers, or with longer groups less than half of the model's layers
    omitted.

    Groups end with the last layer. Each equals the preceding one, layer by layer.
    """
    num_layers = len(forms)
    best: LayerGroups | None = None
    for period in range(1, num_layers // (num_first + 2) + 1):
        begin = num_layers - period
        while begin > 0 and forms[begin - 1] == forms[begin - 1 + period]:
            begin -= 1
        begin += (num_layers - begin) % period
        groups = LayerGroups(begin, period, (num_layers - begin) // period, num_first)
        num_traced = len(groups.traced)
        is_worth_it = (
            groups.num_groups >= FEWEST_LAYERS if period == 1 else 2 * num_traced <= num_layers
        )
        if groups.num_groups < num_first + 2 or not is_worth_it:
            continue
        if best is None or num_traced < len(best.traced):
            best = groups
    return best


def _trace_some(
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    found: LayerList,
    groups: LayerGroups,
    fields: Sequence[Field],
) -> tuple[Traced, dict[str, Any]]:
    module = loaded.module
    tensors = dict(named_tensors(module))
    with _only_layers(module, found.name, groups.traced):
        some = trace(loaded, specs, fields)
    calls = GroupCalls.of(groups, found.calls, loaded.recurrent, some)
    data = repeat_layers(encode(some, tensors), f"{found.name}.", groups, calls)
    traced = decode(data, tensors)
    if not _computes_the_same(traced, loaded, specs, fields):
        raise LayersDiffer("the graph computes other bits than the module")
    return traced, data


@contextmanager
def _only_layers(module: nn.Module, name: str, chosen: Sequence[int]) -> Iterator[None]:
    """Within the context, the list of layers ``name`` contains only the chosen ones."""
    parent, _, own = name.rpartition(".")
    holder = module.get_submodule(parent)
    layers: Any = getattr(holder, own)
    setattr(holder, own, nn.ModuleList([layers[i] for i in chosen]))
    try:
        yield
    finally:
        setattr(holder, own, layers)


def _computes_the_same(
    traced: Traced,
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    fields: Sequence[Field],
) -> bool:
    """Whether the graph computes the module's bits for a step of two requests."""
    module, device = loaded.module, loaded.device
    inputs = _small_step(loaded, fields)
    given, made = (allocate_kv_caches(specs, 3, 17, loaded.dtype, device) for _ in range(2))
    before, after = (allocate_states(loaded.recurrent, 2, _INTERVAL, device) for _ in range(2))
    with torch.inference_mode(), expanded_linears(loaded):
        with attention_implementation(module):
            step = ModelStep(inputs, given, before, specs, {})
            logits = forward(PackedForward(module), step)[0][0]
        run = Interpreter(traced.gm).run
        again = BoundGraph(run, traced.arguments(), made, after)(inputs).logits
    pairs = [
        (logits, again),
        *zip(_flat(given), _flat(made), strict=True),
        *zip(before.tensors, after.tensors, strict=True),
    ]
    return all(same_bits(*pair) for pair in pairs)


def _small_step(loaded: LoadedModel, fields: Sequence[Field]) -> StepInputs:
    """Seven tokens and three, from position 0, all within blocks of 17 slots. Inputs that not every
    model has contain padding, which each kernel accepts."""
    device = loaded.device

    def tensor(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    lengths = (7, 3)
    positions = [position for n in lengths for position in range(n)]
    others = [field for field in graph_inputs(fields) if field.name not in INPUT_NAMES]
    counts = counts_of(len(positions), len(lengths), 3)
    return StepInputs(
        input_ids=tensor([[(7 * i + 3) % loaded.vocab_size for i in range(len(positions))]]),
        position_ids=tensor([positions]),
        logits_to_keep=tensor([6, 8, 9]),
        slot_mapping=tensor([17 * (i >= lengths[0]) + at for i, at in enumerate(positions)]),
        query_starts=tensor([0, 7, 10], torch.int32),
        context_lens=tensor(lengths, torch.int32),
        block_tables=tensor([[0, 2], [1, 2]], torch.int32),
        table_rows=tensor([0, 1], torch.int32),
        state_tables=tensor([[0, 2], [1, 2]], torch.int32) if loaded.recurrent else None,
        more=padding_inputs(others, counts, device),
    )


def _flat(kv_caches: KVCaches) -> list[Tensor]:
    return [cache for pair in kv_caches for cache in pair]
