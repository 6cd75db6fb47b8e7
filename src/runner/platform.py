"""What a start does otherwise on a CPU than on a GPU, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..compile.captured_model import CapturedModel, CaptureOptions
from ..compile.load.source import ModelSource
from ..compile.model.loaded import Shard
from ..compile.start_record import StartRecord
from ..engine.config import EngineConfig, check_device
from ..engine.stats import Clock, EngineStats
from ..errors import InvalidInputError
from ..kernels.attention.backend import AttentionBackend
from .cpu_runner import OnLogits
from .staging_runner import LocalRunner


class Platform(Protocol):
    """The kind of device that an engine starts on.

    Attributes:
        device: that the model is loaded to.
        config: with the defaults of the device filled in.
    """

    device: torch.device
    config: EngineConfig

    def start_record(self, source: ModelSource | None) -> StartRecord | None:
        """Of a model that can be restored here."""
        ...

    def building(self) -> AbstractContextManager[Callable[[], None] | None]:
        """A block in which the graph is captured and the runner made. It gives what is called
        before a model is traced."""
        ...

    def capture_options(self, attention: AttentionBackend, *, is_own: bool) -> CaptureOptions:
        """How the graph is captured.

        Args:
            is_own: nothing but this engine holds the weights, so that copies of them stay true.
        """
        ...

    def make_runner(
        self,
        captured: CapturedModel,
        stats: EngineStats,
        clock: Clock,
        on_logits: OnLogits | None,
    ) -> tuple[LocalRunner, int]:
        """The runner, with its KV cache, and the most tokens that a request may have.

        Raises:
            InvalidInputError: the memory does not hold them.
        """
        ...


def find_platform(config: EngineConfig, shard: Shard) -> Platform:
    """Raises InvalidInputError if there is no such device here."""
    device = resolve_device(config.device)
    if device.type == "cuda":
        from .gpu_platform import GpuPlatform

        return GpuPlatform(device, config)
    from .cpu_platform import CpuPlatform

    return CpuPlatform(device, config, shard)


def resolve_device(name: str) -> torch.device:
    """Raises InvalidInputError if there is no such device here."""
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidInputError("device", name, f"{torch.cuda.device_count()} GPUs are visible")
    return torch.device(kind, int(index)) if index else torch.device(kind)
