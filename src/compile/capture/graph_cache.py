"""The disk cache of traced graphs: a model that was traced once starts without Dynamo.

The key of a graph is a digest of everything that tracing depends on. Versions and the config do not
suffice: a program may replace methods of a model's classes, or functions of its module, before it
creates an engine. So the key includes their compiled code as it is in this process.

Dynamo is imported only to trace a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...disk_cache import read_json, write_json
from ...kernels.attention.attention_spec import AttentionSpec
from ..fx.nodes import PLAIN
from ..model.loaded import LoadedModel, named_tensors
from ..step_fields import FIELDS, Field, input_keys
from .graph_json import NotSerializable, Traced, decode, encode
from .process_key import (
    Code,
    ModuleCode,
    code_of_classes,
    digest_of,
    globals_of_classes,
    process_parts,
)

logger = logging.getLogger("pagespec")

_VERSION = 4
# The source of a model, and attributes that every trace sets.
_NO_MATTER = frozenset({"_name_or_path", "name_or_path", "_attn_implementation_internal"})


class GraphCache:
    """The graphs in ``folder``, which need not exist yet.

    For models that no other code uses: a module that its owner has changed can compute anything.

    Args:
        before_trace: called before a model is traced, which takes seconds.

    Attributes:
        key: of the graph that :meth:`get` returned last; None if it is not stored.
        code: the result of :func:`.code_of_classes` for the model, if already available.
    """

    def __init__(self, folder: Path, before_trace: Callable[[], None] | None = None) -> None:
        self.folder = folder
        self.key: str | None = None
        self.code: ModuleCode | None = None
        self._before_trace = before_trace

    def get(
        self, loaded: LoadedModel, specs: Sequence[AttentionSpec], fields: Sequence[Field] = FIELDS
    ) -> tuple[Traced, bool]:
        """The graph of this model for steps with these fields, and whether it was traced now.

        Raises:
            UnsupportedModelError: there was no stored graph, and ``forward`` does not trace into
                one graph.
        """
        # Before the trace, which changes Dynamo's settings.
        key = graph_key(loaded, specs, fields, self.code)
        tensors = dict(named_tensors(loaded.module))
        if key is not None:
            try:
                kept = decode(read_json(self.folder, key), tensors)
                self.key = key
                return kept, False
            except FileNotFoundError:
                pass
            # Whatever is wrong with the file or this torch, tracing still works.
            except Exception as error:
                logger.info("cached graph %s is not used: %s", key, error)
        if self._before_trace is not None:
            self._before_trace()
        from .dynamo import trace
        from .few_layers import trace_layers

        few = trace_layers(loaded, specs, fields)
        traced, data = few or (trace(loaded, specs, fields), None)
        if key is not None:
            # Before any pass has changed it. A graph that cannot be stored costs only the cache
            # entry.
            try:
                write_json(self.folder, key, data or encode(traced, tensors))
                self.key = key
            except (NotSerializable, OSError) as error:
                logger.info("the graph of %s is not stored: %s", loaded.architecture, error)
        return traced, True


def graph_key(
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    fields: Sequence[Field] = FIELDS,
    code: ModuleCode | None = None,
) -> str | None:
    """A name for the graph that a trace would produce now; None if it depends on something without
    a name. ``code``: see :class:`GraphCache`."""
    return digest_of(_parts(loaded, specs, fields, code))


def _parts(
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    fields: Sequence[Field],
    code: ModuleCode | None,
) -> Iterator[object]:
    module = loaded.module
    yield _VERSION, loaded.dtype, input_keys(fields)
    yield loaded.aux_layers, loaded.num_hidden_inputs
    yield from process_parts(loaded.device)
    yield [repr(spec) for spec in (*specs, *loaded.recurrent)]
    first: dict[int, int] = {}
    for number, (name, tensor) in enumerate(named_tensors(module)):
        same = first.setdefault(id(tensor), number)
        yield name, same, list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device
        yield type(tensor).__name__, tensor.requires_grad
    functions = Code()
    for name, part in module.named_modules():
        yield name, type(part).__module__, type(part).__qualname__, part.training
        yield from _attributes(part, functions)
    classes = {type(part) for part in module.modules()}
    yield code or code_of_classes(classes), globals_of_classes(classes)


def _attributes(part: nn.Module, code: Code) -> Iterator[object]:
    """Attributes that were set on one module, except tensors and modules."""
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


def _config(value: object) -> object:
    if not isinstance(value, PreTrainedConfig):
        return value
    return {n: _config(v) for n, v in sorted(vars(value).items()) if n not in _NO_MATTER}


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, torch.dtype, torch.device))
