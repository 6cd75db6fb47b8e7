"""The part of the key of a graph or a start record that comes from the process: versions, settings,
environment, the code of this package, and code as it would run."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers

from ..fx.nodes import PLAIN

# Set during a trace. Python numbers of the model (epsilon, scale, window) are constants of the
# graph, even if Dynamo saw other values at the same line for another model.
DYNAMO_SETTINGS = {
    "specialize_int": True,
    "specialize_float": True,
    "automatic_dynamic_shapes": False,
}
# The parts of this package that load, probe and trace; below ``compile``.
OWN_CODE = (
    *("capture/*.py", "fx/*.py", "load/*.py", "model/*.py", "probe/*.py"),
    *("start_record.py", "start_tensors.py", "step_inputs.py", "weights.py"),
    *("../kernels/arguments.py", "../kernels/custom_op.py"),
    *("../kernels/ops.py", "../kernels/recurrent/ops.py", "../kernels/recurrent/walk.py"),
)
# These change what Dynamo traces, or whether it does.
_ENVIRONMENT = ("TORCHDYNAMO", "TORCH_COMPILE")


def digest_of(parts: Iterable[object]) -> str | None:
    """A name for these parts; None if a part has no text of its own."""
    try:
        return _digest(parts)
    except NoName:
        return None


def _digest(parts: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, default=_text).encode() + b"\n")
    return digest.hexdigest()[:32]


class NoName(Exception):
    """Raised for a value that has no text of its own."""


def _text(value: object) -> object:
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    raise NoName


def process_parts(device: torch.device) -> Iterator[object]:
    """Everything that the probe and the trace of any model on ``device`` depend on."""
    yield platform.python_version(), torch.__version__, transformers.__version__
    yield torch.get_default_dtype(), device, torch.is_autocast_enabled(device.type)
    if device.type == "cuda":
        # Models may choose kernels by it.
        yield torch.cuda.get_device_name(device), torch.version.cuda
    # transformers prefers functions of some packages to its own if they are installed.
    yield [find_spec(name) is not None for name in ("kernels", "causal_conv1d", "mamba_ssm")]
    yield sorted((k, v) for k, v in os.environ.items() if k.startswith(_ENVIRONMENT))
    yield _dynamo_settings()
    home = Path(__file__).parents[1]
    own = [file for pattern in OWN_CODE for file in sorted(home.glob(pattern))]
    yield [(file.name, code_of_file(str(file))) for file in own]


def _dynamo_settings() -> list[str]:
    """Changed settings, except those that tracing sets itself."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        return []
    own = tuple(f"torch._dynamo.config.{name} " for name in DYNAMO_SETTINGS)
    return [line for line in config.codegen_config().splitlines() if not line.startswith(own)]


class Code:
    """Functions as this process would run them, each once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of_module(self, module: ModuleType) -> Iterator[object]:
        """The functions in a module's globals, and those of its own classes. Other values are
        omitted, because they include counters and caches."""
        for name, value in sorted(vars(module).items()):
            if not callable(value):
                continue
            yield name, list(self.of(value))
            if isinstance(value, type):
                yield value.__module__, value.__qualname__
                if value.__module__ == module.__name__:
                    for member, part in sorted(vars(value).items()):
                        yield member, list(self.of(part))

    def of(self, value: Any) -> Iterator[object]:
        """Code, defaults and wrapped functions of anything that may be a function."""
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


def is_foreign(module: str) -> bool:
    """Whether it is code that is not covered by torch's version."""
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


ModuleCode = list[list[str | None]]
"""For each module: name, file, digests of the file and of the module's functions."""


def code_of_classes(classes: set[type]) -> ModuleCode:
    """:func:`code_of_module` for each module whose code determines what ``classes`` compute: the
    modules of the classes, of their base classes, and of the values in the former. Versions cover
    torch's and Python's modules.

    Raises:
        NoName: a value in a module has no text of its own.
    """
    found = {base for cls in classes for base in cls.__mro__ if is_foreign(base.__module__)}
    names = {base.__module__ for base in found}
    for home in {cls.__module__ for cls in classes & found}:
        for value in vars(sys.modules[home]).values():
            origin = getattr(value, "__module__", None) or ""
            if origin in sys.modules and is_foreign(origin):
                names.add(origin)
    own = (name for name in names if name.partition(".")[0] not in sys.stdlib_module_names)
    return list(map(code_of_module, sorted(own)))


def globals_of_classes(classes: set[type]) -> list[object]:
    """Plain values in the globals of the modules of ``classes``."""
    return [
        [name, value]
        for home in sorted({cls.__module__ for cls in classes if is_foreign(cls.__module__)})
        for name, value in sorted(vars(sys.modules[home]).items())
        if isinstance(value, PLAIN) and not name.startswith("__")
    ]


def code_of_file(file: str) -> str | None:
    """A digest of a source file, None if there is none."""
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def code_of_module(name: str) -> list[str | None]:
    """For an imported module: its name, its file, and digests of the file and of the module's
    functions as they are now, which may differ from the file.

    Raises:
        NoName: a value in the module has no text of its own.
    """
    file = str(getattr(sys.modules[name], "__file__", None))
    return [name, file, code_of_file(file), _digest(Code().of_module(sys.modules[name]))]
