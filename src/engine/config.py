"""The engine's arguments: declared once, validated before a model is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import (
    choice,
    count,
    device_name,
    flag,
    function,
    integer,
    integers,
    number,
    path_of,
    writable_file,
)
from ..params.declare import check_fields, declared, param
from .policy import MAX_OVERTAKES

GENERATION_CONFIGS = ("auto", "vllm")
MAX_BLOCK_SIZE = 4096
MAX_THREADS = 1024  # of a CPU, with room
MAX_RANKS = 64  # GPUs of one host, with room
_CPU_BUDGET, _GPU_BUDGET = 2048, 8192  # tokens per step
_CPU_INTER_TOKEN_MS = 500.0
_STATE_INTERVAL = 256  # tokens
_FLOATS = {"half": "float16", "float": "float32"}


def check_device(name: object) -> None:
    """Raises InvalidInputError if that is no name of a device, whether or not there is one here."""
    device_name("device", name)


def check_sizes(
    max_num_seqs: int, max_num_batched_tokens: int | None, num_state_slots: int | None
) -> None:
    """Raises InvalidInputError if a running request may have no token of a step, or no state."""
    if max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
        limit = (
            f"must be at least max_num_seqs = {max_num_seqs}, "
            "so that every running request can decode one token per step"
        )
        raise InvalidInputError("max_num_batched_tokens", max_num_batched_tokens, limit)
    if num_state_slots is not None and num_state_slots <= max_num_seqs:
        limit = f"must be more than max_num_seqs = {max_num_seqs}"
        raise InvalidInputError("num_state_slots", num_state_slots, limit)


def check_model(name: str, model: Any) -> Any:
    """A path, a name, or a model in memory."""
    # A model in memory has had its class imported; a path must not wait for that import.
    module = sys.modules.get("transformers.modeling_utils")
    is_module = module is not None and isinstance(model, module.PreTrainedModel)
    if not is_module and path_of(model) is None:
        limit = "must be a folder, a hub id, a .gguf file or a transformers model"
        raise InvalidInputError(name, model, limit)
    return model


def _generation_config(name: str, value: Any) -> str:
    given = path_of(value)
    if given not in GENERATION_CONFIGS and not (
        given and os.path.isfile(os.path.join(given, "generation_config.json"))
    ):
        limit = "must be auto, vllm or a folder with a generation_config.json"
        raise InvalidInputError(name, value, limit)
    assert given is not None
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The keyword arguments of ``LLM``, validated.

    Raises:
        InvalidInputError: an argument is outside its limits.
    """

    dtype: str = param(
        "auto",
        "Type of weights and cache: auto, float32, bfloat16 or float16. auto: float32 on a CPU, "
        "the model's own on a GPU. A model in memory keeps its own.",
        choice("auto", "float32", "bfloat16", "float16", aliases=_FLOATS),
        metavar="TYPE",
    )
    device: str = param(
        "auto", "auto, cpu, cuda or cuda:N. auto: a GPU if there is one.", device_name
    )
    max_model_len: int | None = param(
        None,
        "Most tokens of prompt plus output that a request may have. A model whose config names no "
        "limit (BLOOM, recurrent ones) needs it.",
        count(2),
        absent="the model's limit, or what the KV cache holds if that is less",
    )
    max_num_seqs: int = param(
        64, "Most requests running at a time; each of n continuations is one.", count()
    )
    max_num_batched_tokens: int | None = param(
        None,
        "Most tokens computed in one step, at least max_num_seqs; longer prompts are computed in "
        "chunks.",
        count(),
        absent="2048; on a GPU 8192",
    )
    max_inter_token_ms: float | None = param(
        None,
        "Longest that a step should take which computes a prompt beside running answers, in "
        "milliseconds: the prompt is cut into as many steps as that takes. 0: no bound.",
        absent="500 on a CPU, no bound on a GPU",
        metavar="MS",
        check=number(0.0, sys.float_info.max, "of 0 (no bound) or more"),
    )
    block_size: int = param(16, "Tokens in a block of the KV cache.", count(1, MAX_BLOCK_SIZE))
    num_blocks: int | None = param(
        None,
        "Blocks in the KV cache, instead of memory_utilization.",
        count(),
        absent="from the memory",
    )
    memory_utilization: float | None = param(
        None,
        "On a GPU, share of its memory that may be in use in all: by other processes, weights, "
        "steps, graphs and KV cache. On a CPU, share of the available memory for the KV cache.",
        number(0.0, 1.0, "above 0 and at most 1", is_above=True),
        absent="0.9; on a CPU half, at most 4 GiB",
    )
    gpu_memory_utilization: float | None = param(
        None, "vLLM's name of memory_utilization.", flag=None
    )
    enable_prefix_caching: bool = param(
        True,
        "Reuse KV blocks of equal prompt prefixes.",
        flag(),
        flag="--enable-prefix-caching/--no-prefix-caching",
    )
    state_interval: int | None = param(
        None,
        "Of models with recurrent layers: tokens between the checkpoints of states that prefix "
        "hits begin at; a multiple of block_size.",
        count(),
        absent="256, in whole blocks",
    )
    num_state_slots: int | None = param(
        None,
        "Of models with recurrent layers: states held at a time, of running requests and "
        "checkpoints; more than max_num_seqs.",
        count(),
        absent="2 x max_num_seqs + 1, if they fit",
    )
    compile: str = param(
        "auto",
        "graph: run the captured graph after our passes. inductor: compile what lies between its "
        "matmuls and kernels; on a CPU that needs a C++ compiler. eager: the module as Hugging "
        "Face wrote it. auto: inductor on a GPU, graph on a CPU.",
        choice("auto", "graph", "inductor", "eager"),
        metavar="MODE",
    )
    attention: str = param(
        "auto",
        "Implementation of attention: triton, flash (a FlashAttention library) or reference. "
        "auto: what suits the device.",
        choice("auto", "triton", "flash", "reference"),
    )
    transparent: bool = param(
        True,
        "The bits of an answer and its logits do not depend on what else runs. False allows "
        "kernels to be chosen by batch size.",
        flag(),
    )
    overlap: bool | None = param(
        None,
        "Plan and queue a step while the one before computes.",
        flag("must be True, False or None"),
        absent="on a GPU",
        flag=None,
    )
    graph_batch_sizes: Sequence[int] | None = param(
        None,
        "Batch sizes of decode steps to capture as CUDA graphs, on a GPU; an empty list: no "
        "graphs.",
        integers,
        absent="a list up to max_num_seqs",
        flag=None,
    )
    policy: str = param(
        "fcfs",
        "Order of service: fcfs; fair (equal shares among owners: API keys or users of a server, "
        '"owner" of a prompt\'s dict or a line of --input); shortest_first, which counts prompt '
        'and max_tokens; or priority ("priority" of a dict or line; 0 is the most urgent).',
        choice(*MAX_OVERTAKES),
    )
    seed: int = param(
        0,
        "Seed of the requests that bring none of their own.",
        integer(-(1 << 63), (1 << 63) - 1, "of 64 bits"),
        flag=None,
    )
    load_format: str = param(
        "auto",
        "auto reads the weights; dummy makes random ones from the config alone.",
        choice("auto", "dummy", aliases={"safetensors": "auto", "hf": "auto"}),
        metavar="FORMAT",
    )
    logprobs_mode: str = param(
        "raw_logprobs",
        "Which distribution logprobs of sampled tokens are taken from: raw_logprobs, the model's; "
        "processed_logprobs, the one sampled from, after edits, temperature, top_k, top_p and "
        "min_p (of a greedy request at temperature 1, all kept). Those of prompts are raw.",
        choice("raw_logprobs", "processed_logprobs"),
        flag=None,
    )
    tensor_parallel_size: int = param(
        1,
        "Processes that share the model on one host, on a GPU each: tensor parallelism. This "
        "process is the first and starts the others.",
        count(1, MAX_RANKS),
    )
    quantization: str | None = param(
        None,
        "On a CPU or a Hopper GPU. gguf: keep the weights that a .gguf file holds quantised in 4 "
        "or 8 bits. fp8: make linear layers e4m3 in blocks of 128 x 128 as they are loaded. "
        "Logits are near those of the plain model, not equal (docs/quantization.md).",
        choice("gguf", "fp8"),
        absent="what the checkpoint says; a .gguf file is expanded to float32",
    )
    kv_cache_dtype: str = param(
        "auto",
        "auto: the model's type. fp8: keys and values in e4m3, with a scale per token and head: "
        "a quarter of float32's memory, half of bfloat16's. A GPU needs compute capability 8.9.",
        choice("auto", "fp8", aliases={"fp8_e4m3": "fp8"}),
        metavar="TYPE",
    )
    mla_latent_cache: bool = param(
        True,
        "Of models with multi-head latent attention, cache a token's latent vector in place of "
        "every head's key and value (docs/attention.md).",
        flag(),
    )
    generation_config: str | os.PathLike[str] = param(  # noqa: RUF009
        "auto",
        "Where the defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens "
        "come from. auto: the model's generation config. vllm: none. Or a folder with a "
        "generation_config.json; a server also limits max_tokens to its max_new_tokens.",
        _generation_config,
    )
    threads: int | None = param(
        None,
        "Threads that this engine computes with on a CPU (docs/linear.md). No answer depends on "
        "the number.",
        count(1, MAX_THREADS),
        absent="the quickest number, measured at start and while serving",
    )
    tool_call_format: str = param(
        "auto",
        "How the model writes tool calls, as hermes, mistral or llama3_json (docs/chat.md); none "
        "reads no calls. auto: as its chat template shows.",
        stage="serve",
    )
    reasoning_format: str = param(
        "auto",
        "How the model writes reasoning, as think, deepseek_r1 or harmony (docs/chat.md); none "
        "reads none. auto: as its chat template shows.",
        stage="serve",
    )
    trace: str | os.PathLike[str] | None = param(  # noqa: RUF009
        None,
        "File to write every plan and result to, for `pagespec trace check`.",
        writable_file,
        absent="no trace",
        metavar="FILE",
        stage="serve",
    )
    check_invariants: bool = param(
        False,
        "Check the scheduler's structural properties after every step (slow).",
        flag(),
        flag=None,
        stage="serve",
    )
    on_logits: Callable[..., None] | None = param(  # noqa: RUF009
        None,
        "Called when a step is dispatched, with its plan and its logits [num_sampled, vocab_size]. "
        "The next step overwrites them: clone what is to be kept.",
        function,
        flag=None,
        stage="serve",
    )

    def __post_init__(self) -> None:
        self._join_names()
        check_fields(self)
        if self.quantization is not None:
            self._check_quantization()
        if self.num_blocks is not None and self.memory_utilization is not None:
            limit = "give it or num_blocks, not both"
            raise InvalidInputError("memory_utilization", self.memory_utilization, limit)
        check_sizes(self.max_num_seqs, self.max_num_batched_tokens, self.num_state_slots)
        if self.state_interval is not None and self.state_interval % self.block_size:
            limit = f"must be a multiple of block_size = {self.block_size}"
            raise InvalidInputError("state_interval", self.state_interval, limit)
        for size in self.graph_batch_sizes or ():
            count(1, self.max_num_seqs)("graph_batch_sizes", size)

    def _join_names(self) -> None:
        given = self.gpu_memory_utilization
        if given is not None:
            if self.memory_utilization is not None:
                limit = "is another name of memory_utilization; give one of them"
                raise InvalidInputError("gpu_memory_utilization", given, limit)
            object.__setattr__(self, "memory_utilization", given)
            object.__setattr__(self, "gpu_memory_utilization", None)

    def _check_quantization(self) -> None:
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

    def arguments(self) -> dict[str, Any]:
        """All of them, as keyword arguments of ``LLM``."""
        return {known.name: getattr(self, known.name) for known in fields(EngineConfig)}

    def build_arguments(self) -> dict[str, Any]:
        """The arguments that every rank is built from; JSON can hold them."""
        stages = declared(EngineConfig)
        return {k: v for k, v in self.arguments().items() if stages[k].stage == "build"}

    @property
    def num_tokens_per_step(self) -> int:
        """The token budget: as given, or 2,048 (more if ``max_num_seqs`` is more)."""
        return self.max_num_batched_tokens or max(_CPU_BUDGET, self.max_num_seqs)

    def max_inter_token_s(self, device_type: str) -> float:
        """Longest that a step should take which has answers beside a prompt, in seconds; 0: no
        bound. As given, or on a CPU half a second."""
        if self.max_inter_token_ms is None:
            return _CPU_INTER_TOKEN_MS / 1000 if device_type == "cpu" else 0.0
        return self.max_inter_token_ms / 1000

    @property
    def num_tokens_per_interval(self) -> int:
        """The interval of recurrent states: as given, or 256 rounded up to whole blocks."""
        blocks = -(-_STATE_INTERVAL // self.block_size) * self.block_size
        return self.state_interval or blocks

    def for_gpu(self) -> EngineConfig:
        """This config with the defaults of a GPU: it takes more tokens to keep one busy."""
        budget = self.max_num_batched_tokens or max(_GPU_BUDGET, self.max_num_seqs)
        return replace(self, max_num_batched_tokens=budget)
