"""The engine's settings, validated before a model is loaded."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import InvalidInputError
from ..validation import is_int, is_list, is_number, path_of
from .policy import Policy
from .trace import check_trace_path

COMPILE_MODES = ("auto", "graph", "inductor", "eager")
ATTENTION_KERNELS = ("auto", "triton", "flash", "reference")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("gguf", "fp8")
KV_CACHE_DTYPES = ("auto", "fp8")
GENERATION_CONFIGS = ("auto", "vllm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_BLOCK_SIZE = 4096
MAX_THREADS = 1024  # of a CPU, with room
MAX_RANKS = 64  # GPUs of one host, with room
# Block numbers, token indices and context lengths of a step are int32 tensors.
MAX_COUNT = (1 << 31) - 1
# Not more digits than an integer of 32 bits: torch keeps eight bits of an index and drops the rest.
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,9})?")
_CPU_BUDGET, _GPU_BUDGET = 2048, 8192  # tokens per step
_CPU_INTER_TOKEN_MS = 500.0
_STATE_INTERVAL = 256  # tokens


def _check_count(name: str, value: object, low: int = 1, high: int = MAX_COUNT) -> None:
    if not is_int(value) or value < low:
        raise InvalidInputError(name, value, f"must be an integer of {low} or more")
    if value > high:
        raise InvalidInputError(name, value, f"must be at most {high}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidInputError(name, value, f"must be one of {', '.join(choices)}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInputError(name, value, "must be True or False")


def check_device(name: object) -> None:
    """Raises InvalidInputError if that is no name of a device, whether or not there is one here."""
    if not isinstance(name, str) or not _DEVICE.fullmatch(name):
        raise InvalidInputError("device", name, 'must be "auto", "cpu", "cuda" or "cuda:N"')


def check_objects(
    *, model: object, trace: object, check_invariants: object, on_logits: object
) -> None:
    """The arguments of ``LLM`` that are no settings of the engine.

    Raises:
        InvalidInputError: one is of the wrong type, or ``trace`` cannot be written.
    """
    # A model in memory has had its class imported; a path must not wait for that import.
    module = sys.modules.get("transformers.modeling_utils")
    is_module = module is not None and isinstance(model, module.PreTrainedModel)
    if not is_module and path_of(model) is None:
        limit = "must be a folder, a hub id, a .gguf file or a transformers model"
        raise InvalidInputError("model", model, limit)
    if trace is not None:
        check_trace_path(trace)
    _check_bool("check_invariants", check_invariants)
    if on_logits is not None and not callable(on_logits):
        raise InvalidInputError("on_logits", on_logits, "must be a function, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The keyword arguments of ``LLM``, validated. See there for their meaning."""

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_inter_token_ms: float | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    state_interval: int | None = None
    num_state_slots: int | None = None
    compile: str = "auto"
    attention: str = "auto"
    transparent: bool = True
    overlap: bool | None = None
    graph_batch_sizes: Sequence[int] | None = None
    policy: str = "fcfs"
    seed: int = 0
    load_format: str = "auto"
    logprobs_mode: str = "raw_logprobs"
    tensor_parallel_size: int = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    mla_latent_cache: bool = True
    generation_config: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("compile", self.compile, COMPILE_MODES)
        _check_choice("attention", self.attention, ATTENTION_KERNELS)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        check_device(self.device)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            self._check_quantization()
        _check_count("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        if self.max_model_len is not None:
            _check_count("max_model_len", self.max_model_len, 2)
        _check_count("max_num_seqs", self.max_num_seqs)
        _check_count("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        if self.num_blocks is not None:
            _check_count("num_blocks", self.num_blocks)
            if self.memory_utilization is not None:
                raise InvalidInputError(
                    "memory_utilization", self.memory_utilization, "give it or num_blocks, not both"
                )
        if self.max_num_batched_tokens is not None:
            _check_count("max_num_batched_tokens", self.max_num_batched_tokens)
            if self.max_num_batched_tokens < self.max_num_seqs:
                raise InvalidInputError(
                    "max_num_batched_tokens",
                    self.max_num_batched_tokens,
                    f"must be at least max_num_seqs = {self.max_num_seqs}, "
                    "so that every running request can decode one token a step",
                )
        gap = self.max_inter_token_ms
        if gap is not None and (not is_number(gap) or not 0 <= gap < math.inf):
            limit = "must be a number of 0 (no bound) or more"
            raise InvalidInputError("max_inter_token_ms", gap, limit)
        share = self.memory_utilization
        if share is not None and (not is_number(share) or not 0.0 < share <= 1.0):
            limit = "must be a number above 0 and at most 1"
            raise InvalidInputError("memory_utilization", share, limit)
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)
        _check_bool("mla_latent_cache", self.mla_latent_cache)
        if self.threads is not None:
            _check_count("threads", self.threads, 1, MAX_THREADS)
        self._check_states()
        self._check_generation_config()
        _check_bool("transparent", self.transparent)
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise InvalidInputError("overlap", self.overlap, "must be True, False or None")
        if self.graph_batch_sizes is not None:
            sizes = self.graph_batch_sizes
            if not is_list(sizes):
                raise InvalidInputError("graph_batch_sizes", sizes, "must be a list of integers")
            for size in sizes:
                _check_count("graph_batch_sizes", size, 1, self.max_num_seqs)
            object.__setattr__(self, "graph_batch_sizes", tuple(sizes))
        bound = 1 << 63
        if not is_int(self.seed) or not -bound <= self.seed < bound:
            raise InvalidInputError("seed", self.seed, "must be a 64-bit integer")
        Policy(self.policy)

    def _check_states(self) -> None:
        if self.state_interval is not None:
            _check_count("state_interval", self.state_interval)
            if self.state_interval % self.block_size:
                limit = f"must be a multiple of block_size = {self.block_size}"
                raise InvalidInputError("state_interval", self.state_interval, limit)
        if self.num_state_slots is not None:
            _check_count("num_state_slots", self.num_state_slots)
            if self.num_state_slots <= self.max_num_seqs:
                limit = f"must be more than max_num_seqs = {self.max_num_seqs}"
                raise InvalidInputError("num_state_slots", self.num_state_slots, limit)

    def _check_generation_config(self) -> None:
        given = path_of(self.generation_config)
        if given in GENERATION_CONFIGS:
            return
        if not given or not os.path.isfile(os.path.join(given, "generation_config.json")):
            limit = "must be auto, vllm or a folder with a generation_config.json"
            raise InvalidInputError("generation_config", self.generation_config, limit)
        object.__setattr__(self, "generation_config", given)

    def _check_quantization(self) -> None:
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
        is_gguf = self.quantization == "gguf"
        has_dtype = self.dtype in ("auto", "float32")
        # Which device "auto" is, is known later.
        may_have_dtype = has_dtype or self.device != "cpu"
        for name, suits, limit in (
            ("tensor_parallel_size", self.tensor_parallel_size == 1, "is for one process"),
            ("dtype", may_have_dtype, "needs dtype float32, or auto"),
            ("compile", self.compile != "eager", "needs a captured graph, not compile eager"),
            ("load_format", not is_gguf or self.load_format == "auto", "needs weights to read"),
        ):
            if not suits:
                given = f"{limit}; {name} is {getattr(self, name)!r}"
                raise InvalidInputError("quantization", self.quantization, given)

    @property
    def num_tokens_a_step(self) -> int:
        """The token budget: as given, or 2,048 (more if ``max_num_seqs`` is more)."""
        return self.max_num_batched_tokens or max(_CPU_BUDGET, self.max_num_seqs)

    def max_inter_token_s(self, device_type: str) -> float:
        """Longest that a step should take which has answers beside a prompt, in seconds; 0: no
        bound. As given, or on a CPU half a second."""
        if self.max_inter_token_ms is None:
            return _CPU_INTER_TOKEN_MS / 1000 if device_type == "cpu" else 0.0
        return self.max_inter_token_ms / 1000

    @property
    def tokens_an_interval(self) -> int:
        """The interval of recurrent states: as given, or 256 rounded up to whole blocks."""
        blocks = -(-_STATE_INTERVAL // self.block_size) * self.block_size
        return self.state_interval or blocks

    def for_gpu(self) -> EngineConfig:
        """The same with the defaults of a GPU: it takes more tokens to keep one busy."""
        budget = self.max_num_batched_tokens or max(_GPU_BUDGET, self.max_num_seqs)
        return replace(self, max_num_batched_tokens=budget)
