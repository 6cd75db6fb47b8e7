"""Creates the runner on a GPU: profiles memory, sizes the KV cache and captures graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ...compile.captured_drafter import CapturedDrafter
from ...compile.captured_model import CapturedModel
from ...compile.step_inputs import MIN_SIZE
from ...engine.config import EngineConfig
from ...engine.outputs import EngineStats
from ...kernels.jit.compile_pool import current_compilers
from ...kernels.jit.parallel_build import parallel_build
from ...startup import gc_paused
from ..bases import OnLogits, runner_settings
from ..kv_budget import GIB, CacheSize, size_cache
from ..layout import StepShape
from ..memory_profile import oom_as_input_error, profile_memory
from .cuda_graphs import default_buckets, mixed_shapes
from .drafting import MOST_CALLS_PER_SHAPE
from .logprobs import CHUNK_ROWS
from .runner import GpuRunner

logger = logging.getLogger("pagespec")


def make_gpu_runner(
    config: EngineConfig,
    captured: CapturedModel,
    stats: EngineStats,
    on_logits: OnLogits | None,
    drafter: CapturedDrafter | None = None,
) -> tuple[GpuRunner, int]:
    """Build kernels, profile, allocate the KV cache, capture the graphs of decode and mixed steps.

    Args:
        drafter: drafts behind the rows of plans, with caches for the same blocks. Of several ranks
            only the first one has it.

    Returns:
        The runner, and the most tokens per request.

    Raises:
        InvalidInputError: the allowed memory is too small.
    """
    device = captured.loaded.device
    shapes, draft_bytes, graphs_per_step = _shapes(config, captured), 0, 1
    is_captured, communicator = True, captured.communicator
    if drafter is not None:
        draft_bytes = drafter.bytes_per_block(config.block_size)
        graphs_per_step += MOST_CALLS_PER_SHAPE
        is_captured = _can_capture(drafter.captured)
    has_drafter = config.speculation is not None and config.speculation.has_model
    # One rank has the drafter. The others wait here until it is loaded.
    if has_drafter and not communicator.least(int(is_captured)):
        shapes = ()
    has_states = bool(captured.loaded.recurrent)

    def make(size: CacheSize) -> GpuRunner:
        return GpuRunner(
            captured,
            **runner_settings(config, size) | {"max_num_rows": config.num_samples_per_step},
            overlap=config.overlap is not False,
            transparent=config.transparent,
            on_logits=on_logits,
            draft_model=drafter,
            has_draft_fields=has_drafter,
        )

    with stats.timed("kv_cache"), oom_as_input_error(config), gc_paused():
        if communicator.num_ranks > 1:
            communicator.reserve(*_collectives(config, captured))
        longest = config.max_model_len or captured.loaded.max_position_embeddings
        trial = make(CacheSize(MIN_SIZE, int(has_states), longest, 0, 0))
        _build_kernels(trial, device, shapes)
        num_graphs = graphs_per_step * len(shapes)
        profile = profile_memory(
            config, device, trial.run_worst_case, trial.run_prompt_chunk, num_graphs
        )
        del trial
        torch.cuda.empty_cache()
        left = profile.left_for_kv, profile.left_on_device
        size = size_cache(config, captured, *left, "left on the GPU", draft_bytes)
        runner = make(size)
    with stats.timed("graphs"), oom_as_input_error(config), gc_paused():
        before = torch.cuda.mem_get_info(device)[0]
        communicator.connect()
        if shapes:
            runner.capture_graphs(shapes)
        graphs = max(0, before - torch.cuda.mem_get_info(device)[0])
    stats.num_graphs = runner.num_graphs
    stats.memory_bytes = {
        "weights": profile.weights,
        "kv_cache": size.kv_bytes,
        **({"states": size.state_bytes} if has_states else {}),
        "graphs": graphs,
        "activations": profile.activations,
        "budget": profile.budget,
        "total": profile.total,
    }
    logger.info(
        "memory in GiB: %s; %d tokens of KV fit",
        ", ".join(f"{name} {size / GIB:.2f}" for name, size in stats.memory_bytes.items()),
        size.num_blocks * config.block_size,
    )
    return runner, size.max_model_len


def _build_kernels(runner: GpuRunner, device: torch.device, shapes: Sequence[StepShape]) -> None:
    """Compile in parallel the kernels that the largest step and steps of these shapes launch."""
    decode, mixed = (sorted(s for s in shapes if s.is_decode == kind) for kind in (True, False))
    others = current_compilers()
    if others is not None and others.is_running:
        # They compile the first kernels while other missing kernels are found.
        first = [*decode, *mixed]
    else:
        # These steps launch nearly all kernels that compile slowly. Few are then missing in other
        # shapes: a skipped launch takes ten times as long as a real one.
        some = [decode[i * (len(decode) - 1) // 3] for i in range(4) if decode]
        first = [*dict.fromkeys(some), *mixed[:1], *mixed[-1:]]
    with runner.step_context():
        with parallel_build(device) as built:
            runner.run_worst_case()
            for shape in first:
                runner.run_blank(shape)
        if not built.num_compiled or len(first) == len(shapes):
            return  # an equal start has filled the disk cache, for the other shapes as well
        with parallel_build(device):
            for shape in shapes:
                runner.run_blank(shape)


def _collectives(
    config: EngineConfig, captured: CapturedModel
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """(rows, bytes per row) of the largest all-reduce of a step, and of its largest all-gathers."""
    loaded = captured.loaded
    text_config: Any = loaded.config.get_text_config(decoder=True)
    num_rows = max(config.num_samples_per_step, CHUNK_ROWS)
    num_tokens = max(config.num_tokens_per_step, MIN_SIZE)
    itemsize = loaded.dtype.itemsize
    gathers = [(num_rows, 4)]  # sampled tokens
    for module in loaded.module.modules():
        sizes: list[int] | None = getattr(module, "pagespec_sizes", None)
        if sizes is not None:
            gathers.append((num_tokens, max(sizes) * itemsize))
    if loaded.vocab_sizes is not None:
        gathers.append((num_rows, max(loaded.vocab_sizes) * max(itemsize, 4)))
    return (num_tokens, text_config.hidden_size * itemsize), gathers


def _can_capture(captured: CapturedModel) -> bool:
    """The reference of attention waits for the device, and the module itself may wait."""
    attention = captured.attention
    return captured.compile != "eager" and attention is not None and attention.capturable


def _shapes(config: EngineConfig, captured: CapturedModel) -> tuple[StepShape, ...]:
    """The shapes of steps to capture."""
    if not _can_capture(captured):
        return ()
    sizes = config.graph_batch_sizes
    if sizes is None:
        sizes = default_buckets(config.max_num_seqs)
    elif not sizes:
        return ()
    decode = {max(size, MIN_SIZE) for size in sizes}
    num_samples = config.num_samples_per_step
    mixed = mixed_shapes(config.num_tokens_per_step, num_samples)
    if config.speculation is not None:
        mixed += tuple(map(StepShape.verify, default_buckets(num_samples)))
    # Drafters read the hidden states of all tokens.
    has_drafter = config.speculation is not None and config.speculation.has_model
    if not has_drafter and captured.long_function() is not None:
        mixed = tuple(shape.lengthened() for shape in mixed)
    return *map(StepShape.decode, decode), *dict.fromkeys(mixed)
