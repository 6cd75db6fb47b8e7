"""A model's decoder layers: finds their list, and describes each, so that equal layers are
identified.

Layers with equal descriptions have the same code and sizes. One stands for the others where the
probe runs the model and where it is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...kernels.attention.attention_spec import AttentionSpec
from ..fx.nodes import PLAIN

# With fewer layers there is nothing to gain.
FEWEST_LAYERS = 6
# The numbers of a layer and of its calls, in which equal layers may differ.
_NUMBERS = frozenset({"layer_idx", "pagespec_call", "pagespec_calls", "pagespec_index_call"})
_CONTAINERS = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (*PLAIN, torch.dtype, torch.device)
_SHARED = (PreTrainedConfig, FunctionType, BuiltinFunctionType, type)


class LayerList(NamedTuple):
    """The list of a model's layers.

    Attributes:
        name: of the list in the module. calls: the numbers of each layer's attention calls, one or
            none.
    """

    name: str
    layers: nn.ModuleList
    calls: list[list[int]]


def find_layers(module: nn.Module, num_calls: int) -> LayerList | None:
    """The list whose layers make all ``num_calls`` attention calls, at most one each, in order;
    None if there is no such list, or there are few layers."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) >= FEWEST_LAYERS:
            calls: list[list[int]] = [
                [vars(m)["pagespec_call"] for m in layer.modules() if "pagespec_call" in vars(m)]
                for layer in part
            ]
            is_one_each = all(len(numbers) <= 1 for numbers in calls)
            if is_one_each and [*chain(*calls)] == [*range(num_calls)]:
                return LayerList(name, part, calls)
    return None


def layer_forms(found: LayerList, specs: Sequence[AttentionSpec]) -> list[Any]:
    """A description of each layer; equal for equal layers, including their attention calls."""
    return [
        (describe_layer(layer), [replace(specs[call], call=0) for call in calls])
        for layer, calls in zip(found.layers, found.calls, strict=True)
    ]


def describe_layer(layer: nn.Module) -> list[Any]:
    """Equal for equal layers, as far as visible from outside."""
    found: list[Any] = []
    for name, part in layer.named_modules():
        found.append((name, type(part)))
        for key, value in sorted(vars(part).items()):
            if key not in _NUMBERS | _CONTAINERS:
                found.append((key, _value(value)))
        tensors = [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for key, tensor in tensors:
            form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            found.append((key, *form, tensor.requires_grad, type(tensor)))
    return found


def _value(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value), [_value(part) for part in value]
    if isinstance(value, _PLAIN):
        return type(value), str(value)
    if isinstance(value, set):
        return type(value), sorted(map(repr, value))
    if type(value) is dict or (isinstance(value, dict) and not value):  # others contain hooks
        return type(value), [(_value(key), _value(part)) for key, part in value.items()]
    if type(value) is functools.partial:  # an activation with its options
        return functools.partial, *map(_value, (value.func, value.args, value.keywords))
    if isinstance(value, _SHARED):
        return id(value)
    return object()  # equal to no other: hooks, and values of other types
