"""Builds an engine's runner: loads the model, probes it, captures its graph, sizes the KV cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .compile.captured_model import CapturedModel, capture_model
from .compile.load.default_sampling import (
    default_sampling,
    ignored_settings,
    read_generation_config,
    report_sampling,
)
from .compile.load.source import ModelSource, find_source
from .compile.model.loaded import WHOLE, LoadedModel, Shard
from .compile.start_record import StartRecord, may_restore
from .disk_cache import cache_root
from .engine.config import GENERATION_CONFIGS, EngineConfig, check_device
from .engine.stats import Clock, EngineStats
from .errors import InvalidInputError
from .kernels.attention.backend import select_backend
from .kernels.collectives.communicator import Communicator, LoneRank, communicator_scope
from .kernels.linear.cublas import without_split_k
from .runner.cpu_runner import OnLogits
from .runner.cpu_startup import make_cpu_runner
from .runner.cpu_threads import StepThreads, step_threads
from .runner.host_memory import available_bytes
from .runner.staging_runner import TimedRunner
from .start_report import cache_text, library_text, quantization_text
from .startup import gc_paused
from .structured.grammars import Grammars

# What comes with Dynamo or with transformers' modeling code is imported where it is needed: a start
# that restores a model needs neither.
if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from .compile.capture.graph_cache import GraphCache
    from .kernels.attention.spec import AttentionSpec
    from .runner.gpu_runner import GpuRunner

logger = logging.getLogger("pagespec")

_PACKING_PART = 4


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What an ``LLM`` needs to know; ``config`` has the defaults of the device filled in.
    ``num_state_slots``, ``state_interval``: 0 of a model without recurrent layers.
    ``can_score``: whether its runner gives log-probabilities of prompts. ``grammars``: of the
    runner. ``default_sampling``: what its generation config asks for."""

    runner: TimedRunner
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    num_blocks: int
    device: torch.device
    config: EngineConfig
    stats: EngineStats
    num_state_slots: int = 0
    state_interval: int = 0
    can_score: bool = True
    grammars: Grammars | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)


def build(
    model: str | os.PathLike[str] | PreTrainedModel,
    config: EngineConfig,
    on_logits: Callable[..., None] | None = None,
    shard: Shard = WHOLE,
    communicator: Communicator | None = None,
) -> BuiltEngine:
    """Load ``model`` and make its runner.

    Args:
        shard: the part of the model that is for this process; the ranks of a group build together.
        communicator: of this process, if it is one of several.

    Raises:
        InvalidInputError: a setting does not suit the model or the machine.
        UnsupportedModelError: the probe refuses the model.
    """
    device = resolve_device(config.device)
    matmul_plan_dir: Path | None = cache_root() / "linear"
    reading = None
    threads: StepThreads | None = None
    if device.type == "cpu":
        threads = step_threads(
            config.threads, num_ranks=shard.num_ranks, is_eager=config.compile == "eager"
        )
        threads.apply()
    if device.type == "cuda":
        # Triton, which it needs, is only there on machines with a GPU.
        from .kernels.jit.cache_keys import read_triton_early

        reading = read_triton_early()
        config = config.for_gpu()
        # In a process that has used the GPU, products may have been computed already, and the
        # library keeps the settings it had then: what other processes found need not hold.
        if torch.cuda.is_initialized():
            matmul_plan_dir = None
    generation_config = None
    if config.generation_config not in GENERATION_CONFIGS:
        generation_config = read_generation_config(str(config.generation_config))
    stats = EngineStats()
    clock = Clock(stats.startup_s)
    with clock("load"):
        source = find_source(model) if isinstance(model, (str, os.PathLike)) else None
        with gc_paused():
            record = _start_record(source, config, device, shard)
            restored = record.restore() if record is not None and may_restore() else None
        given: Any = source or model
        loaded = _load(given, config, device, shard) if restored is None else restored.loaded
    limit = loaded.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidInputError(
            "max_model_len", config.max_model_len, f"the model's own limit is {limit}"
        )
    # What a rank finds out by itself needs none of the others.
    alone = LoneRank(shard.rank, shard.num_ranks)
    with clock("probe"), gc_paused(), communicator_scope(alone):
        specs = _probe(loaded) if restored is None else restored.specs
    _check_recurrent(loaded, shard)
    attention = select_backend(
        config.attention,
        device=device,
        dtype=loaded.dtype,
        specs=specs,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    logger.info(attention.reason)
    stats.attention, stats.attention_reason = attention.name, attention.reason
    compile = config.compile
    if compile == "auto":
        compile = "inductor" if device.type == "cuda" else "graph"
    is_pinned = device.type == "cuda" and config.transparent
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(current)
        if is_pinned:
            stack.enter_context(without_split_k())
        before_trace = None
        if device.type == "cuda":
            from .kernels.jit.compile_pool import compilers
            from .kernels.jit.parallel_build import pin_triton_cache_dir

            pin_triton_cache_dir()
            # A model that was never traced here has no kernels here, either.
            before_trace = stack.enter_context(compilers()).start
        with clock("capture"), gc_paused(), communicator_scope(alone):
            graph_cache = _graph_cache(model, before_trace) if restored is None else None
            # Before weights that are held quantised are given back.
            described = None
            if record is not None and graph_cache is not None:
                described = record.describe(loaded, specs)
            captured = capture_model(
                loaded,
                specs,
                compile=compile,
                transparent=config.transparent,
                attention=attention,
                packing_bytes=_packing_bytes(model, device) // shard.num_ranks,
                matmul_plan_dir=matmul_plan_dir,
                threads=() if threads is None else threads.numbers,
                graph_cache=graph_cache,
                traced=None if restored is None else restored.traced,
                communicator=communicator,
                is_native=_is_native(config, device),
                # No kernel of a GPU reads latent vectors in e4m3.
                mla_latent_cache=config.mla_latent_cache
                and (device.type == "cpu" or config.kv_cache_dtype == "auto"),
            )
            if record is not None and graph_cache is not None:
                record.write(described, graph_cache.key)
        stats.startup_s["compile"] = captured.compile_s
        stats.startup_s["capture"] -= captured.compile_s
        stats.num_captures = captured.num_captures
        stats.num_compilations = captured.num_compiled
        if captured.weight_formats:
            stats.quantization = loaded.quantization or config.quantization
            stats.weight_formats = captured.weight_formats
            stats.float32_matrices = captured.float32_matrices
            logger.info("quantization: %s", quantization_text(captured, stats.quantization))
        if captured.library_matmuls:
            stats.library_matmuls = captured.library_matmuls
            logger.warning("%s", library_text(loaded.architecture, captured.library_matmuls))
        if reading is not None:
            reading.join()
        if threads is not None:
            made: Any = make_cpu_runner(config, captured, clock, on_logits, threads)
        else:
            made = _make_gpu_runner(config, captured, stats, clock, on_logits)
        runner, max_model_len = made
    logger.info(
        "%s on %s: %d KV blocks of %d tokens%s, %d tokens a request at most",
        loaded.architecture,
        device,
        runner.num_blocks,
        config.block_size,
        cache_text(config, captured),
        max_model_len,
    )
    return BuiltEngine(
        runner=runner,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        num_blocks=runner.num_blocks,
        device=device,
        config=config,
        stats=stats,
        num_state_slots=runner.num_state_slots,
        state_interval=runner.state_interval,
        can_score=captured.head is not None,
        grammars=runner.grammars if shard.num_ranks == 1 else None,
        default_sampling=_default_sampling(loaded, config, generation_config, shard),
    )


def _make_gpu_runner(
    config: EngineConfig,
    captured: CapturedModel,
    stats: EngineStats,
    clock: Clock,
    on_logits: OnLogits | None,
) -> tuple[GpuRunner, int]:
    # Its kernels need Triton, which is not there on every machine.
    from .runner.gpu_startup import make_gpu_runner

    return make_gpu_runner(config, captured, stats, clock, on_logits)


def resolve_device(name: str) -> torch.device:
    """Raises InvalidInputError if there is no such device here."""
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidInputError("device", name, f"{torch.cuda.device_count()} GPUs are visible")
    return torch.device(kind, int(index)) if index else torch.device(kind)


def _load(
    model: ModelSource | PreTrainedModel, config: EngineConfig, device: torch.device, shard: Shard
) -> LoadedModel:
    with gc_paused():
        from .compile.load.load import load_model

    return load_model(
        model,
        dtype=config.dtype,
        device=device,
        load_format=config.load_format,
        quantization=config.quantization,
        max_model_len=config.max_model_len,
        shard=shard,
    )


def _default_sampling(
    loaded: LoadedModel, config: EngineConfig, given: GenerationConfig | None, shard: Shard
) -> dict[str, Any]:
    """What requests get by the chosen generation config, which rank 0 reports.

    Args:
        given: the config of a folder; None: the model's own, or none.
    """
    if config.generation_config == "vllm":
        return {}
    found, ignored = loaded.default_sampling, loaded.ignored_settings
    if given is not None:
        found = default_sampling(given)
        ignored = ignored_settings(given, loaded.max_position_embeddings)
    if shard.rank == 0:
        is_own = given is None
        report_sampling("the model" if is_own else str(config.generation_config), found, ignored)
    return found


def _probe(loaded: LoadedModel) -> list[AttentionSpec]:
    from .compile.probe.probe import probe_model

    return probe_model(loaded)


def _check_recurrent(loaded: LoadedModel, shard: Shard) -> None:
    if loaded.recurrent and shard.num_ranks > 1:
        limit = "must be 1: recurrent layers are not shared by ranks"
        raise InvalidInputError("tensor_parallel_size", shard.num_ranks, limit)


def _start_record(
    source: ModelSource | None, config: EngineConfig, device: torch.device, shard: Shard
) -> StartRecord | None:
    """For a whole model from local files, whose graph is traced. On a CPU only: restored starts
    have not been tried on a GPU."""
    if source is None or shard.num_ranks > 1 or not os.path.isdir(source.files):
        return None
    if device.type != "cpu":
        return None
    if config.load_format != "auto" or config.compile == "eager":
        return None
    root = cache_root()
    return StartRecord(
        root / "starts",
        root / "graphs",
        source,
        dtype=config.dtype,
        quantization=config.quantization,
        device=device,
        is_compiled=config.compile == "inductor",
    )


def _packing_bytes(model: object, device: torch.device) -> int:
    """For copies of weights that nothing else can change: not of a module the caller holds."""
    if device.type != "cpu" or not isinstance(model, (str, os.PathLike)):
        return 0
    return available_bytes() // _PACKING_PART


def _graph_cache(model: object, before_trace: Callable[[], None] | None) -> GraphCache | None:
    """For models that nothing else can change: a module the caller holds may compute anything."""
    if not isinstance(model, (str, os.PathLike)):
        return None
    from .compile.capture.graph_cache import GraphCache

    return GraphCache(cache_root() / "graphs", before_trace)


def _is_native(config: EngineConfig, device: torch.device) -> bool:
    is_gguf = config.quantization == "gguf" and device.type == "cpu"
    return is_gguf and config.kv_cache_dtype == "auto"
