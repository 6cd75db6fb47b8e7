"""Startup on a GPU. The module is imported without its kernels, which need Triton and take time to
import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ...compile.captured_model import CapturedModel, CaptureOptions
from ...disk_cache import cache_root
from ...engine.config import EngineConfig
from ...engine.drafting.costs import DEFAULT_COSTS, StepCosts
from ...engine.outputs import EngineStats
from ...kernels.attention.backend import AttentionBackend
from ...kernels.jit.cache_keys import read_triton_early
from ...kernels.matmul.cublas import forbid_split_k, without_split_k
from ..bases import LocalRunner, OnLogits, Platform

if TYPE_CHECKING:
    from ...compile.captured_drafter import CapturedDrafter


class GpuPlatform(Platform):
    """Starts are not restored from a record on a GPU: this is untested. From here on a thread
    imports Triton."""

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        super().__init__(device, config.for_gpu())
        self._reading = read_triton_early()
        # A process that used the GPU may already have computed matmuls, and cuBLAS keeps the
        # settings of that time. Then the measurements of other processes may not apply.
        is_used = torch.cuda.is_initialized()
        self._matmul_plan_dir = None if is_used else cache_root() / "linear"
        if config.transparent:
            forbid_split_k()  # before the probe, whose matmuls would allocate 32 MiB of workspace

    @contextmanager
    def building(self) -> Iterator[Callable[[], None]]:
        """The device is current, and processes that compile kernels run in parallel."""
        from ...kernels.jit.compile_pool import compilers
        from ...kernels.jit.parallel_build import pin_triton_cache_dir

        pinned = without_split_k() if self.config.transparent else nullcontext()
        with torch.cuda.device(self.device), pinned:
            pin_triton_cache_dir()
            with compilers() as pool:
                # A model that was never traced here has no cached kernels here, either.
                yield pool.start

    def capture_options(
        self,
        attention: AttentionBackend,
        *,
        is_own: bool,  # noqa: ARG002 (no weights are copied)
    ) -> CaptureOptions:
        """Latent vectors are cached unless the cache is in e4m3: no kernel reads those."""
        config = self.config
        return CaptureOptions(
            "inductor" if config.compile == "auto" else config.compile,
            transparent=config.transparent,
            attention=attention,
            matmul_plan_dir=self._matmul_plan_dir,
            mla_latent_cache=config.mla_latent_cache and config.kv_cache_dtype == "auto",
        )

    def make_runner(
        self,
        captured: CapturedModel,
        stats: EngineStats,
        on_logits: OnLogits | None,
        drafter: CapturedDrafter | None = None,
    ) -> tuple[LocalRunner, int]:
        self._reading.join()
        from .startup import make_gpu_runner

        return make_gpu_runner(self.config, captured, stats, on_logits, drafter)

    def step_costs(self, runner: LocalRunner, max_model_len: int) -> StepCosts:
        """Measured here for one rank; for a group, once it computes together."""
        drafts = self.config.speculation
        if drafts is None or runner.captured.communicator.num_ranks > 1:
            return DEFAULT_COSTS
        from ..step_costs import measure_costs

        return measure_costs(runner, self.config, drafts, max_model_len)
