"""Finds the device that an engine starts on."""

from __future__ import annotations

import torch

from ..compile.model.loaded import Shard
from ..engine.config import EngineConfig, check_device
from ..errors import InvalidInputError
from .bases import Platform


def find_platform(config: EngineConfig, shard: Shard) -> Platform:
    """Raise InvalidInputError if there is no such device here."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        from .gpu.platform import GpuPlatform

        return GpuPlatform(device, config)
    from .cpu.platform import CpuPlatform

    return CpuPlatform(device, config, shard)


def resolve_device(name: str) -> torch.device:
    """Raise InvalidInputError if there is no such device here."""
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidInputError("device", name, f"{torch.cuda.device_count()} GPUs are visible")
    return torch.device(kind, int(index)) if index else torch.device(kind)
