"""Read the quantised blocks of a GGUF file for the parameters of the model converted from it.

transformers defines names and layouts, and may also reorder a weight's rows. So a parameter is
identified by its values: if each of its rows equals a dequantised row of the file, to the bit, the
blocks of those rows are the parameter's. A parameter that is not found stays as it is.

Parsing the file and comparing takes seconds, so it is done once, and the result is stored with the
conversion.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ...disk_cache import write_whole
from ...errors import InvalidInputError
from ...kernels.matmul.cpu.quantized import reason_against
from ...kernels.matmul.quantized.quantized_weight import (
    GROUP,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)
from ...kernels.native.library import begin_build
from ...params.checks import path_of

_HALF_BYTES = 2
_MIDDLE = 8
# Elements of a row that suffice to find it; then whole rows are compared.
_SIGNATURE = 64
# Part of the file's name: increase it when the stored contents change.
_VERSION = 2
_PLAIN = ("F32", "F16", "BF16", "F64")
_WIDE = "wide"  # names in the file's metadata


def check_gguf(model: object, device: torch.device) -> None:
    """Raise InvalidInputError if a model's quantised weights cannot be kept."""
    quantization = "gguf"
    name = path_of(model)
    if name is None or not name.endswith(".gguf"):
        limit = "needs a .gguf file: it keeps quantised weights, and quantises none"
        raise InvalidInputError("quantization", quantization, limit)
    if device.type != "cpu":
        return
    reason = reason_against()
    if reason is not None:
        raise InvalidInputError("quantization", quantization, reason)
    begin_build()  # in parallel to reading


def kept_blocks(path: Path, folder: Path, module: nn.Module) -> dict[str, QuantizedWeight | None]:
    """:func:`read_blocks`, from disk if it was done before.

    Args:
        folder: the conversion of the GGUF file at ``path``.
        module: as loaded from that folder.
    """
    try:
        return saved_blocks(folder)
    except (OSError, SafetensorError, KeyError, ValueError):
        found = read_blocks(path, module)
    tensors = {
        f"{name} {field}": tensor.contiguous()
        for name, blocks in found.items()
        if blocks is not None
        for field, tensor in blocks.parts.items()
    }
    wide = [name for name, blocks in found.items() if blocks is None]
    with suppress(OSError):  # a full disk costs only the cache
        write_whole(_file_beside(folder), save(tensors, {_WIDE: json.dumps(wide)}))
    return found


def _file_beside(folder: Path) -> Path:
    return folder.parent / f"{folder.name}-blocks{_VERSION}.safetensors"


def saved_blocks(folder: Path) -> dict[str, QuantizedWeight | None]:
    """The result that :func:`kept_blocks` stored for the conversion in ``folder``.

    Raises:
        Exception: of any type, if there is none, or the file is damaged.
    """
    with safe_open(_file_beside(folder), "pt") as kept:
        wide = json.loads((kept.metadata() or {})[_WIDE])
        keys, parts = kept.keys(), defaultdict[str, dict[str, Tensor]](dict)
        for key in keys:
            name, _, field = key.partition(" ")
            parts[name][field] = kept.get_tensor(key)
    found: dict[str, QuantizedWeight | None] = dict.fromkeys(wide)
    for name, own in parts.items():
        found[name] = Int4Weight(**own) if "minima" in own else Int8Weight(**own)
    return found


def read_blocks(path: Path, module: nn.Module) -> dict[str, QuantizedWeight | None]:
    """The weights of ``module`` that are quantised in the file, by parameter name: those in Q4_0,
    Q4_1, Q4_K and Q8_0 as stored, those in other formats as None.

    Args:
        module: converted from the file, in float32.
    """
    from gguf.quants import dequantize

    from .gguf_vocabulary import open_gguf

    by_row: dict[bytes, Any] = {}  # kept tensors, by each of their rows
    others: set[bytes] = set()
    for tensor in open_gguf(path).tensors:
        kind = tensor.tensor_type
        if tensor.data.ndim != 2 or kind.name in _PLAIN:
            continue
        blocks = blocks_of(tensor.data, kind.name)
        if blocks is None:
            others.add(_bits(torch.from_numpy(dequantize(tensor.data[:1], kind)[0])))
        else:
            by_row |= dict.fromkeys(_signatures(blocks.expanded()), tensor)
    found: dict[str, QuantizedWeight | None] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() != 2 or parameter.dtype != torch.float32:
            continue
        origin = by_row.get(_signature(parameter[0]))
        blocks = None if origin is None else blocks_of(origin.data, origin.tensor_type.name)
        held = None if blocks is None else in_order(blocks, parameter)
        if held is not None or _bits(parameter[0]) in others:
            found[name] = held
    return found


def in_order(blocks: QuantizedWeight, parameter: Tensor) -> QuantizedWeight | None:
    """The blocks in the order of the parameter's rows; None if it has other rows."""
    whole = blocks.expanded()
    if whole.shape != parameter.shape:
        return None
    if torch.equal(whole, parameter):
        return blocks
    places = {signature: row for row, signature in enumerate(_signatures(whole))}
    rows = [places.get(signature, 0) for signature in _signatures(parameter.detach())]
    if not torch.equal(whole[rows], parameter):
        return None
    return blocks.mapped(lambda part: part[rows])


def _read_q4_0(data: NDArray[np.uint8]) -> Int4Weight:
    (scales,), values = _split(data, 1, GROUP // 2)
    return Int4Weight(values, scales, -_MIDDLE * scales)


def _read_q4_1(data: NDArray[np.uint8]) -> Int4Weight:
    (scales, minima), values = _split(data, 2, GROUP // 2)
    return Int4Weight(values, scales, minima)


def _read_q4_k(data: NDArray[np.uint8]) -> Int4Weight:
    """256 values share two float16 factors. Each 32 values have a 6-bit scale and a 6-bit minimum,
    which are multiplied by the factors. The results are exact in float32, and dequantisation also
    computes them in float32."""
    factors, rest = _split(data, 2, 12 + 8 * GROUP // 2)
    # Four bytes each: scales, then minima of the first four groups; then 4 bits of those of the
    # last four groups, whose upper 2 bits are the upper 2 of the first ones.
    scales, minima, lower = rest[..., :12].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scales & 63, (lower & 15) | ((scales >> 2) & 48)), -1).float()
    minima = torch.cat((minima & 63, (lower >> 4) | ((minima >> 2) & 48)), -1).float()
    # 32 bytes: the lower halves have the values of one group, the upper halves those of the next.
    pairs = rest[..., 12:].unflatten(-1, (4, GROUP))
    values = torch.stack((pairs & 15, pairs >> 4), -2).flatten(1, 3)
    return Int4Weight(
        values[..., : GROUP // 2] | (values[..., GROUP // 2 :] << 4),
        (factors[0].unsqueeze(-1) * scales).flatten(1),
        -(factors[1].unsqueeze(-1) * minima).flatten(1),
    )


def _read_q8_0(data: NDArray[np.uint8]) -> Int8Weight:
    (scales,), values = _split(data, 1, GROUP)
    return Int8Weight(values.view(torch.int8).flatten(1), scales)


_READERS: dict[str, Callable[[NDArray[np.uint8]], QuantizedWeight]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q4_K": _read_q4_k,
    "Q8_0": _read_q8_0,
}
"""From rows of bytes ``[N, bytes]``, by the name of a GGUF type."""


def blocks_of(data: NDArray[np.uint8], format: str) -> QuantizedWeight | None:
    """The blocks of a matrix's bytes ``[N, bytes]``; None for a format that is not kept."""
    reader = _READERS.get(format)
    return None if reader is None else reader(np.ascontiguousarray(data))


def _split(
    data: NDArray[np.uint8], num_factors: int, num_bytes: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Split blocks into float16 factors and bytes: each factor ``[N, blocks]`` in float32, and the
    bytes ``[N, blocks, num_bytes]``."""
    begin = num_factors * _HALF_BYTES
    blocks = data.reshape(len(data), -1, begin + num_bytes)
    factors = blocks[..., :begin].copy().view(np.float16).astype(np.float32)
    return torch.from_numpy(factors).unbind(-1), torch.from_numpy(blocks[..., begin:].copy())


def _bits(row: Tensor) -> bytes:
    # A zero may have lost its sign: of (8 - 8) * scale and 8 * scale - 8 * scale, one can be -0.
    return (row.detach() + 0.0).numpy().tobytes()


def _signature(row: Tensor) -> bytes:
    return _bits(row[:_SIGNATURE])


def _signatures(matrix: Tensor) -> Iterator[bytes]:
    return map(bytes, (matrix[:, :_SIGNATURE] + 0.0).numpy().view(np.uint8))
