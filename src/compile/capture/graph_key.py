"""The cache key of a traced graph: a digest of everything that tracing depends on.

That is more than versions and the config. A program may replace methods of a model's classes, or
functions of its module, before it makes an engine, so their compiled code as it is in this process
is part of the key.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...kernels.attention.spec import AttentionSpec
from ..fx.nodes import PLAIN
from ..model.load import LoadedModel
from .dynamo import DYNAMO_SETTINGS

_VERSION = 1
_OURS = Path(__file__).parent
_OWN_SOURCES = (
    "dynamo.py",
    "few_layers.py",
    "graph_json.py",
    "graph_key.py",
    "meta_json.py",
    "repeat_layers.py",
    "../fx/fake_tensors.py",
    "../fx/nodes.py",
    "../model/attention.py",
    "../model/forward.py",
    "../model/layers.py",
    "../model/plain_attention.py",
    "../step_inputs.py",
    "../../kernels/ops.py",
)
# Where a model came from, and what is set anew for each trace.
_NO_MATTER = frozenset({"_name_or_path", "name_or_path", "_attn_implementation_internal"})
# They change what Dynamo traces, or whether it does.
_ENVIRONMENT = ("TORCHDYNAMO", "TORCH_COMPILE")


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by name; one that has two names comes twice."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def graph_key(loaded: LoadedModel, specs: Sequence[AttentionSpec]) -> str | None:
    """A name for the graph that tracing would give now; None if it depends on what cannot be
    named."""
    digest = hashlib.sha256()
    try:
        for part in _parts(loaded, specs):
            digest.update(json.dumps(part, default=_text).encode() + b"\n")
    except _NoName:
        return None
    return digest.hexdigest()[:32]


class _NoName(Exception):
    """Raised for a value that has no text of its own."""


def _text(value: object) -> object:
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    raise _NoName


def _parts(loaded: LoadedModel, specs: Sequence[AttentionSpec]) -> Iterator[object]:
    module, device = loaded.module, loaded.device
    yield _VERSION, platform.python_version(), torch.__version__, transformers.__version__
    yield loaded.dtype, torch.get_default_dtype(), device, torch.is_autocast_enabled(device.type)
    if device.type == "cuda":
        # Models may choose their kernels by it.
        yield torch.cuda.get_device_name(device), torch.version.cuda
    # Transformers prefers the functions of some packages to its own if they are installed.
    yield [find_spec(name) is not None for name in ("kernels", "causal_conv1d", "mamba_ssm")]
    yield sorted((k, v) for k, v in os.environ.items() if k.startswith(_ENVIRONMENT))
    yield _dynamo_settings()
    yield [repr(spec) for spec in specs]
    yield [hashlib.sha256((_OURS / name).read_bytes()).hexdigest() for name in _OWN_SOURCES]
    yield from _tensors(module)
    code = _Code()
    for name, part in module.named_modules():
        yield name, type(part).__module__, type(part).__qualname__, part.training
        yield from _attributes(part, code)
    yield from code.of_classes({type(part) for part in module.modules()})


def _dynamo_settings() -> list[str]:
    """Settings that were changed; those that tracing sets itself do not matter."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        return []
    own = tuple(f"torch._dynamo.config.{name} " for name in DYNAMO_SETTINGS)
    return [line for line in config.codegen_config().splitlines() if not line.startswith(own)]


def _tensors(module: nn.Module) -> Iterator[object]:
    first: dict[int, int] = {}
    for number, (name, tensor) in enumerate(named_tensors(module)):
        same = first.setdefault(id(tensor), number)
        yield name, same, list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device
        yield type(tensor).__name__, tensor.requires_grad


def _attributes(part: nn.Module, code: _Code) -> Iterator[object]:
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


class _Code:
    """Functions as this process would run them. Each is told once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of_classes(self, classes: set[type]) -> Iterator[object]:
        """Of classes and what they inherit, and of the classes' modules' globals."""
        found = {base for cls in classes for base in cls.__mro__ if _is_foreign(base.__module__)}
        files: set[str] = set()
        for base in sorted(found, key=lambda base: (base.__module__, base.__qualname__)):
            yield base.__module__, base.__qualname__
            files.add(str(sys.modules[base.__module__].__file__))
            for name, value in sorted(vars(base).items()):
                yield name, list(self.of(value))
        for home in sorted({cls.__module__ for cls in classes & found}):
            for name, value in sorted(vars(sys.modules[home]).items()):
                origin = sys.modules.get(getattr(value, "__module__", None) or "")
                if isinstance(value, PLAIN) and not name.startswith("__"):
                    yield name, value
                elif isinstance(origin, ModuleType) and _is_foreign(origin.__name__):
                    yield name, list(self.of(value))
                    files.add(str(getattr(origin, "__file__", None)))
        for file in sorted(files):
            path = Path(file)
            yield path.name, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    def of(self, value: Any) -> Iterator[object]:
        """Code, defaults and what is wrapped, of anything that may be a function."""
        if id(value) in self._seen:
            return
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            yield from self.of(value.__func__)
        elif isinstance(value, property):
            yield from self.of(value.fget)
        elif isinstance(value, partial):
            yield from self.of(value.func)
        elif isinstance(value, FunctionType):
            self._seen.add(id(value))
            yield value.__module__, value.__qualname__, _code(value.__code__)
            yield [repr(v) for v in value.__defaults__ or () if isinstance(v, PLAIN)]
            for cell in value.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:
                    continue  # not filled yet
                if isinstance(content, PLAIN):
                    yield content
                else:
                    yield from self.of(content)
        elif isinstance(value, PLAIN):
            yield value
        elif not isinstance(value, type):
            yield type(value).__qualname__


def _is_foreign(module: str) -> bool:
    """Is it code that torch's version does not cover?"""
    return module.split(".")[0] not in ("torch", "builtins", "abc", "typing", "collections")


def _code(code: CodeType) -> object:
    constants = [
        _code(part)
        if isinstance(part, CodeType)
        else sorted(map(repr, part))
        if isinstance(part, frozenset)
        else repr(part)
        for part in code.co_consts
    ]
    return hashlib.sha256(code.co_code).hexdigest(), code.co_names, code.co_varnames, constants
