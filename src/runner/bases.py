"""Base classes for both kinds of device: of runners (sizes, caches, interfaces), and of platforms,
which start an engine and create its runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..compile.captured_model import CapturedModel, CaptureOptions
from ..compile.kv_cache import allocate_kv_caches, allocate_states, kv_dtype
from ..compile.load.source import ModelSource
from ..compile.start_record import StartRecord
from ..compile.step_inputs import StepInputs, StepOutputs
from ..engine.config import EngineConfig
from ..engine.drafting.costs import DEFAULT_COSTS, StepCosts
from ..engine.outputs import EngineStats
from ..engine.plan import StepPlan, StepResult
from ..engine.runner import MAX_DRAFT_TOKENS, Runner
from ..engine.structured_config import NO_DEFAULTS, StructuredOutputsConfig
from ..errors import InvalidInputError
from ..kernels.attention.backend import AttentionBackend
from ..structured.grammars import Grammars
from .constrained import LateMatchers
from .kv_budget import CacheSize
from .layout import layout_of

if TYPE_CHECKING:
    from ..compile.captured_drafter import CapturedDrafter

OnLogits = Callable[[StepPlan, Tensor], None]


class TimedRunner(Runner, Protocol):
    """A runner over a KV cache.

    Attributes:
        num_blocks: KV blocks. pack_s, mask_s, wait_s: seconds of host time so far.
    """

    num_blocks: int

    @property
    def pack_s(self) -> float: ...

    @property
    def mask_s(self) -> float: ...

    @property
    def wait_s(self) -> float: ...


class LocalRunner(ABC):
    """A runner of this process, over a captured model and its own caches. Implements
    :class:`.engine.runner.Runner`.

    Args:
        captured: may be shared by several runners, each with its own caches.
        block_size: tokens per KV block. num_blocks: blocks besides the null block.
        max_num_tokens: most tokens per step. max_num_rows: most requests per step, and on a GPU
            most samples.
        max_num_blocks: most blocks per request.
        kv_cache_dtype: "fp8" for caches in e4m3 (:mod:`..kernels.e4m3`).
        num_state_slots, state_interval: for a model with recurrent layers: slots besides the null
            slot, and tokens per interval.
        overlap: whether the next step may be dispatched before the tokens of a step are collected.
        processed_logprobs: whether log-probabilities of sampled tokens are taken from the
            distributions that the tokens are sampled from, instead of the model's own.
        structured_outputs: defaults of constraints.
        on_logits: called in each dispatch, before sampling, with the plan and the logits
            ``[num_sampled, V]`` of its samples. It must clone the tensor to keep it.

    Raises:
        InvalidInputError: a size below 1.
    """

    max_num_samples: int | None = None
    has_drafter: bool = False
    _matchers: LateMatchers

    def __init__(
        self,
        captured: CapturedModel,
        *,
        block_size: int,
        num_blocks: int,
        max_num_tokens: int = 0,
        max_num_rows: int = 0,
        max_num_blocks: int = 0,
        kv_cache_dtype: str = "auto",
        num_state_slots: int = 0,
        state_interval: int = 0,
        overlap: bool = False,
        processed_logprobs: bool = False,
        structured_outputs: StructuredOutputsConfig = NO_DEFAULTS,
        on_logits: OnLogits | None = None,
    ) -> None:
        for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
            if value < 1:
                raise InvalidInputError(name, value, "must be 1 or more")
        loaded = captured.loaded
        if loaded.recurrent and (num_state_slots < 1 or state_interval < 1):
            raise InvalidInputError("num_state_slots", num_state_slots, "must be 1 or more")
        self.captured, self.block_size, self.num_blocks = captured, block_size, num_blocks
        self.num_state_slots, self.state_interval = num_state_slots, state_interval
        self.pipeline_depth = int(overlap)
        dtype, device = kv_dtype(loaded, kv_cache_dtype), loaded.device
        self.kv_caches = allocate_kv_caches(captured.specs, num_blocks, block_size, dtype, device)
        self.states = allocate_states(loaded.recurrent, num_state_slots, state_interval, device)
        self._forward = captured.bind(self.kv_caches, self.states)
        self._layout = layout_of(captured.fields)
        # Recurrent layers need the place where draft tokens begin.
        has_field = any(field.name == "num_drafts" for field in captured.fields)
        self.max_draft_tokens = MAX_DRAFT_TOKENS if has_field or not loaded.recurrent else 0
        self.grammars = Grammars(
            loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids, structured_outputs
        )
        self._max_num_tokens, self._max_num_rows = max_num_tokens, max_num_rows
        self._max_num_blocks = max_num_blocks
        self._has_processed_logprobs, self._on_logits = processed_logprobs, on_logits
        self.pack_s = self.wait_s = 0.0

    @cached_property
    def _forward_long(self) -> Callable[[StepInputs], StepOutputs] | None:
        """See :meth:`.CapturedModel.bind_long`. It is made for the first long step."""
        return self.captured.bind_long(self.kv_caches, self.states)

    @property
    def mask_s(self) -> float:
        """Seconds that the host has waited so far for bitmasks of constrained rows."""
        return self._matchers.mask_s

    @abstractmethod
    def dispatch(self, plan: StepPlan) -> object:
        """Compute a step, or queue it. If it raises, ``reset`` makes the runner usable again."""

    @abstractmethod
    def collect(self, handle: object) -> StepResult:
        """Wait for a dispatched step, and return its results."""

    @abstractmethod
    def reset(self) -> None:
        """Wait for the queued steps, and invalidate everything cached about device state."""

    @abstractmethod
    def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
        """See :class:`.step_costs.MeasuredRunner`."""

    @abstractmethod
    def draft_seconds_of(self, plan: StepPlan) -> float:
        """See :class:`.step_costs.MeasuredRunner`."""

    # With several ranks, rank 0 stages a step and all ranks launch it.

    @property
    @abstractmethod
    def max_staged_bytes(self) -> int:
        """The most bytes of a staged step."""

    @abstractmethod
    def stage(self, plan: StepPlan) -> Sequence[NDArray[Any]]:
        """The step as arrays, for :meth:`launch` on every rank."""

    @abstractmethod
    def launch(self, arrays: Sequence[NDArray[Any]], plan: StepPlan | None = None) -> object:
        """Compute a staged step, or queue it. Rank 0 passes its plan, for edited rows and
        ``on_logits``."""

    @abstractmethod
    def replay(self, arrays: Sequence[NDArray[Any]], plan: StepPlan | None = None) -> float:
        """Compute a staged step, on all ranks at the same time, and wait for it.

        Returns:
            The seconds of the step; with the plan, which only rank 0 has, those of the drafter's
            passes behind it.
        """

    def is_computed(self, _handle: Any, _wait_s: float) -> bool:
        """Whether a launched step has been computed, after at most ``wait_s`` seconds."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release the process group. No step may be launched afterwards."""


def runner_settings(config: EngineConfig, size: CacheSize) -> dict[str, Any]:
    """The arguments of :class:`LocalRunner` that follow from the engine's settings."""
    return {
        "block_size": config.block_size,
        "num_blocks": size.num_blocks,
        "max_num_tokens": config.num_tokens_per_step,
        "max_num_rows": config.max_num_seqs,
        "max_num_blocks": -(-size.max_model_len // config.block_size),
        "kv_cache_dtype": config.kv_cache_dtype,
        "num_state_slots": size.num_state_slots,
        "state_interval": config.num_tokens_per_interval if size.num_state_slots else 0,
        "processed_logprobs": config.logprobs_mode == "processed_logprobs",
        "structured_outputs": config.structured,
    }


class Platform(ABC):
    """The kind of device that an engine runs on.

    Attributes:
        device: where the model is loaded.
        config: the configuration with the device's defaults filled in.
    """

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        self.device, self.config = device, config

    def start_record(self, _source: ModelSource | None) -> StartRecord | None:
        """The record of a model that can be restored here, or None."""
        return None

    def building(self) -> AbstractContextManager[Callable[[], None] | None]:
        """A context in which the graph is captured and the runner is created. It yields the
        function to call before a model is traced."""
        return nullcontext()

    @abstractmethod
    def capture_options(self, attention: AttentionBackend, *, is_own: bool) -> CaptureOptions:
        """How to capture the graph.

        Args:
            is_own: whether only this engine uses the weights, so that copies of them stay valid.
        """

    @abstractmethod
    def make_runner(
        self,
        captured: CapturedModel,
        stats: EngineStats,
        on_logits: OnLogits | None,
        drafter: CapturedDrafter | None = None,
    ) -> tuple[LocalRunner, int]:
        """The runner with its KV cache, and the most tokens that a request may have.

        Args:
            drafter: drafts behind the rows of plans, with caches for the same blocks.

        Raises:
            InvalidInputError: they do not fit into memory.
        """

    def step_costs(self, _runner: LocalRunner, _max_model_len: int) -> StepCosts:
        """The durations of steps, for drafters."""
        return DEFAULT_COSTS
