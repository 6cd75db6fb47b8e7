"""Reads the quantised blocks of a GGUF file for the parameters of the model made from it.

Names and layouts are transformers' business, which may also reorder a weight's rows. So a parameter
is recognised by its values: where each of its rows equals a dequantised row of the file, to the
bit, the row's blocks are the parameter's. What is not found so stays as it is.

Parsing the file and comparing takes seconds, so it is done once, and kept beside the conversion.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ...disk_cache import write_whole
from ...errors import InvalidInputError
from ...kernels.linear.cpu_quantized import GROUP, Int4Weight, reason_against, unpack_int4
from ...validation import path_of

_HALF_BYTES = 2
_MIDDLE = 8
# Of a row, enough to find it; then whole rows are compared.
_SIGNATURE = 64
# Part of the file's name: raise it when what is kept changes.
_VERSION = 1
_WIDE = "wide"  # names in the file's metadata


def check_quantization(quantization: str, model: object, device: torch.device) -> None:
    """Raises InvalidInputError where a model's quantised weights cannot be kept."""
    name = path_of(model)
    if name is None or not name.endswith(".gguf"):
        limit = "needs a .gguf file: it keeps what is quantised there, and quantises nothing"
        raise InvalidInputError("quantization", quantization, limit)
    reason = f"is for a CPU, not for {device}" if device.type != "cpu" else reason_against()
    if reason is not None:
        raise InvalidInputError("quantization", quantization, reason)


def kept_blocks(path: Path, folder: Path, module: nn.Module) -> dict[str, Int4Weight | None]:
    """:func:`read_blocks`, from the disk if it was done before.

    Args:
        folder: the conversion of the GGUF file at ``path``.
        module: as it was loaded from there.
    """
    file = folder.parent / f"{folder.name}-blocks{_VERSION}.safetensors"
    try:
        return _read(file)
    except (OSError, SafetensorError, KeyError, ValueError):
        found = read_blocks(path, module)
    tensors = {
        f"{name} {field}": tensor.contiguous()
        for name, blocks in found.items()
        if blocks is not None
        for field, tensor in blocks._asdict().items()
    }
    wide = [name for name, blocks in found.items() if blocks is None]
    with suppress(OSError):  # a full disk costs only the cache
        write_whole(file, save(tensors, {_WIDE: json.dumps(wide)}))
    return found


def _read(file: Path) -> dict[str, Int4Weight | None]:
    with safe_open(file, "pt") as kept:
        found: dict[str, Int4Weight | None] = dict.fromkeys(
            json.loads((kept.metadata() or {})[_WIDE])
        )
        keys = kept.keys()
        for name in {key.partition(" ")[0] for key in keys}:
            parts = [kept.get_tensor(f"{name} {field}") for field in Int4Weight._fields]
            found[name] = Int4Weight(*parts)
    return found


def read_blocks(path: Path, module: nn.Module) -> dict[str, Int4Weight | None]:
    """The weights of ``module`` that the file holds quantised, by parameter name: in Q4_0 and Q4_1
    as they are there, in other formats None.

    Args:
        module: made from the file, in float32.
    """
    from gguf import GGUFReader

    sources = [_Source(tensor) for tensor in GGUFReader(path).tensors if tensor.data.ndim == 2]
    by_row: dict[bytes, _Source] = {}
    found: dict[str, Int4Weight | None] = {}
    for source in sources:
        if source.is_int4:
            for signature in _signatures(source.dequantized()):
                by_row[signature] = source
    others = {_bits(s.first_row()) for s in sources if s.is_quantized and not s.is_int4}
    for name, parameter in module.named_parameters():
        if parameter.dim() != 2 or parameter.dtype != torch.float32:
            continue
        origin = by_row.get(_signature(parameter[0]))
        blocks = None if origin is None else origin.blocks_of(parameter)
        if blocks is not None or _bits(parameter[0]) in others:
            found[name] = blocks
    return found


class _Source:
    """A matrix of a GGUF file.

    Args:
        tensor: gguf's ``ReaderTensor``, whose data is mapped into memory: ``[N, bytes]``.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._type: str = tensor.tensor_type.name
        self.is_int4 = self._type in ("Q4_0", "Q4_1")
        self.is_quantized = self._type not in ("F32", "F16", "BF16", "F64")

    def first_row(self) -> Tensor:
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(self._tensor.data[:1], self._tensor.tensor_type)[0])

    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of 4-bit blocks: values ``[N, groups, 16]``, scales and minima ``[N, groups]``."""
        num_numbers = 2 if self._type == "Q4_1" else 1
        data = np.ascontiguousarray(self._tensor.data)
        blocks = data.reshape(len(data), -1, num_numbers * _HALF_BYTES + GROUP // 2)
        numbers = blocks[..., : num_numbers * _HALF_BYTES].copy().view(np.float16)
        values = torch.from_numpy(blocks[..., num_numbers * _HALF_BYTES :].copy())
        scales, *minima = torch.from_numpy(numbers.astype(np.float32)).unbind(-1)
        return values, scales, minima[0] if minima else None

    def dequantized(self) -> Tensor:
        """float32 ``[N, K]``, by the steps of the gguf package."""
        values, scales, minima = self._parts()
        numbers = unpack_int4(values).float()
        if minima is None:
            return ((numbers - _MIDDLE) * scales.unsqueeze(-1)).flatten(1)
        return (numbers * scales.unsqueeze(-1) + minima.unsqueeze(-1)).flatten(1)

    def blocks_of(self, parameter: Tensor) -> Int4Weight | None:
        """The blocks in the order of the parameter's rows, if those are rows of this matrix."""
        whole = self.dequantized()
        if whole.shape != parameter.shape:
            return None
        values, scales, minima = self._parts()
        zeros = torch.zeros_like(scales) if minima is None else minima + _MIDDLE * scales
        weight = Int4Weight(values, scales, zeros)
        if torch.equal(whole, parameter):
            return weight
        places = {signature: row for row, signature in enumerate(_signatures(whole))}
        rows = [places.get(signature, 0) for signature in _signatures(parameter.detach())]
        if not torch.equal(whole[rows], parameter):
            return None
        return Int4Weight(*(part[rows] for part in weight))


def _bits(row: Tensor) -> bytes:
    return row.detach().contiguous().numpy().tobytes()


def _signature(row: Tensor) -> bytes:
    return _bits(row[:_SIGNATURE])


def _signatures(matrix: Tensor) -> Iterator[bytes]:
    return map(bytes, matrix[:, :_SIGNATURE].contiguous().numpy().view(np.uint8))
