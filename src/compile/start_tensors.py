"""The tensors of a start record: where the next start finds each tensor of a model.

There are four cases. A parameter or buffer is in the safetensors files under its name; or it is
another name of the same tensor; or the module computed it, and it is in the record; or it is a
stand-in for a quantised weight (:mod:`.weights`), which is read from the files as in the first
start.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.matmul.quantized.quantized_weight import QuantizedWeight
from .load.checkpoint import Checkpoint
from .load.gguf_blocks import saved_blocks
from .load.quantization_schemes import saved_layers
from .model.loaded import named_tensors, same_bits
from .weights import is_stand_in, stand_in

_MAX_COMPUTED_BYTES = 1 << 20


class NotRestorable(Exception):
    """The next start could not restore this model from its files."""


def describe_tensors(module: nn.Module, folder: Path) -> Iterator[list[Any]]:
    """For each tensor: its name, its location, whether it is a parameter, and whether it requires a
    gradient.

    Raises:
        NotRestorable: a tensor is in no file, or differs from its file.
    """
    checkpoint = Checkpoint(folder)
    first: dict[int, str] = {}
    memory: set[int] = set()
    for name, tensor in named_tensors(module):
        if id(tensor) in first:
            yield [name, ["same", first[id(tensor)]], False, False]
            continue
        first[id(tensor)] = name
        dtype = str(tensor.dtype).removeprefix("torch.")
        where: list[Any]
        if type(tensor) in (Tensor, nn.Parameter) and is_stand_in(tensor):
            where = ["quantized", dtype, list(tensor.shape)]
            yield [name, where, isinstance(tensor, nn.Parameter), tensor.requires_grad]
            continue
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_contiguous():
            raise NotRestorable(f"{name} is no plain tensor")
        if tensor.numel() and tensor.data_ptr() in memory:
            raise NotRestorable(f"{name} shares its memory")
        memory.add(tensor.data_ptr())
        if name in checkpoint:
            # On the CPU, because the GPU's memory is measured next.
            value = tensor.detach().cpu()
            if not same_bits(checkpoint.read(name, value.dtype, value.device), value):
                raise NotRestorable(f"{name} is not what its file has")
            where = ["file", dtype]
        elif tensor.nbytes <= _MAX_COMPUTED_BYTES:
            content = bytes(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
            text = base64.b64encode(content).decode()
            where = ["computed", dtype, list(tensor.shape), text]
        else:
            raise NotRestorable(f"{name} is in no file")
        yield [name, where, isinstance(tensor, nn.Parameter), tensor.requires_grad]


def read_tensors(folder: Path, described: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
    """The tensors by name, from the result of :func:`describe_tensors`.

    Raises:
        Exception: of any type, if a tensor cannot be read.
    """
    dtypes = {name: getattr(torch, where[1]) for name, where, *_ in described if where[0] == "file"}
    read = Checkpoint(folder).read_all(dtypes.items(), device)
    weights = dict(zip(dtypes, read, strict=True))
    tensors: dict[str, Tensor] = {}
    for name, where, is_parameter, requires_grad in described:
        kind, *rest = where
        if kind == "same":
            tensors[name] = tensors[rest[0]]
            continue
        if kind == "quantized":
            value = stand_in(rest[1], getattr(torch, rest[0]))
        else:
            value = weights[name] if kind == "file" else _computed(*rest).to(device)
        tensors[name] = nn.Parameter(value, requires_grad) if is_parameter else value
    return tensors


def quantized_weights(
    folder: Path, tensors: Mapping[str, Tensor], quantization: str | None
) -> dict[str, QuantizedWeight | None]:
    """The quantised weights by parameter name, as read by the first start.

    Args:
        tensors: of the model. quantization: as set by the caller.

    Raises:
        Exception: of any type, if a weight cannot be read.
    """
    return dict(_saved(folder, tensors, quantization))


def weights_differ(
    module: nn.Module,
    held: Mapping[str, QuantizedWeight | None],
    folder: Path,
    quantization: str | None,
) -> str | None:
    """The name of a weight that :func:`quantized_weights` would read differently; None if all are
    equal in every bit. Reads one weight at a time, because the model may fill the memory."""
    left = dict(held)
    try:
        for name, weight in _saved(folder, dict(named_tensors(module)), quantization):
            if name not in left:
                return name
            other = left.pop(name)
            if weight is not other and (weight is None or not weight.equals(other)):
                return name
    # If they cannot be read now, they could not be read later.
    except Exception as error:
        return f"a weight ({error})"
    return next(iter(left), None)


def _saved(
    folder: Path, tensors: Mapping[str, Tensor], quantization: str | None
) -> Iterable[tuple[str, QuantizedWeight | None]]:
    if quantization == "gguf":
        return saved_blocks(folder).items()
    held = ((n.removesuffix(".weight"), t.shape) for n, t in tensors.items() if is_stand_in(t))
    return saved_layers(folder, ((layer, (shape[0], shape[1])) for layer, shape in held))


def _computed(dtype: str, shape: Sequence[int], text: str) -> Tensor:
    content = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(content, dtype=getattr(torch, dtype)) if content else torch.empty(0)
    return flat.to(getattr(torch, dtype)).reshape(shape).clone()
