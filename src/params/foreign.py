"""Engine arguments of vLLM (0.6 to 0.33) and nano-vllm that have no equal name here.

An argument with the same meaning is accepted under its own name. A value without effect is ignored.
Any other value raises an error that names the replacement. Names of ``EngineConfig`` are not in
the table. ``docs/engine_arguments.md`` shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Foreign:
    """The meaning of another engine's argument.

    Attributes:
        harmless: values without effect, or predicates of a value and the other arguments. None is
            always harmless.
        instead: the replacement, for the error.
        same_as: our argument with the same meaning and values.
        as_ours: our arguments for each value.
    """

    harmless: tuple[Any, ...] = ()
    instead: str = ""
    same_as: str = ""
    as_ours: Mapping[Any, Arguments] = field(default_factory=dict)

    def is_harmless(self, value: Any, others: Arguments) -> bool:
        return value is None or any(
            one(value, others) if callable(one) else _is_same(value, one) for one in self.harmless
        )


def _is_same(value: Any, one: Any) -> bool:
    # Python treats 0 and False as equal.
    return isinstance(value, bool) == isinstance(one, bool) and bool(value == one)


def _is_our_model(value: Any, others: Arguments) -> bool:
    return "model" in others and str(value) == str(others["model"])


def _asks_for_no_inputs(value: Any, _others: Arguments) -> bool:
    return isinstance(value, Mapping) and not any(value.values())


def _any(_value: Any, _others: Arguments) -> bool:
    return True


def _up_to(limit: int) -> Callable[[Any, Arguments], bool]:
    return lambda value, _: type(value) is int and 0 <= value <= limit


def _is_path_of_runs(value: Any, _others: Arguments) -> bool:
    return value in ("auto", "generate")


_OFF = (False,)
_NO_LORA = "LoRA adapters are not supported: merge the adapter into the weights"
_SPECULATION = "use speculative_config"
_NO_IMAGES = "only text is supported"
_REPLICAS = "run an engine per GPU, or `pagespec generate --replicas N`"
_REVISION = (
    "download it with huggingface_hub.snapshot_download(name, revision=...), give the folder"
)
_CONFIG = "change config.json in a copy of the folder, or give a transformers model in memory"
_GRAPHS = "use compile and graph_batch_sizes"
_LONG = "long prompts are cut by max_inter_token_ms and max_num_batched_tokens"
_OWN_TOKENIZER = "the tokenizer of the model is used: give a folder that has both"

ENGINE: dict[str, Foreign] = {
    # The same under another name.
    "num_gpu_blocks_override": Foreign(same_as="num_blocks"),
    "num_kvcache_blocks": Foreign((-1,), same_as="num_blocks"),
    "kvcache_block_size": Foreign(same_as="block_size"),
    "scheduling_policy": Foreign(same_as="policy"),
    "async_scheduling": Foreign(same_as="overlap"),
    "cuda_graph_sizes": Foreign(same_as="graph_batch_sizes"),
    "cudagraph_capture_sizes": Foreign(same_as="graph_batch_sizes"),
    "tool_call_parser": Foreign(same_as="tool_call_format"),
    "reasoning_parser": Foreign(same_as="reasoning_format"),
    "enforce_eager": Foreign(
        _OFF, "must be True or False", as_ours={True: {"compile": "graph", "graph_batch_sizes": ()}}
    ),
    # Model and tokenizer.
    "trust_remote_code": Foreign(
        _OFF,
        "no code of a checkpoint is run: leave it out; transformers has the model, or it "
        "is refused",
    ),
    "tokenizer": Foreign((_is_our_model,), _OWN_TOKENIZER),
    "tokenizer_mode": Foreign(("auto", "hf"), _OWN_TOKENIZER),
    "skip_tokenizer_init": Foreign(
        _OFF, "use SamplingParams(detokenize=False) and prompt_token_ids"
    ),
    "revision": Foreign((), _REVISION),
    "code_revision": Foreign((), _REVISION),
    "tokenizer_revision": Foreign((), _REVISION),
    "download_dir": Foreign((), "set the environment variable HF_HUB_CACHE"),
    "hf_token": Foreign(_OFF, "set the environment variable HF_TOKEN"),
    "hf_config_path": Foreign((_is_our_model,), _CONFIG),
    "hf_config": Foreign((), _CONFIG),
    "hf_overrides": Foreign(({},), _CONFIG),
    "rope_scaling": Foreign(({},), _CONFIG),
    "rope_theta": Foreign((), _CONFIG),
    "config_format": Foreign(("auto", "hf"), "only Hugging Face's is read"),
    "model_impl": Foreign(("auto", "transformers"), "models are traced from transformers"),
    "task": Foreign((_is_path_of_runs,), "only text is generated"),
    "runner": Foreign((_is_path_of_runs,), "only text is generated"),
    "convert": Foreign(("auto", "none"), "only text is generated"),
    "eos": Foreign((-1,), "use SamplingParams(stop_token_ids=[...])"),
    "override_generation_config": Foreign(
        ({},), "use SamplingParams, or generation_config with a folder"
    ),
    "served_model_name": Foreign((_is_our_model,), "use `pagespec serve --served-model-name`"),
    "model_loader_extra_config": Foreign(({},), "leave it out"),
    "max_parallel_loading_workers": Foreign((), "leave it out"),
    # Parallel engines.
    "data_parallel_size": Foreign((1,), _REPLICAS),
    "data_parallel_rank": Foreign((0,), _REPLICAS),
    "data_parallel_size_local": Foreign((1,), _REPLICAS),
    "pipeline_parallel_size": Foreign((1,), "use tensor_parallel_size"),
    "context_parallel_size": Foreign((1,), "use tensor_parallel_size"),
    "decode_context_parallel_size": Foreign((1,), "use tensor_parallel_size"),
    "enable_expert_parallel": Foreign(_OFF, "use tensor_parallel_size"),
    "distributed_executor_backend": Foreign(
        ("mp", "uni"), "use tensor_parallel_size: ranks are processes of this host"
    ),
    "disable_custom_all_reduce": Foreign(_OFF, "leave it out"),
    "ray_workers_use_nsight": Foreign(_OFF, "leave it out"),
    # Memory and cache.
    "swap_space": Foreign((0,), "preempted requests are computed again: leave it out"),
    "cpu_offload_gb": Foreign((0,), "use quantization, kv_cache_dtype or tensor_parallel_size"),
    "kv_cache_memory_bytes": Foreign((), "use num_blocks or memory_utilization"),
    "preemption_mode": Foreign(("recompute",), "leave it out"),
    "use_v2_block_manager": Foreign((_any,)),
    "disable_sliding_window": Foreign(_OFF, "leave it out"),
    "calculate_kv_scales": Foreign((_any,)),
    "kv_transfer_config": Foreign(({},), "KV caches are not moved: leave it out"),
    "kv_events_config": Foreign(({},), "use trace"),
    "enable_sleep_mode": Foreign(_OFF, "make a new LLM"),
    # Scheduling.
    "enable_chunked_prefill": Foreign(
        (True,), "prompts are cut at max_num_batched_tokens: raise it"
    ),
    "max_num_partial_prefills": Foreign((1,), _LONG),
    "max_long_partial_prefills": Foreign((1,), _LONG),
    "long_prefill_token_threshold": Foreign((0,), _LONG),
    "num_scheduler_steps": Foreign((1,), "use overlap"),
    "scheduler_delay_factor": Foreign((0,), "leave it out"),
    "num_lookahead_slots": Foreign((0,), _SPECULATION),
    # Computation.
    "compilation_config": Foreign(({},), _GRAPHS),
    "max_seq_len_to_capture": Foreign((_any,)),  # graphs serve every length
    "attention_backend": Foreign((), "use attention"),
    "attention_config": Foreign(({},), "use attention"),
    "max_logprobs": Foreign((_up_to(20),), "at most 20 are given; on_logits"),
    "logits_processors": Foreign(([],), "use SamplingParams(logits_processors=[...])"),
    "logits_processor_pattern": Foreign((), "use SamplingParams(logits_processors=[...])"),
    "guided_decoding_backend": Foreign(
        ("auto", "guidance"), "llguidance compiles all: leave it out"
    ),
    "structured_outputs_config": Foreign(({},), "llguidance compiles all: leave it out"),
    # Logs.
    "disable_log_stats": Foreign((True,), "use LLM.stats(), or /metrics of `pagespec serve`"),
    "disable_log_requests": Foreign((True,), "use trace"),
    "enable_log_requests": Foreign(_OFF, "use trace"),
    "use_tqdm_on_load": Foreign((True,), "leave it out"),
    "show_hidden_metrics_for_version": Foreign((), "leave it out"),
    "otlp_traces_endpoint": Foreign((), "use trace"),
    # Features that are not supported.
    "speculative_model": Foreign((), _SPECULATION),
    "num_speculative_tokens": Foreign((0,), _SPECULATION),
    "enable_lora": Foreign(_OFF, _NO_LORA),
    "lora_modules": Foreign(([],), _NO_LORA),
    "enable_prompt_adapter": Foreign(_OFF, _NO_LORA),
    "max_loras": Foreign((_any,)),  # of adapters, which enable_lora refuses
    "max_lora_rank": Foreign((_any,)),
    "max_cpu_loras": Foreign((_any,)),
    "fully_sharded_loras": Foreign((_any,)),
    "limit_mm_per_prompt": Foreign((_asks_for_no_inputs,), _NO_IMAGES),
    "mm_processor_kwargs": Foreign(({},), _NO_IMAGES),
    "language_model_only": Foreign((True,), _NO_IMAGES),
    "is_multimodal": Foreign(_OFF, _NO_IMAGES),
    "allowed_local_media_path": Foreign(("",), _NO_IMAGES),
    "enable_prompt_embeds": Foreign(_OFF, _NO_IMAGES),
}
"""By name, for ``LLM``, ``AsyncLLM`` and the commands that load a model."""

_NO_TEMPLATE = "the template of the model is used: give a folder that has another"

SERVER: dict[str, Foreign] = {
    "allowed_origins": Foreign(same_as="cors_origins"),
    "disable_uvicorn_access_log": Foreign(
        _OFF, "use --no-access-log", as_ours={True: {"access_log": False}}
    ),
    "enable_auto_tool_choice": Foreign(
        (True,), "use --tool-call-format none, or tool_choice of a request"
    ),
    "chat_template": Foreign((), _NO_TEMPLATE),
    "chat_template_content_format": Foreign(("auto", "string"), _NO_TEMPLATE),
    "uvicorn_log_level": Foreign(("info",), "use --access-log and --log-json"),
    "disable_fastapi_docs": Foreign((True,), "leave it out"),
    "enable_server_load_tracking": Foreign((_any,)),  # /load always counts
    "enable_tokenizer_info_endpoint": Foreign((_any,)),  # it is always served
    "enable_request_id_headers": Foreign((True,), "each answer has its id"),
    "return_tokens_as_token_ids": Foreign(_OFF, "use the field of that name of a request"),
    "response_role": Foreign(("assistant",), "answers are of the assistant"),
    "ssl_ca_certs": Foreign((), "use a proxy that checks clients"),
    "middleware": Foreign(([],), "use pagespec.server.app.create_app"),
    "api_server_count": Foreign((1,), "leave it out"),
    "headless": Foreign(_OFF, _REPLICAS),
}
"""Additional flags of ``vllm serve``; ``same_as`` and ``as_ours`` name our options."""

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
}
"""Short options of ``vllm serve``."""


def translate(
    name: str, value: Any, others: Arguments, table: Mapping[str, Foreign] = ENGINE
) -> dict[str, Any]:
    """Translate an argument of another engine to ours.

    Args:
        others: the other arguments of the call, under our names.

    Raises:
        InvalidInputError: the value is refused, or our argument is given as well.
        KeyError: no table has the name.
    """
    known = table[name]
    if known.is_harmless(value, others):
        return {}
    found: Arguments | None = {known.same_as: value} if known.same_as else None
    for one, ours in known.as_ours.items():
        found = ours if _is_same(value, one) else found
    if found is None:
        raise InvalidInputError(name, value, f"is not supported: {known.instead}")
    for own, new in found.items():
        if own in others and others[own] != new:
            raise InvalidInputError(name, value, f"stands for {own}; give one of them")
    return dict(found)
