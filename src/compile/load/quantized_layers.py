"""Reads quantised layers from a checkpoint, by the scheme that it names, without the module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ...errors import InvalidInputError
from ...kernels.quantized.quantized_weight import QuantizedWeight
from .checkpoint import Checkpoint
from .quantization_schemes import Parts, Scheme, fp8_at_load, scheme_of

Layer = tuple[str, tuple[int, int]]
"""The name of a linear layer, and the shape ``(N, K)`` of its weight."""


def read_layers(
    checkpoint: Checkpoint,
    scheme: Scheme,
    layers: Iterable[tuple[str, str, tuple[int, int]]],
    device: torch.device,
) -> Iterator[tuple[str, QuantizedWeight]]:
    """The weights of ``layers`` by parameter name, one after the other, made on ``device``.

    Args:
        layers: each one's name, its name in the checkpoint, and the shape of its weight.

    Raises:
        InvalidInputError: the tensors of a layer are not those of the scheme.
    """
    known = [part.removesuffix("?") for part in scheme.parts]
    for layer, file, shape in layers:
        parts = {
            part: checkpoint.get(f"{file}.{part}").to(device)
            for part in known
            if f"{file}.{part}" in checkpoint
        }
        yield f"{layer}.weight", read_layer(scheme, layer, parts, shape)


def saved_layers(folder: Path, layers: Iterable[Layer]) -> Iterator[tuple[str, QuantizedWeight]]:
    """:func:`read_layers`, of the checkpoint in a folder, by its config.json; those of one that is
    not quantised become FP8. Whether the config excludes a layer is not asked. Layers have the same
    names in the checkpoint, or cannot be read so.

    Raises:
        Exception: of any kind, if there is no such checkpoint.
    """
    layers = list(layers)
    if not layers:
        return iter(())
    found = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    scheme = fp8_at_load("") if found is None else scheme_of(str(folder), found)
    named = [(layer, layer, shape) for layer, shape in layers]
    return read_layers(Checkpoint(folder), scheme, named, torch.device("cpu"))


def read_layer(scheme: Scheme, layer: str, parts: Parts, shape: tuple[int, int]) -> QuantizedWeight:
    """The weight of a layer.

    Raises:
        InvalidInputError: its tensors are not those of the scheme.
    """
    missing = [p for p in scheme.parts if not p.endswith("?") and p not in parts]
    if missing:
        raise InvalidInputError("model", layer, f"has no {', '.join(missing)}: {scheme.name}")
    try:
        return scheme.read(parts, shape)
    except ValueError as error:
        raise InvalidInputError("model", layer, f"{error}: {scheme.name}") from None
