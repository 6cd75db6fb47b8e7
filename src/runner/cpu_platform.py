"""A start on a CPU: threads, packed weights, and the KV cache in the memory available."""

from __future__ import annotations

import os

import torch

from ..compile.captured_model import CapturedModel, CaptureOptions
from ..compile.load.source import ModelSource
from ..compile.model.loaded import Shard
from ..compile.start_record import StartRecord
from ..disk_cache import cache_root
from ..engine.config import EngineConfig
from ..engine.stats import Clock, EngineStats
from ..kernels.attention.backend import AttentionBackend
from ..kernels.attention.cpu_invariant import TILE
from ..kernels.device import MKL_ROW_UNIT
from ..kernels.row_trial import keeps_batched_bits
from .bases import LocalRunner, OnLogits, Platform, runner_settings
from .cpu_runner import ModelRunner
from .cpu_threads import StepThreads, step_threads
from .host_memory import available_bytes
from .kv_budget import fitting_length, num_cpu_blocks, num_cpu_state_slots

_PACKING_PART = 4  # of the memory available, one part is for packed weights
_ROWS_OF_STEP = (1, 2, 5)
_INDEX_HEADS = 16


class CpuPlatform(Platform):
    """It sets torch's number of threads."""

    def __init__(self, device: torch.device, config: EngineConfig, shard: Shard) -> None:
        super().__init__(device, config)
        self._shard = shard
        self._threads = step_threads(
            config.threads, num_ranks=shard.num_ranks, is_eager=config.compile == "eager"
        )
        self._threads.apply()

    def start_record(self, source: ModelSource | None) -> StartRecord | None:
        """Of a whole model from local files, whose graph is traced."""
        config = self.config
        if source is None or self._shard.num_ranks > 1 or not os.path.isdir(source.files):
            return None
        if config.load_format != "auto" or config.compile == "eager":
            return None
        root = cache_root()
        return StartRecord(
            root / "starts",
            root / "graphs",
            source,
            dtype=config.dtype,
            quantization=config.quantization,
            device=self.device,
            is_compiled=config.compile == "inductor",
        )

    def capture_options(self, attention: AttentionBackend, *, is_own: bool) -> CaptureOptions:
        """A part of the memory is for packed copies of weights. Native kernels read float32."""
        config = self.config
        return CaptureOptions(
            "graph" if config.compile == "auto" else config.compile,
            transparent=config.transparent,
            attention=attention,
            packing_bytes=_packing_bytes(is_own=is_own) // self._shard.num_ranks,
            matmul_plan_dir=cache_root() / "linear",
            threads=self._threads.numbers,
            is_native=config.quantization == "gguf" and config.kv_cache_dtype == "auto",
            mla_latent_cache=config.mla_latent_cache,
        )

    def make_runner(
        self,
        captured: CapturedModel,
        stats: EngineStats,  # noqa: ARG002 (memory and graphs of a GPU)
        clock: Clock,
        on_logits: OnLogits | None,
    ) -> tuple[LocalRunner, int]:
        """The KV cache takes its part of the memory available."""
        config, threads = self.config, self._threads
        limit = config.max_model_len or captured.loaded.max_position_embeddings
        with clock("kv_cache"):
            num_state_slots = num_cpu_state_slots(config, captured)
            num_blocks = captured.communicator.least(
                num_cpu_blocks(config, captured, limit, num_state_slots)
            )
            max_model_len = fitting_length(config, num_blocks, limit)
            if len(threads.numbers) > 1 and config.transparent:
                threads = steady(threads, captured)
            runner = ModelRunner(
                captured,
                **runner_settings(config, num_blocks, max_model_len, num_state_slots),
                overlap=bool(config.overlap),
                on_logits=on_logits,
                threads=threads,
            )
        return runner, max_model_len


def _packing_bytes(*, is_own: bool) -> int:
    return available_bytes() // _PACKING_PART if is_own else 0


def steady(threads: StepThreads, captured: CapturedModel) -> StepThreads:
    """The same, or one number for every step, where bits of the matmuls of recurrent states
    or of an indexer follow the number. These have no recipes to choose from."""
    shapes = _states(captured) | _indexes(captured)
    if all(keeps_batched_bits(*shape, threads.numbers) for shape in sorted(shapes)):
        return threads
    return threads.fixed("this model follow")


_Shape = tuple[int, int, int, tuple[int, ...]]


def _states(captured: CapturedModel) -> set[_Shape]:
    """(rows, inputs, outputs, batches) of the matmuls of :mod:`..kernels.recurrent`."""
    found: set[_Shape] = set()
    for spec in captured.loaded.recurrent:
        if spec.kind in ("delta_rule", "ssd_scan"):
            num_heads, num_keys, num_values = spec.state_shape
            batches = tuple(rows * num_heads for rows in _ROWS_OF_STEP)
            found.add((MKL_ROW_UNIT, num_keys, num_values, batches))
    return found


def _indexes(captured: CapturedModel) -> set[_Shape]:
    """The same of :mod:`..kernels.attention.indexer`: scores of some queries' heads, then their
    weighted sum over the heads."""
    found: set[_Shape] = set()
    for dim in {spec.index_dim for spec in captured.specs} - {0}:
        for num_rows in (MKL_ROW_UNIT, _INDEX_HEADS, TILE):
            found.add((num_rows, dim, TILE, _ROWS_OF_STEP))
            found.add((MKL_ROW_UNIT, num_rows, TILE, _ROWS_OF_STEP))
    return found
