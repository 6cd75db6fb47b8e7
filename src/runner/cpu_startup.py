"""Makes the runner on a CPU: sizes its KV cache from the memory available."""

from __future__ import annotations

from ..compile.captured_model import CapturedModel
from ..engine.config import EngineConfig
from ..engine.stats import Clock, EngineStats
from .cpu_runner import ModelRunner, OnLogits
from .kv_budget import fitting_length, num_cpu_blocks, num_cpu_state_slots


def make_cpu_runner(
    config: EngineConfig,
    captured: CapturedModel,
    _stats: EngineStats,
    clock: Clock,
    on_logits: OnLogits | None,
) -> tuple[ModelRunner, int]:
    limit = config.max_model_len or captured.loaded.max_position_embeddings
    with clock("kv_cache"):
        num_state_slots = num_cpu_state_slots(config, captured)
        num_blocks = captured.communicator.least(
            num_cpu_blocks(config, captured, limit, num_state_slots)
        )
        max_model_len = fitting_length(config, num_blocks, limit)
        runner = ModelRunner(
            captured,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_tokens=config.num_tokens_a_step,
            max_num_rows=config.max_num_seqs,
            max_num_blocks=-(-max_model_len // config.block_size),
            num_state_slots=num_state_slots,
            state_interval=config.tokens_an_interval if num_state_slots else 0,
            kv_cache_dtype=config.kv_cache_dtype,
            overlap=bool(config.overlap),
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
            on_logits=on_logits,
        )
    return runner, max_model_len
