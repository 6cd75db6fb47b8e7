"""From settings to a runner: load, probe, size the KV cache, capture."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pagespec.compile.attention import AttentionSpec
from pagespec.compile.capture import capture_model
from pagespec.compile.load import LoadedModel, load_model
from pagespec.compile.probe import probe_model
from pagespec.compile.runner import ModelRunner, kv_bytes_per_block
from pagespec.engine.config import EngineConfig
from pagespec.errors import InvalidInputError

logger = logging.getLogger("pagespec")

GIB = 1 << 30
_CPU_CACHE_LIMIT_BYTES = 4 * GIB
_GPU_RESERVE_BYTES = 2 * GIB  # activations and the library workspaces of a step


@dataclass(frozen=True, slots=True)
class Built:
    """What an ``LLM`` needs to know of its model."""

    runner: ModelRunner
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    num_blocks: int
    device: str


def build(
    model: str | os.PathLike[str] | PreTrainedModel,
    config: EngineConfig,
    on_logits: Callable[..., None] | None = None,
) -> Built:
    """Load ``model`` and make its runner.

    Raises:
        InvalidInputError: a setting does not suit the model or the machine.
        UnsupportedModelError: the probe refuses the model.
    """
    device = resolve_device(config.device)
    loaded = load_model(model, dtype=config.dtype, device=device, load_format=config.load_format)
    limit = loaded.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidInputError(
            "max_model_len", config.max_model_len, f"the model's own limit is {limit}"
        )
    specs = probe_model(loaded)
    max_model_len = config.max_model_len or limit
    num_blocks = config.num_blocks or _num_blocks_in_memory(config, loaded, specs, max_model_len)
    # The last token of a request is sampled but never fed back, so it needs no slot.
    num_tokens_max = num_blocks * config.block_size + 1
    if max_model_len > num_tokens_max:
        if config.max_model_len is not None:
            raise InvalidInputError(
                "max_model_len",
                max_model_len,
                f"the KV cache of num_blocks = {num_blocks} blocks of {config.block_size} tokens "
                f"holds one request of at most {num_tokens_max} tokens",
            )
        max_model_len = num_tokens_max
    captured = capture_model(loaded, specs, compile=config.compile)
    runner = ModelRunner(
        captured, block_size=config.block_size, num_blocks=num_blocks, on_logits=on_logits
    )
    logger.info(
        "%s on %s: %d KV blocks of %d tokens, %d tokens a request at most",
        loaded.architecture,
        device,
        num_blocks,
        config.block_size,
        max_model_len,
    )
    return Built(
        runner=runner,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        device=str(device),
    )


def resolve_device(name: str) -> torch.device:
    """Raises InvalidInputError if there is no such device here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInputError("device", name, 'must be "auto", "cpu" or "cuda[:N]"') from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidInputError("device", name, 'must be "auto", "cpu" or "cuda[:N]"')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInputError("device", name, f"{torch.cuda.device_count()} GPUs are visible")
    return device


def _num_blocks_in_memory(
    config: EngineConfig, loaded: LoadedModel, specs: Sequence[AttentionSpec], max_model_len: int
) -> int:
    """Blocks that fit the memory allowed, and no more than all running requests could fill."""
    num_bytes_a_block = kv_bytes_per_block(loaded, specs, config.block_size)
    share = config.memory_utilization
    if loaded.device.type == "cuda":
        num_free, num_total = torch.cuda.mem_get_info(loaded.device)
        num_allowed = (share or 0.9) * num_total
        num_bytes = num_allowed - (num_total - num_free) - _GPU_RESERVE_BYTES
    else:
        num_available = _available_cpu_bytes()
        num_bytes = (
            share * num_available
            if share is not None
            else min(0.5 * num_available, _CPU_CACHE_LIMIT_BYTES)
        )
    num_blocks = int(num_bytes // num_bytes_a_block) - 1  # one is the null block
    num_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    if num_blocks < 1:
        raise InvalidInputError(
            "memory_utilization",
            share,
            f"leaves {max(0, num_bytes) / GIB:.2f} GiB for the KV cache, less than one block of "
            f"{num_bytes_a_block / GIB:.4f} GiB; raise it, or lower block_size or the model's size",
        )
    return min(num_blocks, num_useful)


def _available_cpu_bytes() -> int:
    """Memory this process could still take, in bytes."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
