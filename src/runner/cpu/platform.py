"""Startup on a CPU: threads, packed weights, and the KV cache in the available memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ...compile.captured_model import CapturedModel, CaptureOptions
from ...compile.load.source import ModelSource
from ...compile.model.loaded import Shard
from ...compile.start_record import StartRecord
from ...compile.step_fields import step_fields
from ...disk_cache import cache_root
from ...engine.config import EngineConfig
from ...engine.drafting.costs import DEFAULT_COSTS, StepCosts
from ...engine.outputs import EngineStats
from ...kernels.attention.backend import AttentionBackend
from ...kernels.attention.cpu_invariant import TILE
from ...kernels.device import MKL_ROW_UNIT
from ...kernels.row_trial import keeps_batched_bits
from ..bases import LocalRunner, OnLogits, Platform, runner_settings
from ..host_memory import available_bytes
from ..kv_budget import size_cpu_cache
from ..step_costs import measure_costs
from .runner import ModelRunner
from .threads import StepThreads, step_threads

if TYPE_CHECKING:
    from ...compile.captured_drafter import CapturedDrafter

_PACKING_PART = 4  # 1 / 4 of the available memory may hold packed weights
_ROWS_OF_STEP = (1, 2, 5)
_INDEX_HEADS = 16


class CpuPlatform(Platform):
    """A CPU. The constructor sets torch's number of threads."""

    def __init__(self, device: torch.device, config: EngineConfig, shard: Shard) -> None:
        super().__init__(device, config)
        self._shard = shard
        self._threads = step_threads(
            config.threads, num_ranks=shard.num_ranks, is_eager=config.compile == "eager"
        )
        self._threads.apply()

    def start_record(self, source: ModelSource | None) -> StartRecord | None:
        """The record of a whole model from local files whose graph is traced."""
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
            fields=step_fields(has_drafts=True, is_recurrent=True),
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
        stats: EngineStats,
        on_logits: OnLogits | None,
        drafter: CapturedDrafter | None = None,
    ) -> tuple[LocalRunner, int]:
        """The KV cache uses its part of the available memory."""
        config, threads = self.config, self._threads
        with stats.timed("kv_cache"):
            draft_bytes = 0 if drafter is None else drafter.bytes_per_block(config.block_size)
            size = size_cpu_cache(config, captured, draft_bytes)
            if len(threads.numbers) > 1 and config.transparent:
                threads = steady(threads, captured)
            runner = ModelRunner(
                captured,
                **runner_settings(config, size),
                overlap=bool(config.overlap),
                on_logits=on_logits,
                threads=threads,
                draft_model=drafter,
            )
        return runner, size.max_model_len

    def step_costs(self, runner: LocalRunner, max_model_len: int) -> StepCosts:
        """Measured here for one rank; for a group, once it computes together."""
        drafts = self.config.speculation
        if drafts is None or self._shard.num_ranks > 1 or not isinstance(runner, ModelRunner):
            return DEFAULT_COSTS
        return measure_costs(runner, self.config, drafts, max_model_len)


def _packing_bytes(*, is_own: bool) -> int:
    return available_bytes() // _PACKING_PART if is_own else 0


def steady(threads: StepThreads, captured: CapturedModel) -> StepThreads:
    """``threads``, or one fixed number for all steps if the bits of recurrent states' or an
    indexer's matmuls depend on it. No recipes exist for these."""
    if all(keeps_batched_bits(*shape, threads.numbers) for shape in sorted(_shapes(captured))):
        return threads
    return threads.fixed("this model depend")


def _shapes(captured: CapturedModel) -> set[tuple[int, int, int, tuple[int, ...]]]:
    """(rows, inputs, outputs, batches) of the matmuls of :mod:`...kernels.recurrent`, and of those
    of :mod:`...kernels.sparse.indexer`: scores of some queries' heads, then their weighted sum over
    the heads."""
    found = set()
    for spec in captured.loaded.recurrent:
        if spec.kind in ("delta_rule", "ssd_scan"):
            num_heads, num_keys, num_values = spec.state_shape
            batches = tuple(rows * num_heads for rows in _ROWS_OF_STEP)
            found.add((MKL_ROW_UNIT, num_keys, num_values, batches))
    for dim in {spec.index_dim for spec in captured.specs} - {0}:
        for num_rows in (MKL_ROW_UNIT, _INDEX_HEADS, TILE):
            found.add((num_rows, dim, TILE, _ROWS_OF_STEP))
            found.add((MKL_ROW_UNIT, num_rows, TILE, _ROWS_OF_STEP))
    return found
