"""The engine's arguments: declared once, and validated before a model is loaded."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
from ..params.declare import check_fields, declared, defaults, param
from .drafting.config import SpeculativeConfig, speculative
from .logits_processors import processor_classes
from .policy import MAX_OVERTAKES
from .structured_config import NO_DEFAULTS, StructuredOutputsConfig, structured_config

GENERATION_CONFIGS = ("auto", "vllm")
MAX_BLOCK_SIZE = 4096
MAX_THREADS = 1024  # of a CPU; more than any has
MAX_LOGPROBS = 20  # by default; OpenAI's limit
MAX_RANKS = 64  # GPUs of one host; more than any has
_CPU_BUDGET, _GPU_BUDGET = 2048, 8192  # tokens per step
_MANY_SAMPLES = 256  # per step on a GPU
_CPU_INTER_TOKEN_MS = 500.0
_STATE_INTERVAL = 256  # tokens
_FLOATS = {"half": "float16", "float": "float32"}
_TYPES = choice("auto", "float32", "bfloat16", "float16", aliases=_FLOATS)


def check_device(name: object) -> None:
    """Raises InvalidInputError if ``name`` is not a device name. The device need not exist."""
    device_name("device", name)


def check_sizes(
    max_num_seqs: int, max_num_batched_tokens: int | None, num_state_slots: int | None
) -> None:
    """Raises InvalidInputError if a step could lack a token or a state for a running request."""
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
    """Check a model given as a path, a hub id, or a model in memory."""
    # If a model in memory is given, its class is imported already; a path needs no such import.
    module = sys.modules.get("transformers.modeling_utils")
    is_module = module is not None and isinstance(model, module.PreTrainedModel)
    if not is_module and path_of(model) is None:
        limit = "must be a folder, a hub id, a .gguf file or a transformers model"
        raise InvalidInputError(name, model, limit)
    return model


def _dtype(name: str, value: Any) -> str:
    # torch is not imported here; its types print as torch.float16.
    text = value if isinstance(value, str) else str(value)
    known = text.removeprefix("torch.")
    try:
        return _TYPES(name, known if known != text or text is value else value)
    except InvalidInputError as error:
        raise InvalidInputError(name, value, error.limit) from None


def _generation_config(name: str, value: Any) -> str:
    given = "vllm" if value == "pagespec" else path_of(value)  # as `sed s/vllm/pagespec/` leaves it
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
        "Type of weights and KV cache: auto, float32, bfloat16 or float16. auto: float32 on a CPU, "
        "the model's own type on a GPU. A model in memory keeps its type.",
        _dtype,
        metavar="TYPE",
    )
    device: str = param(
        "auto", "auto, cpu, cuda or cuda:N. auto: a GPU if there is one.", device_name
    )
    max_model_len: int | None = param(
        None,
        "Maximum number of tokens of a request, prompt plus output. Required for models whose "
        "config has no limit (BLOOM, recurrent models).",
        count(2),
        absent="the model's limit, or what the KV cache holds if that is less",
    )
    max_num_seqs: int = param(
        64,
        "Maximum number of running requests; each of n continuations counts. The default is "
        "lowered to max_num_batched_tokens if that is less.",
        count(),
    )
    max_num_batched_tokens: int | None = param(
        None,
        "Maximum number of tokens computed per step, at least max_num_seqs; longer prompts are "
        "computed in chunks.",
        count(),
        absent="2048; on a GPU 8192",
    )
    max_inter_token_ms: float | None = param(
        None,
        "Target for the duration of a step that computes both a prompt and running answers, in "
        "milliseconds; the prompt is split over more steps to meet it. 0: no target.",
        absent="500 on a CPU, no target on a GPU",
        metavar="MS",
        check=number(0.0, sys.float_info.max, "of 0 (no bound) or more"),
    )
    block_size: int = param(16, "Tokens in a block of the KV cache.", count(1, MAX_BLOCK_SIZE))
    num_blocks: int | None = param(
        None,
        "Number of blocks in the KV cache; memory_utilization then has no effect.",
        count(),
        absent="as many as fit in the memory",
    )
    memory_utilization: float | None = param(
        None,
        "On a GPU: the fraction of GPU memory that may be in use in total, by other processes, "
        "weights, activations, CUDA graphs and KV cache. On a CPU: the fraction of available "
        "memory for the KV cache.",
        number(0.0, 1.0, "above 0 and at most 1", is_above=True),
        absent="0.9; on a CPU 0.5, at most 4 GiB",
    )
    gpu_memory_utilization: float | None = param(
        None, "vLLM's name for memory_utilization.", flag=None
    )
    enable_prefix_caching: bool = param(
        True,
        "Reuse KV blocks of equal prompt prefixes.",
        flag(),
        flag="--enable-prefix-caching/--no-prefix-caching",
    )
    state_interval: int | None = param(
        None,
        "For models with recurrent layers: tokens between state checkpoints, at which prefix-cache "
        "hits can end; a multiple of block_size.",
        count(),
        absent="256, rounded up to whole blocks",
    )
    num_state_slots: int | None = param(
        None,
        "For models with recurrent layers: number of state slots, for running requests and "
        "checkpoints together; more than max_num_seqs.",
        count(),
        absent="2 x max_num_seqs + 1, if they fit",
    )
    compile: str = param(
        "auto",
        "graph: run the captured graph after our passes. inductor: also compile the parts between "
        "matmuls and kernels; on a CPU this needs a C++ compiler. eager: run Hugging Face's module "
        "unchanged. auto: inductor on a GPU, graph on a CPU.",
        choice("auto", "graph", "inductor", "eager"),
        metavar="MODE",
    )
    attention: str = param(
        "auto",
        "Attention implementation: triton, flash (a FlashAttention library) or reference. "
        "auto: chosen for the device.",
        choice("auto", "triton", "flash", "reference"),
    )
    transparent: bool = param(
        True,
        "Make the bits of an answer and its logits independent of other requests. False allows "
        "kernels to be chosen by batch size.",
        flag(),
    )
    overlap: bool | None = param(
        None,
        "Plan and enqueue each step while the previous one computes.",
        flag("must be True, False or None"),
        absent="True on a GPU, False on a CPU",
        flag=None,
    )
    graph_batch_sizes: Sequence[int] | None = param(
        None,
        "Batch sizes of decode steps to capture as CUDA graphs, on a GPU; an empty list: no "
        "graphs.",
        integers,
        absent="sizes up to max_num_seqs",
        flag=None,
    )
    policy: str = param(
        "fcfs",
        "Order of service: fcfs; fair (equal shares among owners: API keys or users of a server, "
        '"owner" of a prompt\'s dict or a line of --input); shortest_first (by prompt length plus '
        'max_tokens); or priority ("priority" of a dict or line; 0 is the most urgent).',
        choice(*MAX_OVERTAKES),
    )
    seed: int = param(
        0,
        "Seed for requests that specify none.",
        integer(-(1 << 63), (1 << 63) - 1, "of 64 bits"),
        flag=None,
    )
    load_format: str = param(
        "auto",
        "auto: read the weights. dummy: random weights, from the config alone.",
        choice("auto", "dummy", aliases={"safetensors": "auto", "hf": "auto"}),
        metavar="FORMAT",
    )
    logprobs_mode: str = param(
        "raw_logprobs",
        "Distribution from which logprobs of sampled tokens are taken. raw_logprobs: the model's. "
        "processed_logprobs: the sampling distribution, after logit edits, temperature, top_k, "
        "top_p and min_p (for greedy requests: temperature 1, all tokens kept). Logprobs of "
        "prompts are always raw.",
        choice("raw_logprobs", "processed_logprobs"),
        flag=None,
    )
    max_logprobs: int = param(
        MAX_LOGPROBS,
        "Most logprobs or prompt_logprobs of a request; -1: as many as the vocabulary has. Each "
        "takes 8 bytes of host memory per token that has them.",
        integer(-1, math.inf, "of 0 or more, or -1"),
        stage="serve",
    )
    tensor_parallel_size: int = param(
        1,
        "Tensor parallelism: number of processes on this host that share the model, with one GPU "
        "each. This process is rank 0 and starts the others.",
        count(1, MAX_RANKS),
    )
    quantization: str | None = param(
        None,
        "On a CPU or a Hopper GPU. gguf: keep the 4-bit and 8-bit weights of a .gguf file "
        "quantised. fp8: convert linear layers to e4m3 with 128 x 128 blocks at load time. "
        "Logits are close to those of the unquantised model, not equal (docs/quantization.md).",
        choice("gguf", "fp8"),
        absent="the checkpoint's quantization; a .gguf file is expanded to float32",
    )
    kv_cache_dtype: str = param(
        "auto",
        "auto: the model's type. fp8: keys and values in e4m3 with a scale per token and head, "
        "which uses a quarter of float32's memory, half of bfloat16's. A GPU needs compute "
        "capability 8.9.",
        choice("auto", "fp8", aliases={"fp8_e4m3": "fp8"}),
        metavar="TYPE",
    )
    mla_latent_cache: bool = param(
        True,
        "For models with multi-head latent attention: cache each token's latent vector instead of "
        "the keys and values of all heads (docs/attention.md).",
        flag(),
    )
    generation_config: str | os.PathLike[str] = param(  # noqa: RUF009
        "auto",
        "Source of the defaults of temperature, top_p, top_k, min_p, repetition_penalty and "
        "max_tokens. auto: the model's generation config. vllm: none. Or a folder with a "
        "generation_config.json; a server then also limits max_tokens to its max_new_tokens.",
        _generation_config,
    )
    threads: int | None = param(
        None,
        "Number of CPU threads for computation (docs/linear.md). Answers do not depend on it.",
        count(1, MAX_THREADS),
        absent="the fastest number, measured at start and while serving",
    )
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = param(  # noqa: RUF009
        None,
        'Draft tokens: a dict or JSON text such as {"method": "ngram"}. Keys: method '
        "(ngram, suffix, prediction, draft_model, mtp or eagle3), num_speculative_tokens "
        "(1 to 16), model (of draft_model and eagle3), quantization (fp8: the weights of the "
        "drafter's model), prompt_lookup_max (4) and prompt_lookup_min (2). "
        "Answers do not depend on it (docs/speculation.md).",
        speculative,
        absent="no draft tokens",
        metavar="JSON",
    )
    structured_outputs_config: StructuredOutputsConfig | Mapping[str, Any] | str | None = param(  # noqa: RUF009
        None,
        "Defaults of constraints: a dict or JSON text. Keys: backend (auto, guidance or xgrammar), "
        "disable_any_whitespace and disable_additional_properties (docs/structured_output.md).",
        structured_config,
        absent="backend auto; as each request says",
        metavar="JSON",
        stage="serve",
    )
    logits_processors: Sequence[Any] = param(
        (),
        "Subclasses of LogitsProcessor, or their names module:Class, that edit the logits of "
        "requests, as in vLLM (docs/sampling_parameters.md).",
        processor_classes,
        flag=None,
        stage="serve",
    )
    skip_tokenizer_init: bool = param(
        False,
        "Work without the model's tokenizer: prompts are token ids, and answers have no text.",
        flag(),
        flag=None,
    )
    tool_call_format: str = param(
        "auto",
        "Syntax of the model's tool calls, such as hermes, mistral or llama3_json (docs/chat.md); "
        "none: do not parse tool calls. auto: detect it from the chat template.",
        stage="serve",
    )
    reasoning_format: str = param(
        "auto",
        "Syntax of the model's reasoning, such as think, deepseek_r1 or harmony (docs/chat.md); "
        "none: do not parse reasoning. auto: detect it from the chat template.",
        stage="serve",
    )
    trace: str | os.PathLike[str] | None = param(  # noqa: RUF009
        None,
        "File to which every plan and result is written, for `pagespec trace check`.",
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
        "Function called when a step is dispatched, with the plan and the logits [num_sampled, "
        "vocab_size]. The next step overwrites the logits: clone them to keep them.",
        function,
        flag=None,
        stage="serve",
    )

    def __post_init__(self) -> None:
        self._join_names()
        check_fields(self)
        if self.quantization is not None:
            self._check_quantization("quantization", self.quantization)
        most = self.max_num_batched_tokens
        if most is not None and most < self.max_num_seqs == defaults(EngineConfig)["max_num_seqs"]:
            object.__setattr__(self, "max_num_seqs", most)
        check_sizes(self.max_num_seqs, self.max_num_batched_tokens, self.num_state_slots)
        if self.state_interval is not None and self.state_interval % self.block_size:
            limit = f"must be a multiple of block_size = {self.block_size}"
            raise InvalidInputError("state_interval", self.state_interval, limit)
        if self.speculation is not None and self.speculation.quantization is not None:
            name = "speculative_config.quantization"
            self._check_quantization(name, self.speculation.quantization)
        if self.logprobs_mode != "raw_logprobs" and not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            limit = f"must be at most {MAX_LOGPROBS} with logprobs_mode = {self.logprobs_mode!r}"
            raise InvalidInputError("max_logprobs", self.max_logprobs, limit)
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

    def _check_quantization(self, field: str, value: str) -> None:
        is_gguf = value == "gguf"
        has_dtype = self.dtype in ("auto", "float32")
        # The device that "auto" stands for is not resolved yet.
        may_have_dtype = has_dtype or self.device != "cpu"
        for name, suits, limit in (
            ("tensor_parallel_size", self.tensor_parallel_size == 1, "is for one process"),
            ("dtype", may_have_dtype, "needs dtype float32, or auto"),
            ("compile", self.compile != "eager", "needs a captured graph, not compile eager"),
            ("load_format", not is_gguf or self.load_format == "auto", "needs weights to read"),
        ):
            if not suits:
                given = f"{limit}; {name} is {getattr(self, name)!r}"
                raise InvalidInputError(field, value, given)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The checked ``speculative_config``."""
        config = self.speculative_config
        assert config is None or isinstance(config, SpeculativeConfig)
        return config

    @property
    def structured(self) -> StructuredOutputsConfig:
        """The checked ``structured_outputs_config``."""
        config = self.structured_outputs_config
        if config is None:
            return NO_DEFAULTS
        assert isinstance(config, StructuredOutputsConfig)
        return config

    def arguments(self) -> dict[str, Any]:
        """All arguments, as keyword arguments of ``LLM``."""
        return {known.name: getattr(self, known.name) for known in fields(EngineConfig)}

    def build_arguments(self) -> dict[str, Any]:
        """The arguments that every rank is built from; serialisable as JSON."""
        stages, drafts = declared(EngineConfig), self.speculation
        found = {k: v for k, v in self.arguments().items() if stages[k].stage == "build"}
        return found | {"speculative_config": drafts and drafts.arguments()}

    @property
    def num_tokens_per_step(self) -> int:
        """The token budget: as given, else 2,048 (or ``max_num_seqs`` if larger)."""
        return self.max_num_batched_tokens or max(_CPU_BUDGET, self.max_num_seqs)

    @property
    def num_samples_per_step(self) -> int:
        """Most samples per step on a GPU: ``max_num_seqs``; with draft tokens one for each of them
        too, up to 256 samples. From there on the duration of a step grows with the samples."""
        num_rows, drafts = self.max_num_seqs, self.speculation
        if drafts is None:
            return num_rows
        num_samples = min(_MANY_SAMPLES, num_rows * (1 + drafts.num_speculative_tokens))
        return max(num_rows, min(num_samples, self.num_tokens_per_step))

    def max_inter_token_s(self, device_type: str) -> float:
        """Target for the duration of a step with both answers and a prompt, in seconds; 0: none.
        As given, else half a second on a CPU."""
        if self.max_inter_token_ms is None:
            return _CPU_INTER_TOKEN_MS / 1000 if device_type == "cpu" else 0.0
        return self.max_inter_token_ms / 1000

    @property
    def num_tokens_per_interval(self) -> int:
        """The interval of recurrent states: as given, else 256 rounded up to whole blocks."""
        blocks = -(-_STATE_INTERVAL // self.block_size) * self.block_size
        return self.state_interval or blocks

    def for_gpu(self) -> EngineConfig:
        """This config with a GPU's defaults: a larger token budget, which keeps a GPU busy."""
        budget = self.max_num_batched_tokens or max(_GPU_BUDGET, self.max_num_seqs)
        return replace(self, max_num_batched_tokens=budget)
