"""The on-disk cache of traced graphs: a model that was traced once starts without Dynamo.

The key of a graph is a digest of everything that tracing depends on. That is more than versions and
the config. A program may replace methods of a model's classes, or functions of its module, before
it makes an engine. So their compiled code as it is in this process is part of the key.

Dynamo is imported only where a graph is traced.
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

_VERSION = 3
# Where a model came from, and what is set anew for each trace.
_NO_MATTER = frozenset({"_name_or_path", "name_or_path", "_attn_implementation_internal"})


class GraphCache:
    """The graphs in ``folder``, which need not be there yet.

    For models that nothing else holds: a module that was changed by its owner can compute anything.

    Args:
        before_trace: called before a model is traced, which takes seconds.

    Attributes:
        key: of the graph that :meth:`get` returned last; None if it is not kept.
        code: what :func:`.code_of_classes` gives of the model, if it is known already.
    """

    def __init__(self, folder: Path, before_trace: Callable[[], None] | None = None) -> None:
        self.folder = folder
        self.key: str | None = None
        self.code: ModuleCode | None = None
        self._before_trace = before_trace

    def get(
        self, loaded: LoadedModel, specs: Sequence[AttentionSpec], fields: Sequence[Field] = FIELDS
    ) -> tuple[Traced, bool]:
        """The graph of this model for steps of these fields, and whether it was traced now.

        Raises:
            UnsupportedModelError: it was not there, and ``forward`` does not trace into one graph.
        """
        # Before tracing, which leaves its traces in Dynamo's settings.
        key = graph_key(loaded, specs, fields, self.code)
        tensors = dict(named_tensors(loaded.module))
        if key is not None:
            try:
                kept = decode(read_json(self.folder, key), tensors)
                self.key = key
                return kept, False
            except FileNotFoundError:
                pass
            # Whatever is wrong with the file or this torch, tracing will do.
            except Exception as error:
                logger.info("cached graph %s is not used: %s", key, error)
        if self._before_trace is not None:
            self._before_trace()
        from .dynamo import trace
        from .few_layers import trace_layers

        few = trace_layers(loaded, specs, fields)
        traced, data = few or (trace(loaded, specs, fields), None)
        if key is not None:
            # As no pass has touched it. A graph that cannot be kept costs only the cache.
            try:
                write_json(self.folder, key, data or encode(traced, tensors))
                self.key = key
            except (NotSerializable, OSError) as error:
                logger.info("the graph of %s is not kept: %s", loaded.architecture, error)
        return traced, True


def graph_key(
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    fields: Sequence[Field] = FIELDS,
    code: ModuleCode | None = None,
) -> str | None:
    """A name for the graph that tracing would give now; None if it depends on what cannot be
    named. ``code``: as in :class:`GraphCache`."""
    return digest_of(_parts(loaded, specs, fields, code))


def _parts(
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    fields: Sequence[Field],
    code: ModuleCode | None,
) -> Iterator[object]:
    module = loaded.module
    yield _VERSION, loaded.dtype, input_keys(fields)
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


def _config(value: object) -> object:
    if not isinstance(value, PreTrainedConfig):
        return value
    return {n: _config(v) for n, v in sorted(vars(value).items()) if n not in _NO_MATTER}


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, torch.dtype, torch.device))
