"""Engine arguments of vLLM (0.6 to 0.33) and nano-vllm that have another name here, or none.

An argument whose meaning is the same is taken under its own name. A value that says what happens
anyway is accepted. Any other is refused, with what to use. Names that are the same here are not in
the table: ``EngineConfig`` declares them. ``docs/engine_arguments.md`` shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Foreign:
    """What an argument of another engine means here.

    Attributes:
        same_as: our argument of that meaning, which takes its value.
        harmless: values that say what happens anyway, or functions of a value and of the other
            arguments that are true of such values. None always is one.
        as_ours: our arguments for a value.
        instead: what to use where a value is refused.
    """

    same_as: str = ""
    harmless: tuple[Any, ...] = ()
    instead: str = ""
    as_ours: Mapping[Any, Arguments] = field(default_factory=dict)

    def is_harmless(self, value: Any, others: Arguments) -> bool:
        return value is None or any(
            one(value, others) if callable(one) else _is_same(value, one) for one in self.harmless
        )


def _is_same(value: Any, one: Any) -> bool:
    # 0 and False are equal to Python.
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
_NO_SPECULATION = "speculative decoding is not supported"
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
    "num_gpu_blocks_override": Foreign("num_blocks"),
    "num_kvcache_blocks": Foreign("num_blocks", (-1,)),
    "kvcache_block_size": Foreign("block_size"),
    "scheduling_policy": Foreign("policy"),
    "async_scheduling": Foreign("overlap"),
    "cuda_graph_sizes": Foreign("graph_batch_sizes"),
    "cudagraph_capture_sizes": Foreign("graph_batch_sizes"),
    "tool_call_parser": Foreign("tool_call_format"),
    "reasoning_parser": Foreign("reasoning_format"),
    "enforce_eager": Foreign(
        harmless=_OFF,
        as_ours={True: {"compile": "graph", "graph_batch_sizes": ()}},
        instead="must be True or False",
    ),
    # Model and tokenizer.
    "trust_remote_code": Foreign(
        harmless=_OFF,
        instead="no code of a checkpoint is run: leave it out; transformers has the model, or it "
        "is refused",
    ),
    "tokenizer": Foreign(harmless=(_is_our_model,), instead=_OWN_TOKENIZER),
    "tokenizer_mode": Foreign(harmless=("auto", "hf"), instead=_OWN_TOKENIZER),
    "skip_tokenizer_init": Foreign(
        harmless=_OFF, instead="use SamplingParams(detokenize=False) and prompt_token_ids"
    ),
    "revision": Foreign(instead=_REVISION),
    "code_revision": Foreign(instead=_REVISION),
    "tokenizer_revision": Foreign(instead=_REVISION),
    "download_dir": Foreign(instead="set the environment variable HF_HUB_CACHE"),
    "hf_token": Foreign(harmless=_OFF, instead="set the environment variable HF_TOKEN"),
    "hf_config_path": Foreign(harmless=(_is_our_model,), instead=_CONFIG),
    "hf_config": Foreign(instead=_CONFIG),
    "hf_overrides": Foreign(harmless=({},), instead=_CONFIG),
    "rope_scaling": Foreign(harmless=({},), instead=_CONFIG),
    "rope_theta": Foreign(instead=_CONFIG),
    "config_format": Foreign(harmless=("auto", "hf"), instead="only Hugging Face's is read"),
    "model_impl": Foreign(
        harmless=("auto", "transformers"), instead="models are traced from transformers"
    ),
    "task": Foreign(harmless=(_is_path_of_runs,), instead="only text is generated"),
    "runner": Foreign(harmless=(_is_path_of_runs,), instead="only text is generated"),
    "convert": Foreign(harmless=("auto", "none"), instead="only text is generated"),
    "eos": Foreign(harmless=(-1,), instead="use SamplingParams(stop_token_ids=[...])"),
    "override_generation_config": Foreign(
        harmless=({},), instead="use SamplingParams, or generation_config with a folder"
    ),
    "served_model_name": Foreign(
        harmless=(_is_our_model,), instead="use `pagespec serve --served-model-name`"
    ),
    "model_loader_extra_config": Foreign(harmless=({},), instead="leave it out"),
    "max_parallel_loading_workers": Foreign(instead="leave it out"),
    # Parallel engines.
    "data_parallel_size": Foreign(harmless=(1,), instead=_REPLICAS),
    "data_parallel_rank": Foreign(harmless=(0,), instead=_REPLICAS),
    "data_parallel_size_local": Foreign(harmless=(1,), instead=_REPLICAS),
    "pipeline_parallel_size": Foreign(harmless=(1,), instead="use tensor_parallel_size"),
    "context_parallel_size": Foreign(harmless=(1,), instead="use tensor_parallel_size"),
    "decode_context_parallel_size": Foreign(harmless=(1,), instead="use tensor_parallel_size"),
    "enable_expert_parallel": Foreign(harmless=_OFF, instead="use tensor_parallel_size"),
    "distributed_executor_backend": Foreign(
        harmless=("mp", "uni"), instead="use tensor_parallel_size: ranks are processes of this host"
    ),
    "disable_custom_all_reduce": Foreign(harmless=_OFF, instead="leave it out"),
    "ray_workers_use_nsight": Foreign(harmless=_OFF, instead="leave it out"),
    # Memory and cache.
    "swap_space": Foreign(
        harmless=(0,), instead="preempted requests are computed again: leave it out"
    ),
    "cpu_offload_gb": Foreign(
        harmless=(0,), instead="use quantization, kv_cache_dtype or tensor_parallel_size"
    ),
    "kv_cache_memory_bytes": Foreign(instead="use num_blocks or memory_utilization"),
    "preemption_mode": Foreign(harmless=("recompute",), instead="leave it out"),
    "use_v2_block_manager": Foreign(harmless=(_any,)),
    "disable_sliding_window": Foreign(harmless=_OFF, instead="leave it out"),
    "calculate_kv_scales": Foreign(
        harmless=(_any,)  # scales are per token and head, and always calculated
    ),
    "kv_transfer_config": Foreign(harmless=({},), instead="KV caches are not moved: leave it out"),
    "kv_events_config": Foreign(harmless=({},), instead="use trace"),
    "enable_sleep_mode": Foreign(harmless=_OFF, instead="make a new LLM"),
    # Scheduling.
    "enable_chunked_prefill": Foreign(
        harmless=(True,), instead="prompts are cut at max_num_batched_tokens: raise it"
    ),
    "max_num_partial_prefills": Foreign(harmless=(1,), instead=_LONG),
    "max_long_partial_prefills": Foreign(harmless=(1,), instead=_LONG),
    "long_prefill_token_threshold": Foreign(harmless=(0,), instead=_LONG),
    "num_scheduler_steps": Foreign(harmless=(1,), instead="use overlap"),
    "scheduler_delay_factor": Foreign(harmless=(0,), instead="leave it out"),
    "num_lookahead_slots": Foreign(harmless=(0,), instead=_NO_SPECULATION),
    # Computation.
    "compilation_config": Foreign(harmless=({},), instead=_GRAPHS),
    "max_seq_len_to_capture": Foreign(harmless=(_any,)),  # graphs serve every length
    "attention_backend": Foreign(instead="use attention"),
    "attention_config": Foreign(harmless=({},), instead="use attention"),
    "max_logprobs": Foreign(harmless=(_up_to(20),), instead="at most 20 are given; on_logits"),
    "logits_processors": Foreign(
        harmless=([],), instead="use SamplingParams(logits_processors=[...])"
    ),
    "logits_processor_pattern": Foreign(instead="use SamplingParams(logits_processors=[...])"),
    "guided_decoding_backend": Foreign(
        harmless=("auto", "guidance"), instead="llguidance compiles all: leave it out"
    ),
    "structured_outputs_config": Foreign(
        harmless=({},), instead="llguidance compiles all: leave it out"
    ),
    # Logs.
    "disable_log_stats": Foreign(
        harmless=(True,), instead="use LLM.stats(), or /metrics of `pagespec serve`"
    ),
    "disable_log_requests": Foreign(harmless=(True,), instead="use trace"),
    "enable_log_requests": Foreign(harmless=_OFF, instead="use trace"),
    "use_tqdm_on_load": Foreign(harmless=(True,), instead="leave it out"),
    "show_hidden_metrics_for_version": Foreign(instead="leave it out"),
    "otlp_traces_endpoint": Foreign(instead="use trace"),
    # Features that are not supported.
    "speculative_config": Foreign(harmless=({},), instead=_NO_SPECULATION),
    "speculative_model": Foreign(instead=_NO_SPECULATION),
    "num_speculative_tokens": Foreign(harmless=(0,), instead=_NO_SPECULATION),
    "enable_lora": Foreign(harmless=_OFF, instead=_NO_LORA),
    "lora_modules": Foreign(harmless=([],), instead=_NO_LORA),
    "enable_prompt_adapter": Foreign(harmless=_OFF, instead=_NO_LORA),
    "max_loras": Foreign(harmless=(_any,)),  # of adapters, which enable_lora refuses
    "max_lora_rank": Foreign(harmless=(_any,)),
    "max_cpu_loras": Foreign(harmless=(_any,)),
    "fully_sharded_loras": Foreign(harmless=(_any,)),
    "limit_mm_per_prompt": Foreign(harmless=(_asks_for_no_inputs,), instead=_NO_IMAGES),
    "mm_processor_kwargs": Foreign(harmless=({},), instead=_NO_IMAGES),
    "language_model_only": Foreign(harmless=(True,), instead=_NO_IMAGES),
    "is_multimodal": Foreign(harmless=_OFF, instead=_NO_IMAGES),
    "allowed_local_media_path": Foreign(harmless=("",), instead=_NO_IMAGES),
    "enable_prompt_embeds": Foreign(harmless=_OFF, instead=_NO_IMAGES),
}
"""By name, for ``LLM``, ``AsyncLLM`` and the commands that load a model."""

_NO_TEMPLATE = "the template of the model is used: give a folder that has another"

SERVER: dict[str, Foreign] = {
    "allowed_origins": Foreign("cors_origin"),
    "disable_uvicorn_access_log": Foreign(
        as_ours={True: {"access_log": False}}, harmless=_OFF, instead="use --no-access-log"
    ),
    "enable_auto_tool_choice": Foreign(
        harmless=(True,), instead="use --tool-call-format none, or tool_choice of a request"
    ),
    "chat_template": Foreign(instead=_NO_TEMPLATE),
    "chat_template_content_format": Foreign(harmless=("auto", "string"), instead=_NO_TEMPLATE),
    "uvicorn_log_level": Foreign(harmless=("info",), instead="use --access-log and --log-json"),
    "disable_fastapi_docs": Foreign(harmless=(True,), instead="leave it out"),
    "enable_server_load_tracking": Foreign(harmless=(_any,)),  # /load always counts
    "enable_tokenizer_info_endpoint": Foreign(harmless=(_any,)),  # it is always served
    "enable_request_id_headers": Foreign(harmless=(True,), instead="each answer has its id"),
    "return_tokens_as_token_ids": Foreign(
        harmless=_OFF, instead="use the field of that name of a request"
    ),
    "response_role": Foreign(harmless=("assistant",), instead="answers are of the assistant"),
    "ssl_ca_certs": Foreign(instead="use a proxy that checks clients"),
    "middleware": Foreign(harmless=([],), instead="use pagespec.server.app.create_app"),
    "api_server_count": Foreign(harmless=(1,), instead="leave it out"),
    "headless": Foreign(harmless=_OFF, instead=_REPLICAS),
}
"""Of ``vllm serve``, beside those of the engine. ``same_as`` and ``as_ours`` are our options."""

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
    """Our arguments for one of another engine.

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
