"""The cache key of a traced graph: a digest of everything that tracing depends on.

That is more than versions and the config. A program may replace methods of a model's classes, or
functions of its module, before it makes an engine, so their compiled code as it is in this process
is part of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...kernels.attention.spec import AttentionSpec
from ..fx.nodes import PLAIN
from ..model.loaded import LoadedModel, named_tensors
from ..step_fields import FIELDS, Field, input_keys
from .process_key import Code, digest_of, process_parts

_VERSION = 2
_OURS = Path(__file__).parent
_OWN_SOURCES = (
    "dynamo.py",
    "few_layers.py",
    "graph_json.py",
    "graph_key.py",
    "meta_json.py",
    "process_key.py",
    "layer_groups.py",
    "repeat_layers.py",
    "results.py",
    "traced.py",
    "../fx/fake_tensors.py",
    "../fx/nodes.py",
    "../model/attention.py",
    "../model/current_step.py",
    "../model/forward.py",
    "../model/index_scores.py",
    "../model/indexers.py",
    "../model/layers.py",
    "../model/loaded.py",
    "../model/plain_attention.py",
    "../model/recurrent.py",
    "../model/plain_scores.py",
    "../step_inputs.py",
    "../../kernels/custom_op.py",
    "../../kernels/ops.py",
    "../../kernels/recurrent/ops.py",
)
# Where a model came from, and what is set anew for each trace.
_NO_MATTER = frozenset({"_name_or_path", "name_or_path", "_attn_implementation_internal"})


def graph_key(
    loaded: LoadedModel, specs: Sequence[AttentionSpec], fields: Sequence[Field] = FIELDS
) -> str | None:
    """A name for the graph that tracing would give now; None if it depends on what cannot be
    named."""
    return digest_of(_parts(loaded, specs, fields))


def _parts(
    loaded: LoadedModel, specs: Sequence[AttentionSpec], fields: Sequence[Field]
) -> Iterator[object]:
    module, device = loaded.module, loaded.device
    yield _VERSION, loaded.dtype, input_keys(fields)
    yield from process_parts(device)
    yield [repr(spec) for spec in (*specs, *loaded.recurrent)]
    yield [hashlib.sha256((_OURS / name).read_bytes()).hexdigest() for name in _OWN_SOURCES]
    yield from _tensors(module)
    code = Code()
    for name, part in module.named_modules():
        yield name, type(part).__module__, type(part).__qualname__, part.training
        yield from _attributes(part, code)
    yield from code.of_classes({type(part) for part in module.modules()})


def _tensors(module: nn.Module) -> Iterator[object]:
    first: dict[int, int] = {}
    for number, (name, tensor) in enumerate(named_tensors(module)):
        same = first.setdefault(id(tensor), number)
        yield name, same, list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device
        yield type(tensor).__name__, tensor.requires_grad


def _attributes(part: nn.Module, code: Code) -> Iterator[object]:
    """What was set on one module, apart from tensors and modules."""
    for name, value in sorted(vars(part).items()):
        if name in _NO_MATTER:
            continue
        if isinstance(value, PreTrainedConfig):
            yield name, _config(value)
        elif callable(value) and not isinstance(value, (nn.Module, type)):
            yield name, list(code.of(value))
        elif name.endswith("_hooks"):
            yield name, [list(code.of(hook)) for hook in value.values()]
        elif _is_plain(value):
            yield name, value


def _config(config: PreTrainedConfig) -> object:
    found: dict[str, object] = {}
    for name, value in sorted(vars(config).items()):
        if name in _NO_MATTER:
            continue
        found[name] = _config(value) if isinstance(value, PreTrainedConfig) else value
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, torch.dtype, torch.device))
