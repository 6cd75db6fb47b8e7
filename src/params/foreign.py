"""Arguments of vLLM (0.6 to 0.33) and nano-vllm that have no equal name here.

An argument with the same meaning is accepted under its own name. A value without effect is ignored.
Any other value raises an error that names the replacement. Names of ``EngineConfig`` are not in
the tables. ``docs/from_vllm.md`` shows the tables, and ``compat/arguments.py`` makes ``EngineArgs``
of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Foreign:
    """The meaning of another engine's argument.

    Attributes:
        harmless: values without effect, or predicates of a value and the other arguments. None is
            always harmless. The first value is the default in ``EngineArgs``; without one it is
            None.
        instead: the replacement, for the error.
        same_as: our argument with the same meaning and values.
        key: the value is this key of the dict ``same_as``.
        as_ours: our arguments for each value.
    """

    harmless: tuple[Any, ...] = ()
    instead: str = ""
    same_as: str = ""
    key: str = ""
    as_ours: Mapping[Any, Arguments] = field(default_factory=dict)

    @property
    def default(self) -> Any:
        """The value in ``EngineArgs`` that says nothing."""
        first = self.harmless[0] if self.harmless else None
        return None if callable(first) or self.same_as else first

    def is_harmless(self, value: Any, others: Arguments) -> bool:
        return value is None or any(
            one(value, others) if callable(one) else _is_same(value, one) for one in self.harmless
        )


def _is_same(value: Any, one: Any) -> bool:
    # Python treats 0 and False as equal.
    return isinstance(value, bool) == isinstance(one, bool) and bool(value == one)


def _is_our_model(value: Any, others: Arguments) -> bool:
    return "model" in others and str(value) == str(others["model"])


def _is_limits(value: Any, _others: Arguments) -> bool:
    def is_limit(one: Any) -> bool:
        number = one.get("count", 0) if isinstance(one, Mapping) else one
        return isinstance(number, int) and not isinstance(number, bool) and number >= 0

    return isinstance(value, Mapping) and all(map(is_limit, value.values()))


def _any(_value: Any, _others: Arguments) -> bool:
    return True


def _is_path_of_runs(value: Any, _others: Arguments) -> bool:
    return value in ("auto", "generate")


_OFF = (False,)
_EITHER = (False, True)
_NO_LORA = "LoRA adapters are not supported: merge the adapter into the weights"
_SPECULATION = "use speculative_config"
_NO_IMAGES = "only text is supported"
_NO_EMBEDDINGS = "prompts are texts or token ids, not embeddings"
_REPLICAS = "run an engine per GPU, or `pagespec generate --replicas N`"
_REVISION = (
    "download it with huggingface_hub.snapshot_download(name, revision=...), give the folder"
)
_CONFIG = "change config.json in a copy of the folder, or give a transformers model in memory"
_GRAPHS = "use compile and graph_batch_sizes"
_LONG = "long prompts are cut by max_inter_token_ms and max_num_batched_tokens"
_NO_POOLING = "embeddings, classification and pooling are not supported"
_ONLY_GENERATION = f"only text is generated; {_NO_POOLING}"
_ONE_HOST = "ranks are processes of this host: use tensor_parallel_size"
_MOE = "experts are computed by one kernel: leave it out"
_NO_OFFLOAD = "use quantization, kv_cache_dtype or tensor_parallel_size"
_STATE = "use state_interval"
_OWN_TOKENIZER = "the tokenizer of the model is used: give a folder that has both"

# vLLM's parsers whose format has another name here. Others have the same name, or are refused.
_REASONING = {
    "think": (
        *("deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "kimi_k2", "mimo"),
        *("nemotron_v3", "olmo3", "qwen3", "step3p5"),
    ),
    "deepseek_r1": ("minimax_m2", "step3"),  # the answer begins with reasoning
    "cohere": ("cohere_command3",),
    "harmony": ("openai_gptoss",),
}
_CALLS = {
    "cohere": ("cohere_command3",),
    "deepseek": ("deepseek_v3", "deepseek_v31"),
    "deepseek_v32": ("deepseek_v4",),
    "glm45": ("glm47",),
    "harmony": ("openai",),
    "llama3_json": ("llama4_json",),
    "pythonic": ("llama4_pythonic",),
    "qwen3_coder": ("mimo", "qwen3_xml"),
}


def _formats(kind: str, parsers: Mapping[str, Sequence[str]]) -> dict[str, Arguments]:
    """Our argument for each of vLLM's parsers."""
    return {parser: {f"{kind}_format": ours} for ours, group in parsers.items() for parser in group}


ENGINE: dict[str, Foreign] = {
    # The same under another name.
    "num_gpu_blocks_override": Foreign(same_as="num_blocks"),
    "num_kvcache_blocks": Foreign((-1,), same_as="num_blocks"),
    "kvcache_block_size": Foreign(same_as="block_size"),
    "scheduling_policy": Foreign(same_as="policy"),
    "async_scheduling": Foreign(same_as="overlap"),
    "cuda_graph_sizes": Foreign(same_as="graph_batch_sizes"),
    "cudagraph_capture_sizes": Foreign(same_as="graph_batch_sizes"),
    "tool_call_parser": Foreign(same_as="tool_call_format", as_ours=_formats("tool_call", _CALLS)),
    "reasoning_parser": Foreign(
        same_as="reasoning_format", as_ours=_formats("reasoning", _REASONING)
    ),
    "enforce_eager": Foreign(
        _OFF, "must be True or False", as_ours={True: {"compile": "graph", "graph_batch_sizes": ()}}
    ),
    # Model and tokenizer.
    "trust_remote_code": Foreign(_EITHER, "must be True or False"),  # a permission, never used
    "tokenizer": Foreign((_is_our_model,), _OWN_TOKENIZER),
    "tokenizer_mode": Foreign(
        ("auto", "hf"), "tokenizers are read by transformers: give a folder in Hugging Face's form"
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
    "task": Foreign((_is_path_of_runs,), _ONLY_GENERATION),
    "runner": Foreign((_is_path_of_runs,), _ONLY_GENERATION),
    "convert": Foreign(("auto", "none"), _ONLY_GENERATION),
    "eos": Foreign((-1,), "use SamplingParams(stop_token_ids=[...])"),
    "override_generation_config": Foreign(
        ({},), "use SamplingParams, or generation_config with a folder"
    ),
    "served_model_name": Foreign((_is_our_model,), "use `pagespec serve --served-model-name`"),
    "model_loader_extra_config": Foreign(({},), "leave it out"),
    "max_parallel_loading_workers": Foreign((), "leave it out"),
    "model_weights": Foreign(("", _is_our_model), "use model"),
    "model_class_overrides": Foreign(({},), "models are traced from transformers"),
    "chat_template": Foreign((), "use LLM.chat(chat_template=...)"),
    "ignore_patterns": Foreign(([], ["original/**/*"], "original/**/*"), "leave it out"),
    "pt_load_map_location": Foreign(("cpu",), "use device"),
    "safetensors_load_strategy": Foreign(("lazy", "eager", "prefetch"), "leave it out"),
    "safetensors_prefetch_num_threads": Foreign((_any,)),
    "safetensors_prefetch_block_size": Foreign((_any,)),
    "renderer_num_workers": Foreign((1,), "leave it out"),
    "tokens_only": Foreign(_OFF, "use SamplingParams(detokenize=False)"),
    "device_ids": Foreign((), 'use device="cuda:N"'),
    # Parallel engines.
    "data_parallel_size": Foreign((1,), _REPLICAS),
    "data_parallel_rank": Foreign((0,), _REPLICAS),
    "data_parallel_size_local": Foreign((1,), _REPLICAS),
    "data_parallel_start_rank": Foreign((0,), _REPLICAS),
    "data_parallel_address": Foreign((), _REPLICAS),
    "data_parallel_rpc_port": Foreign((), _REPLICAS),
    "data_parallel_hybrid_lb": Foreign(_OFF, _REPLICAS),
    "data_parallel_external_lb": Foreign(_OFF, _REPLICAS),
    "data_parallel_multi_port_external_lb": Foreign(_OFF, _REPLICAS),
    "_api_process_count": Foreign((1,), _REPLICAS),
    "_api_process_rank": Foreign((0,), _REPLICAS),
    "nnodes": Foreign((1,), _ONE_HOST),
    "node_rank": Foreign((0,), _ONE_HOST),
    "pipeline_parallel_size": Foreign((1,), "use tensor_parallel_size"),
    "context_parallel_size": Foreign((1,), "use tensor_parallel_size"),
    "prefill_context_parallel_size": Foreign((1,), "use tensor_parallel_size"),
    "decode_context_parallel_size": Foreign((1,), "use tensor_parallel_size"),
    "enable_expert_parallel": Foreign(_OFF, "use tensor_parallel_size"),
    "enable_ep_weight_filter": Foreign(_OFF, "use tensor_parallel_size"),
    "enable_elastic_ep": Foreign(_OFF, "use tensor_parallel_size"),
    "enable_eplb": Foreign(_OFF, "use tensor_parallel_size"),
    "enable_dbo": Foreign(_OFF, "leave it out"),
    "distributed_executor_backend": Foreign(("mp", "uni"), _ONE_HOST),
    "worker_cls": Foreign(("auto",), "leave it out"),
    "worker_extension_cls": Foreign(("",), "leave it out"),
    "distributed_timeout_seconds": Foreign((), "leave it out"),
    "cpu_distributed_timeout_seconds": Foreign((), "leave it out"),
    "numa_bind": Foreign(_OFF, "run the command under numactl"),
    "numa_bind_nodes": Foreign(([],), "run the command under numactl"),
    "numa_bind_cpus": Foreign(([],), "run the command under numactl"),
    # Of those above, which refuse to use them.
    "master_addr": Foreign((_any,)),
    "master_port": Foreign((_any,)),
    "data_parallel_backend": Foreign((_any,)),
    "all2all_backend": Foreign((_any,)),
    "dcp_comm_backend": Foreign((_any,)),
    "dcp_kv_cache_interleave_size": Foreign((_any,)),
    "cp_kv_cache_interleave_size": Foreign((_any,)),
    "expert_placement_strategy": Foreign((_any,)),
    "eplb_config": Foreign((_any,)),
    "ubatch_size": Foreign((_any,)),
    "dbo_decode_token_threshold": Foreign((_any,)),
    "dbo_prefill_token_threshold": Foreign((_any,)),
    "disable_nccl_for_dp_synchronization": Foreign((_any,)),
    "disable_custom_all_reduce": Foreign(_OFF, "leave it out"),
    "ray_workers_use_nsight": Foreign(_OFF, "leave it out"),
    # Memory and cache.
    "swap_space": Foreign((0, _any)),  # preempted requests are computed again
    "cpu_offload_gb": Foreign((0,), _NO_OFFLOAD),
    "offload_group_size": Foreign((0,), _NO_OFFLOAD),
    "kv_offloading_size": Foreign((), _NO_OFFLOAD),
    # Of the three above, which refuse to offload anything.
    "offload_backend": Foreign((_any,)),
    "cpu_offload_params": Foreign((_any,)),
    "offload_num_in_group": Foreign((_any,)),
    "offload_prefetch_step": Foreign((_any,)),
    "offload_params": Foreign((_any,)),
    "kv_offloading_backend": Foreign((_any,)),
    "prefix_caching_hash_algo": Foreign(
        ("xxhash", "xxhash_cbor"), "block keys are 128 bits of xxHash: use cache_salt to separate"
    ),
    "prefix_match_unit": Foreign((), "use block_size"),
    "kv_cache_dtype_skip_layers": Foreign(([],), "use kv_cache_dtype"),
    "kv_sharing_fast_prefill": Foreign(_OFF, "leave it out"),
    "disable_hybrid_kv_cache_manager": Foreign(_OFF, "leave it out"),
    "mamba_block_size": Foreign((), _STATE),
    "mamba_cache_mode": Foreign(("none",), _STATE),
    "mamba_cache_dtype": Foreign(("auto",), _STATE),
    "mamba_ssm_cache_dtype": Foreign(("auto",), _STATE),
    "mamba_backend": Foreign(("triton",), "leave it out"),
    "mamba_config": Foreign(({},), "leave it out"),
    "enable_mamba_cache_stochastic_rounding": Foreign(_OFF, "leave it out"),
    "mamba_cache_philox_rounds": Foreign((_any,)),
    "gdn_prefill_backend": Foreign((), "leave it out"),
    "kv_cache_memory_bytes": Foreign((), "use num_blocks or memory_utilization"),
    "preemption_mode": Foreign(("recompute",), "leave it out"),
    "use_v2_block_manager": Foreign((_any,)),
    "disable_sliding_window": Foreign(_OFF, "leave it out"),
    "calculate_kv_scales": Foreign((_any,)),
    "kv_transfer_config": Foreign(({},), "KV caches are not moved: leave it out"),
    "kv_events_config": Foreign(({},), "use trace"),
    "enable_sleep_mode": Foreign(_OFF, "make a new LLM"),
    "enable_cumem_allocator": Foreign(_OFF, "leave it out"),
    "weight_transfer_config": Foreign(({},), "make a new LLM"),
    "ec_transfer_config": Foreign(({},), _NO_IMAGES),
    # Scheduling.
    "enable_chunked_prefill": Foreign(
        (True,),
        "prompts are always cut at max_num_batched_tokens, which changes no answer: leave it out",
    ),
    "max_num_partial_prefills": Foreign((1,), _LONG),
    "max_long_partial_prefills": Foreign((1,), _LONG),
    "long_prefill_token_threshold": Foreign((0,), _LONG),
    "num_scheduler_steps": Foreign((1,), "use overlap"),
    "scheduler_delay_factor": Foreign((0,), "leave it out"),
    "num_lookahead_slots": Foreign((0,), _SPECULATION),
    "max_num_scheduled_tokens": Foreign((), "use max_num_batched_tokens"),
    "scheduler_reserve_full_isl": Foreign((True,), "leave it out"),
    "prefill_schedule_interval": Foreign((1,), _LONG),
    "watermark": Foreign((0.0,), "leave it out"),
    "scheduler_cls": Foreign((), "use policy"),
    "stream_interval": Foreign((1,), "each step is streamed: join the pieces"),
    # Computation.
    "compilation_config": Foreign(({},), _GRAPHS),
    "max_cudagraph_capture_size": Foreign((), "use graph_batch_sizes"),
    "optimization_level": Foreign((2,), "use compile"),
    "performance_mode": Foreign(("balanced",), "leave it out"),
    "disable_cascade_attn": Foreign((True, False), "must be True or False"),
    "override_attention_dtype": Foreign((), "use dtype"),
    "kernel_config": Foreign(({},), "leave it out"),
    "ir_op_priority": Foreign(({},), "leave it out"),
    "linear_backend": Foreign(("auto",), "leave it out"),
    "moe_backend": Foreign(("auto",), _MOE),
    "enable_bf16x3_router_gemm": Foreign(_OFF, _MOE),
    "enable_return_routed_experts": Foreign(_OFF, "leave it out"),
    "enable_flashinfer_autotune": Foreign(_EITHER, "must be True or False"),
    "use_fp64_gumbel": Foreign(_OFF, "leave it out"),
    "quantization_config": Foreign(({},), "use quantization"),
    "allow_deprecated_quantization": Foreign((_any,)),
    "max_seq_len_to_capture": Foreign((_any,)),  # graphs serve every length
    "attention_backend": Foreign(
        ("AUTO",),
        "use attention",
        as_ours={
            "TRITON_ATTN": {"attention": "triton"},
            "FLASH_ATTN": {"attention": "flash"},
        },
    ),
    "attention_config": Foreign(({},), "use attention"),
    "logits_processor_pattern": Foreign((), "use SamplingParams(logits_processors=[...])"),
    "guided_decoding_backend": Foreign(
        ("auto", "guidance"),
        "use structured_outputs_config",
        as_ours={"xgrammar": {"structured_outputs_config": {"backend": "xgrammar"}}},
    ),
    "reasoning_config": Foreign(({},), "use reasoning_format"),
    "reasoning_parser_plugin": Foreign(("",), "use reasoning_format"),
    # Logs.
    "disable_log_stats": Foreign(_EITHER, "must be True or False"),  # counted, and not logged
    "aggregate_engine_logging": Foreign(_OFF, "leave it out"),
    "disable_log_requests": Foreign((True,), "use trace"),
    "enable_log_requests": Foreign(_OFF, "use trace"),
    "use_tqdm_on_load": Foreign((True,), "leave it out"),
    "show_hidden_metrics_for_version": Foreign((), "leave it out"),
    "otlp_traces_endpoint": Foreign((), "use trace"),
    "collect_detailed_traces": Foreign(([],), "use trace"),
    "kv_cache_metrics": Foreign(_OFF, "use LLM.stats()"),
    "kv_cache_metrics_sample": Foreign((_any,)),
    "cudagraph_metrics": Foreign(_OFF, "use LLM.stats()"),
    "enable_mfu_metrics": Foreign(_OFF, "use LLM.stats()"),
    "enable_logging_iteration_details": Foreign(_OFF, "use trace"),
    "enable_layerwise_nvtx_tracing": Foreign(_OFF, "use torch.profiler around the call"),
    "profiler_config": Foreign(({},), "use torch.profiler around the call"),
    "jit_monitor_mode": Foreign(("warn",), "leave it out"),
    "jit_monitor_verbose": Foreign(_OFF, "leave it out"),
    "fail_on_environ_validation": Foreign(_OFF, "no variable VLLM_* is read: leave it out"),
    "shutdown_timeout": Foreign((0,), "use AsyncLLM.shutdown(drain_s)"),
    "additional_config": Foreign(({},), "leave it out"),
    # Speculation.
    "spec_method": Foreign(same_as="speculative_config", key="method"),
    "spec_model": Foreign(same_as="speculative_config", key="model"),
    "spec_tokens": Foreign(same_as="speculative_config", key="num_speculative_tokens"),
    "speculative_model": Foreign((), _SPECULATION),
    "num_speculative_tokens": Foreign((0,), _SPECULATION),
    "diffusion_config": Foreign(({},), "leave it out"),
    # Features that are not supported.
    "pooler_config": Foreign(({},), _NO_POOLING),
    "enable_lora": Foreign(_OFF, _NO_LORA),
    "lora_modules": Foreign(([],), _NO_LORA),
    "enable_prompt_adapter": Foreign(_OFF, _NO_LORA),
    "max_loras": Foreign((_any,)),  # of adapters, which enable_lora refuses
    "max_lora_rank": Foreign((_any,)),
    "max_cpu_loras": Foreign((_any,)),
    "fully_sharded_loras": Foreign((_any,)),
    "lora_dtype": Foreign((_any,)),
    "lora_target_modules": Foreign((_any,)),
    "default_mm_loras": Foreign((_any,)),
    "specialize_active_lora": Foreign((_any,)),
    "enable_tower_connector_lora": Foreign((_any,)),
    "enable_mixed_moe_lora_format": Foreign((_any,)),
    "enable_moe_shared_loras": Foreign((_any,)),
    # An upper limit: prompts with other inputs than text are refused in any case.
    "limit_mm_per_prompt": Foreign((_is_limits,), 'use numbers of 0 or more, {"image": 2}'),
    "mm_processor_kwargs": Foreign(({},), _NO_IMAGES),
    "language_model_only": Foreign((True,), _NO_IMAGES),
    "is_multimodal": Foreign(_OFF, _NO_IMAGES),
    "allowed_local_media_path": Foreign(("",), _NO_IMAGES),
    "allowed_media_domains": Foreign(([],), _NO_IMAGES),
    "enable_prompt_embeds": Foreign(_OFF, _NO_EMBEDDINGS),
    "enable_mm_embeds": Foreign(_OFF, _NO_EMBEDDINGS),
    "mm_encoder_only": Foreign(_OFF, _NO_IMAGES),
    "io_processor_plugin": Foreign(("",), _NO_IMAGES),
    # Of images, which prompts refuse.
    "interleave_mm_strings": Foreign((_any,)),
    "media_io_kwargs": Foreign((_any,)),
    "mm_processor_cache_gb": Foreign((_any,)),
    "mm_processor_cache_type": Foreign((_any,)),
    "mm_shm_cache_max_object_size_mb": Foreign((_any,)),
    "mm_encoder_tp_mode": Foreign((_any,)),
    "mm_encoder_attn_backend": Foreign((_any,)),
    "mm_encoder_attn_dtype": Foreign((_any,)),
    "mm_encoder_fp8_scale_path": Foreign((_any,)),
    "mm_encoder_fp8_scale_save_path": Foreign((_any,)),
    "mm_encoder_fp8_scale_save_margin": Foreign((_any,)),
    "skip_mm_profiling": Foreign((_any,)),
    "video_pruning_rate": Foreign((_any,)),
    "mm_tensor_ipc": Foreign((_any,)),
    "mm_ipc_gpu_memory_gb": Foreign((_any,)),
    "disable_chunked_mm_input": Foreign((_any,)),
    "enable_mm_processor_stats": Foreign((_any,)),
}
"""By name, for ``LLM``, ``AsyncLLM`` and the commands that load a model."""

_SUFFIX_LIMITS = "the limits of method suffix are fixed: leave it out"
_NO_REJECTION = "a draft token is accepted if it equals the sampled token: leave it out"

SPECULATION: dict[str, Foreign] = {
    "tensor_parallel_size": Foreign((), "use draft_tensor_parallel_size"),
    "enforce_eager": Foreign(_OFF, "use enforce_eager of the engine"),
    "max_model_len": Foreign((_any,)),  # answers do not depend on where drafting ends
    "revision": Foreign((), _REVISION),
    "code_revision": Foreign((), _REVISION),
    "kv_cache_dtype": Foreign((), "the drafter has kv_cache_dtype of the engine"),
    "attention_backend": Foreign((), "the drafter has attention of the engine"),
    "moe_backend": Foreign(("auto",), _MOE),
    "draft_load_config": Foreign((), "leave it out"),
    "disable_padded_drafter_batch": Foreign((_any,)),  # tune what is not here
    "use_local_argmax_reduction": Foreign((_any,)),
    "parallel_drafting": Foreign(_OFF, "a model drafts one token after the other"),
    "use_heterogeneous_vocab": Foreign(
        _OFF, "the draft model must have the tokenizer of the model"
    ),
    "num_speculative_tokens_per_batch_size": Foreign(
        (), "numbers of draft tokens follow measured costs: use num_speculative_tokens"
    ),
    "suffix_decoding_max_tree_depth": Foreign((24,), _SUFFIX_LIMITS),
    "suffix_decoding_max_cached_requests": Foreign((10000,), _SUFFIX_LIMITS),
    "suffix_decoding_max_spec_factor": Foreign((1.0,), _SUFFIX_LIMITS),
    "suffix_decoding_min_token_prob": Foreign((0.1,), _SUFFIX_LIMITS),
    "rejection_sample_method": Foreign(("standard",), _NO_REJECTION),
    "synthetic_acceptance_rates": Foreign((), _NO_REJECTION),
    "synthetic_acceptance_length": Foreign((), _NO_REJECTION),
    "draft_sample_method": Foreign(
        ("greedy", "probabilistic"), "must be greedy or probabilistic"
    ),  # answers do not depend on it
}
"""Keys of ``speculative_config``."""

CALL: dict[str, Foreign] = {
    "lora_request": Foreign(([],), _NO_LORA),
    "prompt_text": Foreign((), "give a dict of prompt and prompt_token_ids as the prompt"),
    "trace_headers": Foreign(({},), "use the engine argument trace"),
    "data_parallel_rank": Foreign((0,), _REPLICAS),
    "reasoning_ended": Foreign(_OFF, "use StructuredOutputs and reasoning_format"),
    "reasoning_parser_kwargs": Foreign(({},), "use reasoning_format"),
}
"""Arguments of ``AsyncLLM.generate``."""

ASYNC: dict[str, Foreign] = {
    "start_engine_loop": Foreign((True,), "leave it out"),
    "usage_context": Foreign((_any,)),
    "stat_loggers": Foreign(([],), "use AsyncLLM.observers, or /metrics of `pagespec serve`"),
    "enable_log_requests": Foreign(_OFF, "use trace"),
    "disable_log_stats": Foreign(_EITHER, "must be True or False"),
    "internal": Foreign(_OFF, "give the ids of generate"),
    "clear_cache": Foreign(_EITHER, "must be True or False"),
    "reset_connector": Foreign(_OFF, "KV caches are not moved: leave it out"),
}
"""Arguments of other methods of ``AsyncLLM``."""

_NO_TEMPLATE = "the template of the model is used: give a folder that has another"
_PROXY = "use a proxy that checks clients"
_HEADERS = "a request has at most 64 KiB of headers"
_NO_FINGERPRINT = "system_fingerprint is null"

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
    "response_role": Foreign(("assistant",), "answers are of the assistant"),
    "ssl_ca_certs": Foreign((), _PROXY),
    "ssl_cert_reqs": Foreign((0,), _PROXY),
    "ssl_ciphers": Foreign((), _PROXY),
    "enable_ssl_refresh": Foreign(_OFF, "restart the server, or use a proxy"),
    "h11_max_incomplete_event_size": Foreign((), _HEADERS),
    "h11_max_header_count": Foreign((), _HEADERS),
    "allow_credentials": Foreign(_OFF, "answers do not depend on cookies"),
    "allowed_methods": Foreign((["*"],), "leave it out: --cors-origin allows all"),
    "allowed_headers": Foreign((["*"],), "leave it out: --cors-origin allows all"),
    "enable_prompt_tokens_details": Foreign((_any,)),  # usage always has them
    "enable_per_request_metrics": Foreign(_OFF, "use /metrics"),
    "exclude_tools_when_tool_choice_none": Foreign((True,), "leave it out: they are excluded"),
    "trust_request_chat_template": Foreign(_OFF, _NO_TEMPLATE),
    "default_chat_template_kwargs": Foreign(({},), "use chat_template_kwargs of a request"),
    "tool_parser_plugin": Foreign(("",), "use --tool-call-format"),
    "tool_server": Foreign((), "the client calls the tools"),
    "log_config_file": Foreign((), "use --access-log and --log-json"),
    "log_error_stack": Foreign((_any,)),  # it always is
    "max_log_len": Foreign((_any,)),  # prompts are not logged
    "enable_log_deltas": Foreign((_any,)),  # answers are not logged
    "enable_log_outputs": Foreign(_OFF, "use trace"),
    "disable_access_log_for_endpoints": Foreign((), "use --no-access-log"),
    "fingerprint_mode": Foreign(("none",), _NO_FINGERPRINT),
    "fingerprint_value": Foreign((), _NO_FINGERPRINT),
    "enable_offline_docs": Foreign(_OFF, "/openapi.json describes the API"),
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


def refuse(name: str, value: Any, table: Mapping[str, Foreign], within: str = "") -> None:
    """Accept only a value without effect, for tables in which no row has an argument of ours.

    Args:
        within: the argument whose key ``name`` is.

    Raises:
        InvalidInputError: the value is refused.
    """
    if not table[name].is_harmless(value, {}):
        field = f"{within}.{name}" if within else name
        raise InvalidInputError(field, value, f"is not supported: {table[name].instead}")


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
    if known.key:
        there = others.get(known.same_as) or {}
        if not isinstance(there, Mapping) or there.get(known.key, value) != value:
            whole = f"stands for {known.key} of {known.same_as}; give one of them"
            raise InvalidInputError(name, value, whole)
        return {known.same_as: {**there, known.key: value}}
    for one, ours in known.as_ours.items():
        found = ours if _is_same(value, one) else found
    if found is None:
        raise InvalidInputError(name, value, f"is not supported: {known.instead}")
    for own, new in found.items():
        if own in others and others[own] != new:
            raise InvalidInputError(name, value, f"stands for {own}; give one of them")
    return dict(found)
