"""vLLM's interface of an engine that is stepped by its caller, over the engine of an ``LLM``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .engine.call_arguments import (
    adds_special_tokens,
    refuse_unserved,
    truncations,
    with_priorities,
)
from .engine.config import EngineConfig
from .engine.core import Engine
from .engine.inputs import PromptReader
from .engine.logits_processors import ProcessorClasses
from .engine.metric_values import Metric, read_metrics
from .engine.outputs import RequestOutput
from .engine.request_totals import RequestTotals
from .engine.sampling_params import SamplingParams
from .engine.stepwise import StepwiseRequests
from .errors import InvalidInputError
from .params.checks import path_of

INSTEAD = {
    "collective_rpc": "workers take no calls; use the model before LLM(model) is made",
    "apply_model": "workers take no calls; use the model before LLM(model) is made",
    "engine_core": "use LLM.engine",
    "model_executor": "use LLM.engine.runner",
    "output_processor": "use has_unfinished_requests",
    "do_log_stats": "use get_metrics",
    "pause": "use AsyncLLM.pause_generation and resume_generation",
    "resume": "use AsyncLLM.pause_generation and resume_generation",
    "enqueue_chat": "use chat; or llm_engine.add_request with the result of read_messages",
    "beam_search": "use LLM.beam_search",
    "embed": "embeddings are not supported",
    "encode": "embeddings are not supported",
    "classify": "classifiers are not supported",
    "reward": "reward models are not supported",
    "init_weight_transfer_engine": "change the weights, then call reset_prefix_cache",
    "update_weights": "change the weights, then call reset_prefix_cache",
    "sleep": "delete the LLM, and make a new one",
    "wake_up": "delete the LLM, and make a new one",
    "add_lora": "LoRA adapters are not supported; merge the adapter into the model",
    "remove_lora": "LoRA adapters are not supported",
    "list_loras": "LoRA adapters are not supported",
    "start_profile": "use torch.profiler around the calls",
    "stop_profile": "use torch.profiler around the calls",
}
"""Hints at what serves in place of attributes of vLLM's LLM and LLMEngine."""

ASYNC_INSTEAD = INSTEAD | {
    "add_request": "use submit()",
    "from_vllm_config": "use from_engine_args()",
    "sleep": "call shutdown(), and make a new AsyncLLM",
    "wake_up": "make a new AsyncLLM",
    "is_sleeping": "an AsyncLLM is awake until shutdown()",
    "pause": "use pause_generation and resume_generation",
    "resume": "use pause_generation and resume_generation",
    "output_processor": "use num_live_requests",
    "pin_lora": INSTEAD["add_lora"],
    "scale_elastic_ep": "use tensor_parallel_size",
    "reset_mm_cache": "only text is supported",
    "reset_encoder_cache": "only text is supported",
}
"""Hints at what serves in place of attributes of vLLM's AsyncLLM."""


def refuse_attribute(
    target: object, name: str, instead: Mapping[str, str] = MappingProxyType(INSTEAD)
) -> None:
    """Refuse a name that is not found, with the replacement of vLLM's names.

    Raises:
        AttributeError: always.
    """
    hint = instead.get(name)
    text = f"{type(target).__name__!r} object has no attribute {name!r}"
    raise AttributeError(text + (f": {hint}" if hint else ""), name=name, obj=target)


@dataclass(frozen=True)
class ModelConfig:
    """Attributes:
    model: folder, hub id or file; the class name of a model in memory.
    dtype: of the weights, a torch.dtype.
    read_hf_config: reads the configuration of transformers.
    """

    model: str
    max_model_len: int
    dtype: Any
    seed: int
    vocab_size: int
    read_hf_config: Callable[[], Any] = field(repr=False)
    runner_type: str = "generate"

    @property
    def tokenizer(self) -> str:
        return self.model

    @cached_property
    def hf_config(self) -> Any:
        """The configuration of transformers; read from the files on first use."""
        return self.read_hf_config()

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        return self.vocab_size

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)


@dataclass(frozen=True)
class CacheConfig:
    """Attributes:
    num_gpu_blocks: blocks of the KV cache, on any device. num_cpu_blocks: of a swap space: 0.
    gpu_memory_utilization: None if the size of the cache was given otherwise.
    """

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float | None
    cache_dtype: str
    num_cpu_blocks: int = 0


@dataclass(frozen=True)
class SchedulerConfig:
    """``async_scheduling``: a step is scheduled while the one before it is computed."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    async_scheduling: bool


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        return self.tensor_parallel_size


@dataclass(frozen=True)
class VllmConfig:
    """An engine's settings under vLLM's names, to read. ``speculative_config``: ours, or None."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    speculative_config: Any = None
    lora_config: None = None


def _read_hf_config(model: Any) -> Callable[[], Any]:
    """A function that reads a model's configuration of transformers. It does not refer to a model
    in memory."""
    name = path_of(model)
    if name is None:
        config = model.config
        return lambda: config

    def read() -> Any:
        from transformers import AutoConfig

        folder, file = os.path.split(name) if name.endswith(".gguf") else (name, None)
        return AutoConfig.from_pretrained(folder, **({} if file is None else {"gguf_file": file}))

    return read


def settings_of(built: Any, model: Any) -> VllmConfig:
    """The settings of an engine.

    Args:
        built: a ``BuiltEngine``.
        model: as given to ``LLM``.
    """
    config = built.config
    return VllmConfig(
        ModelConfig(
            model=path_of(model) or type(model).__name__,
            max_model_len=built.max_model_len,
            dtype=built.dtype,
            seed=config.seed,
            vocab_size=built.vocab_size,
            read_hf_config=_read_hf_config(model),
        ),
        CacheConfig(
            block_size=config.block_size,
            num_gpu_blocks=built.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            gpu_memory_utilization=config.memory_utilization,
            cache_dtype=config.kv_cache_dtype,
        ),
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.num_tokens_per_step,
            policy=config.policy,
            async_scheduling=built.runner.pipeline_depth > 0,
        ),
        ParallelConfig(config.tensor_parallel_size),
        config.speculation,
    )


def processors_of(config: EngineConfig, settings: VllmConfig) -> ProcessorClasses | None:
    """The engine's classes that edit logits, which are rows on the CPU; None without any."""
    if not config.logits_processors:
        return None
    import torch

    return ProcessorClasses(tuple(config.logits_processors), settings, torch.device("cpu"))


class StepwiseEngine:
    """Requests are added under the caller's ids, and computed by :meth:`step`.

    For one thread. Calls of the ``LLM``, also of other threads, are batched together with its
    requests; they count in none of its numbers.

    Attributes:
        vllm_config, model_config: settings, to read.
        tokenizer: a transformers tokenizer; None: the model has none.
    """

    def __init__(
        self,
        engine: Engine,
        requests: StepwiseRequests,
        reader: PromptReader,
        tokenizer: Any,
        vllm_config: VllmConfig,
        totals: RequestTotals,
    ) -> None:
        self._engine, self._requests, self._reader = engine, requests, reader
        self.tokenizer = tokenizer
        self._totals = totals
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Called for names that are not found, such as methods of vLLM's LLMEngine."""
            refuse_attribute(self, name)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int | None = None,
        prompt_text: str | None = None,
    ) -> str:
        """Add a prompt. Returns ``request_id``.

        Args:
            request_id: names the prompt's outputs; must not be in use.
            prompt: one prompt as for ``LLM.generate``, or a ``PromptInput``.
            params: their ``output_kind`` determines what each output contains.
            arrival_time, trace_headers, lora_request: must be None.
            tokenization_kwargs: see ``LLM.generate``.
            priority: 0, the most urgent, to 256. None: that of the prompt's dict, or 0.
            prompt_text: the text of token ids, for ``RequestOutput.prompt``.

        Raises:
            TypeError: ``request_id`` is not text.
            InvalidInputError: an argument is refused.
        """
        for name, value in {"arrival_time": arrival_time, "trace_headers": trace_headers}.items():
            if value is not None:
                raise InvalidInputError(name, value, "must be None: is not supported")
        refuse_unserved(lora_request)
        (truncate,) = truncations(tokenization_kwargs, [params])
        adds = adds_special_tokens(tokenization_kwargs)
        read = self._reader.read_or_keep(prompt, truncate=truncate, add_special_tokens=adds)
        (read,) = with_priorities([read], None if priority is None else [priority])
        if prompt_text is not None and read.text is None:
            read = replace(read, text=prompt_text)
        self._requests.add(request_id, read, params)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns an output per prompt with new tokens or an end.

        Raises:
            RequestError, EngineError: see ``StepwiseRequests.step``.
        """
        return self._requests.step()

    def abort_request(self, request_ids: Sequence[str] | str, internal: bool = False) -> None:  # noqa: ARG002
        """End requests now, without an output. Ids that are not in use are skipped.

        Args:
            internal: vLLM's; ids have one kind here.
        """
        self._requests.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has not yet returned the end of every request."""
        return self._requests.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that have not ended; each continuation counts."""
        return self._requests.num_unfinished

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer.

        Raises:
            InvalidInputError: the model has none.
        """
        if self.tokenizer is None:
            raise InvalidInputError("tokenizer", None, "this model has no tokenizer")
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """See ``LLM.get_metrics``."""
        labels = {"model_name": self.model_config.model, "engine": "0"}
        return read_metrics(self._engine.scheduler, self._totals, labels)

    def reset_prefix_cache(
        self, reset_running_requests: bool = True, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache. Returns whether it was emptied.

        Args:
            reset_running_requests: preempt live requests, which then recompute their tokens. If
                False, nothing happens while requests are live.
            reset_connector: must be False: there is no connector.

        Raises:
            EngineError: a step that was in flight failed.
        """
        if reset_connector:
            raise InvalidInputError("reset_connector", reset_connector, "must be False")
        if not reset_running_requests and self._engine.scheduler.requests:
            return False
        self._engine.reset_prefix_cache()
        return True
