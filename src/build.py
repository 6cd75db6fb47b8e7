"""Builds an engine's runner: loads the model, probes it, captures its graph, sizes the KV cache.
Differences between devices are in :class:`.runner.platform.Platform`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from .compile.captured_model import CapturedModel, CaptureOptions, capture_model
from .compile.load.generation_config import chosen_sampling, read_generation_config
from .compile.load.source import find_source
from .compile.model.loaded import WHOLE, LoadedModel, Shard
from .compile.start_record import may_restore
from .compile.step_fields import step_fields
from .disk_cache import cache_root
from .engine.config import GENERATION_CONFIGS, EngineConfig
from .engine.drafting.costs import DEFAULT_COSTS, StepCosts
from .engine.outputs import EngineStats
from .errors import InvalidInputError
from .kernels.attention.attention_spec import AttentionSpec
from .kernels.attention.backend import select_backend
from .kernels.collectives.communicator import Communicator, LoneRank, communicator_scope
from .runner.bases import TimedRunner
from .runner.platform import find_platform
from .startup import gc_paused, is_watched
from .structured.grammars import Grammars

# Modules that load Dynamo or transformers' modeling code are imported on use: a start that restores
# a model from the disk cache needs neither.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .compile.captured_drafter import CapturedDrafter
    from .runner.bases import Platform

logger = logging.getLogger("pagespec")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of an ``LLM``.

    Attributes:
        config: the engine's arguments, with the defaults of the device filled in.
        dtype: of the weights.
        num_state_slots, state_interval: 0 for a model without recurrent layers.
        can_score: whether the runner computes log-probabilities of prompts.
        grammars: the runner's compiled constraints; None with several ranks.
        default_sampling: sampling defaults from the generation config.
        step_costs: durations of steps, measured only for draft tokens.
    """

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
    step_costs: StepCosts = DEFAULT_COSTS
    dtype: torch.dtype | None = None


def build(
    model: str | os.PathLike[str] | PreTrainedModel,
    config: EngineConfig,
    on_logits: Callable[..., None] | None = None,
    shard: Shard = WHOLE,
    communicator: Communicator | None = None,
) -> BuiltEngine:
    """Load ``model`` and make its runner.

    Args:
        on_logits: see :class:`.engine.config.EngineConfig`.
        shard: the part of the model that this process computes. All ranks of a group build at the
            same time.
        communicator: this rank's communicator, if there are several ranks.

    Raises:
        InvalidInputError: a setting does not fit the model or the machine.
        UnsupportedModelError: the probe refuses the model.
    """
    platform = find_platform(config, shard)
    config, device = platform.config, platform.device
    generation_config = None
    if config.generation_config not in GENERATION_CONFIGS:
        generation_config = read_generation_config(str(config.generation_config))
    stats = EngineStats()
    with stats.timed("load"), _bars_if_watched():
        source = None
        if isinstance(model, (str, os.PathLike)):
            source = find_source(model, check_conversion=_check_conversion_fits)
        with gc_paused():
            # A restored model has no module, of which these drafters use parts.
            record = None if _reads_target(config) else platform.start_record(source)
            restored = record.restore() if record is not None and may_restore() else None
        if restored is not None:
            loaded = restored.loaded
        else:
            with gc_paused():
                from .compile.load.load import load_model
                from .runner.weight_budget import check_weights_fit
            if source is not None and shard.num_ranks == 1:
                check_weights_fit(source, config, [device])
            given: Any = source or model
            loaded = load_model(
                given,
                dtype=config.dtype,
                device=device,
                load_format=config.load_format,
                quantization=config.quantization,
                max_model_len=config.max_model_len,
                shard=shard,
                keeps_head=_drafts_here(config, shard) and _reads_head(config),
            )
    _check_length(loaded, config)
    if config.speculation is not None and _reads_target(config):
        from .compile.load.drafters import target_aux_layers

        method, of_drafter = config.speculation.method, config.speculation.model
        loaded = replace(loaded, aux_layers=target_aux_layers(method, of_drafter, loaded))
    # Probe and capture run on each rank without communication.
    alone = LoneRank(shard.rank, shard.num_ranks)
    with stats.timed("probe"), gc_paused(), communicator_scope(alone):
        if restored is not None:
            specs = restored.specs
        else:
            from .compile.probe.probe import probe_model

            specs = probe_model(loaded)
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
    with platform.building() as before_trace:
        with stats.timed("capture"), gc_paused(), communicator_scope(alone):
            graph_cache = None
            if source and not restored:  # a module passed in memory may compute anything
                from .compile.capture.graph_cache import GraphCache

                graph_cache = GraphCache(cache_root() / "graphs", before_trace)
            # Before the original weights of quantised layers are released.
            described = None
            if record is not None and graph_cache is not None:
                described = record.describe(loaded, specs)
                graph_cache.code = described["code"] if described else None
            if config.skip_tokenizer_init:  # the record is for starts with it, too
                loaded = replace(loaded, tokenizer=None)
            # On a CPU the field is always there: any engine can then verify draft tokens.
            has_drafts = config.speculation is not None or device.type == "cpu"
            fields = step_fields(has_drafts=has_drafts, is_recurrent=bool(loaded.recurrent))
            options = platform.capture_options(attention, is_own=source is not None)
            captured = capture_model(
                loaded,
                specs,
                replace(options, fields=fields),
                graph_cache=graph_cache,
                traced=None if restored is None else restored.traced,
                communicator=communicator,
            )
            if record is not None and graph_cache is not None:
                record.write(described, graph_cache.key)
        _report_capture(stats, captured, config.quantization)
        drafter = None
        if _drafts_here(config, shard):
            with stats.timed("drafter"):
                drafter = make_drafter_model(config, platform, captured, before_trace)
        runner, max_model_len = platform.make_runner(captured, stats, on_logits, drafter)
        step_costs = platform.step_costs(runner, max_model_len)
    logger.info(
        "%s on %s: %d KV blocks of %d tokens%s, at most %d tokens per request",
        loaded.architecture,
        device,
        runner.num_blocks,
        config.block_size,
        _cache_text(config, captured),
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
        default_sampling=chosen_sampling(
            loaded, str(config.generation_config), generation_config, is_reported=shard.rank == 0
        ),
        step_costs=step_costs,
        dtype=loaded.dtype,
    )


def _reads_target(config: EngineConfig) -> bool:
    return config.speculation is not None and config.speculation.reads_target


def _drafts_here(config: EngineConfig, shard: Shard) -> bool:
    """Whether a model on this rank drafts. With several ranks that is rank 0: only rank 0 has the
    plans and the samples of edited rows, and only its results are read."""
    drafts = config.speculation
    return drafts is not None and drafts.has_model and shard.rank == 0


def _reads_head(config: EngineConfig) -> bool:
    from .compile.load.drafters import reads_head

    drafts = config.speculation
    assert drafts is not None
    return reads_head(drafts.method, drafts.model, config.load_format)


def make_drafter_model(
    config: EngineConfig,
    platform: Platform,
    target: CapturedModel,
    before_trace: Callable[[], None] | None = None,
) -> CapturedDrafter:
    """Load and capture the model of ``config.speculation``, whose method has one.

    Args:
        target: captured, with the ``aux_layers`` that the drafter reads. before_trace: called
            before the drafter is traced.

    Raises:
        InvalidInputError: the drafter's files are missing or damaged, or do not fit the target.
        UnsupportedModelError: the probe refuses the drafter.
    """
    from .compile.capture.graph_cache import GraphCache
    from .compile.captured_drafter import capture_drafter
    from .compile.load.drafters import load_drafter
    from .compile.load.quantized_drafter import named_as_drafters
    from .runner.weight_budget import check_drafter_fits

    speculation = config.speculation
    assert speculation is not None
    check_drafter_fits(config, target.loaded)
    own = speculation.quantization is not None
    with named_as_drafters(own):
        drafter = load_drafter(
            speculation.method,
            speculation.model,
            target.loaded,
            dtype=config.dtype,
            load_format=config.load_format,
            max_model_len=config.max_model_len,
            quantization=speculation.quantization,
        )

    def options(specs: Sequence[AttentionSpec]) -> CaptureOptions:
        attention = select_backend(
            config.attention,
            device=platform.device,
            dtype=drafter.loaded.dtype,
            specs=specs,
            block_size=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        return platform.capture_options(attention, is_own=True)

    with named_as_drafters(own):
        captured = capture_drafter(
            drafter,
            options=options,
            kv_cache_dtype=config.kv_cache_dtype,
            graph_cache=GraphCache(cache_root() / "graphs", before_trace),
        )
    formats = captured.captured.weight_formats
    if formats:
        logger.info("drafter: %s", _shown_formats(formats))
    return captured


def _check_conversion_fits(path: Path) -> None:
    from .runner.weight_budget import check_conversion_fits

    check_conversion_fits(path)


@contextmanager
def _bars_if_watched() -> Iterator[None]:
    """No progress bars of transformers in the block where stderr is a file: each refresh would be a
    line of it."""
    bars = transformers.utils.logging
    if is_watched() or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def _check_length(loaded: LoadedModel, config: EngineConfig) -> None:
    limit = loaded.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidInputError(
            "max_model_len", config.max_model_len, f"the model's own limit is {limit}"
        )


def _check_recurrent(loaded: LoadedModel, shard: Shard) -> None:
    if loaded.recurrent and shard.num_ranks > 1:
        limit = "must be 1: recurrent layers are not shared by ranks"
        raise InvalidInputError("tensor_parallel_size", shard.num_ranks, limit)


def _report_capture(stats: EngineStats, captured: CapturedModel, quantization: str | None) -> None:
    """Record the properties of a captured model in the statistics and in the log.

    Args:
        quantization: the engine's setting.
    """
    stats.startup_s["compile"] = captured.compile_s
    stats.startup_s["capture"] -= captured.compile_s
    stats.num_captures = captured.num_captures
    stats.num_compilations = captured.num_compiled
    if captured.weight_formats:
        stats.quantization = captured.loaded.quantization or quantization
        stats.weight_formats = captured.weight_formats
        stats.float32_matrices = captured.float32_matrices
        counts = _shown_formats(captured.weight_formats)
        left = ", ".join(captured.float32_matrices) or "vectors only"
        logger.info("quantization: %s: %s; not quantised are %s", stats.quantization, counts, left)
    if captured.library_matmuls:
        stats.library_matmuls = captured.library_matmuls
        matmuls = captured.library_matmuls.items()
        logger.warning(
            "%s: %s computed by cuBLAS, whose summation order may depend on the number of rows: "
            "outputs may depend on the schedule (docs/transparency.md; check with pagespec verify)",
            captured.loaded.architecture,
            ", ".join(f"{count} {name}" for name, count in matmuls),
        )


def _shown_formats(formats: Mapping[str, int]) -> str:
    return ", ".join(f"{count / 1e6:.1f}M in {name}" for name, count in formats.items())


def _cache_text(config: EngineConfig, captured: CapturedModel) -> str:
    """Description of the KV cache for the log, if it is not plain keys and values."""
    num_latent = sum(spec.is_latent for spec in captured.specs)
    latent = f", latent vectors for {num_latent} of {len(captured.specs)} attention calls"
    fp8 = " in fp8" if config.kv_cache_dtype == "fp8" else ""
    return (latent if num_latent else "") + fp8
