"""Sizes of the KV cache and of the state slots: how many fit into memory, and the longest request
that they hold."""

from __future__ import annotations

from typing import NamedTuple

from ..compile.captured_model import CapturedModel
from ..compile.kv_cache import bytes_per_slot, kv_bytes_per_block, kv_dtype
from ..engine.config import EngineConfig
from ..errors import InvalidInputError
from .host_memory import available_bytes

GIB = 1 << 30
_CPU_CACHE_LIMIT_BYTES = 4 * GIB


def fitting_length(config: EngineConfig, num_blocks: int, limit: int) -> int:
    """The longest request, prompt and output together, that fits into ``num_blocks`` blocks.

    Raises:
        InvalidInputError: it is less than ``config.max_model_len``.
    """
    # The last token of a request is sampled but never an input, so it needs no slot.
    num_tokens_max = num_blocks * config.block_size + 1
    if config.max_model_len is not None and config.max_model_len > num_tokens_max:
        raise InvalidInputError(
            "max_model_len",
            config.max_model_len,
            f"the KV cache of num_blocks = {num_blocks} blocks of {config.block_size} tokens "
            f"holds one request of at most {num_tokens_max} tokens",
        )
    return min(limit, num_tokens_max)


class CacheSize(NamedTuple):
    """Attributes: max_model_len: the longest request that fits into the blocks. kv_bytes,
    state_bytes: size of all blocks and slots, including null ones.
    """

    num_blocks: int
    num_state_slots: int
    max_model_len: int
    kv_bytes: int
    state_bytes: int


def size_cache(
    config: EngineConfig,
    captured: CapturedModel,
    usual_bytes: int,
    most_bytes: int,
    place: str,
    draft_bytes: int = 0,
) -> CacheSize:
    """The KV cache and the state slots of a rank.

    Args:
        draft_bytes: bytes per block in the caches of a drafter's model.
        usual_bytes: their size if ``num_blocks`` is not set. most_bytes: their largest size if it
            is set.
        place: name of the memory of ``most_bytes``, for errors.

    Raises:
        InvalidInputError: they do not fit, or hold less than ``max_model_len``.
    """
    limit = config.max_model_len or captured.loaded.max_position_embeddings
    recurrent, device = captured.loaded.recurrent, captured.loaded.device
    num_bytes = most_bytes if config.num_blocks else usual_bytes
    num_state_slots = state_slots_in(num_bytes, config, captured)
    state_bytes = (num_state_slots + 1) * bytes_per_slot(recurrent, device)
    num_blocks = config.num_blocks or blocks_in(
        usual_bytes - state_bytes, config, captured, limit, draft_bytes
    )
    num_blocks = captured.communicator.least(num_blocks)
    kv_bytes = (num_blocks + 1) * (_bytes_per_block(config, captured) + draft_bytes)
    left_bytes = most_bytes - state_bytes
    if kv_bytes > left_bytes:
        sizes = f"{kv_bytes / GIB:.1f} GiB do not fit the {max(0, left_bytes) / GIB:.1f} GiB"
        limit_text = f"their {sizes} {place}; lower it or block_size"
        raise InvalidInputError("num_blocks", num_blocks, limit_text)
    max_model_len = fitting_length(config, num_blocks, limit)
    return CacheSize(num_blocks, num_state_slots, max_model_len, kv_bytes, state_bytes)


def size_cpu_cache(
    config: EngineConfig, captured: CapturedModel, draft_bytes: int = 0
) -> CacheSize:
    """:func:`size_cache` in a share of the available memory: ``memory_utilization``, or half of it
    and at most 4 GiB."""
    num_available = available_bytes() // config.tensor_parallel_size  # of one host, for all ranks
    share = config.memory_utilization
    default = min(num_available // 2, _CPU_CACHE_LIMIT_BYTES)
    num_bytes = default if share is None else int(share * num_available)
    return size_cache(config, captured, num_bytes, num_available, "available", draft_bytes)


def state_slots_in(num_bytes: int, config: EngineConfig, captured: CapturedModel) -> int:
    """State slots: ``num_state_slots`` if set. Otherwise two per request that can run, plus one, if
    half of ``num_bytes`` holds them. 0 for a model without recurrent layers.

    Raises:
        InvalidInputError: the memory does not hold one per request, plus one.
    """
    slot_bytes = bytes_per_slot(captured.loaded.recurrent, captured.loaded.device)
    if not slot_bytes:
        return 0
    num_fitting = num_bytes // slot_bytes - 1  # one is the null slot
    fewest = config.max_num_seqs + 1
    if num_fitting < (config.num_state_slots or fewest):
        sizes = (
            f"of {slot_bytes / GIB:.4f} GiB do not fit the {max(0, num_bytes) / GIB:.1f} GiB "
            "available for the cache"
        )
        if config.num_state_slots:
            raise InvalidInputError("num_state_slots", config.num_state_slots, sizes)
        limit = f"a model with recurrent layers needs {fewest} state slots for them, which {sizes}"
        raise InvalidInputError("max_num_seqs", config.max_num_seqs, limit)
    if config.num_state_slots:
        return config.num_state_slots
    # Slots beyond the minimum hold checkpoints, which only prefix hits read.
    most = fewest + config.max_num_seqs * config.enable_prefix_caching
    return max(fewest, min(most, num_fitting // 2))


def blocks_in(
    num_bytes: int,
    config: EngineConfig,
    captured: CapturedModel,
    max_model_len: int,
    draft_bytes: int = 0,
) -> int:
    """Blocks that fit into ``num_bytes``, at most as many as all running requests could fill.

    Raises:
        InvalidInputError: not even one block fits.
    """
    num_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    block_bytes = _bytes_per_block(config, captured) + draft_bytes
    if not block_bytes:  # without attention, blocks only count tokens
        return num_useful
    num_blocks = num_bytes // block_bytes - 1  # one is the null block
    if num_blocks < 1:
        raise InvalidInputError(
            "memory_utilization",
            config.memory_utilization,
            f"leaves {max(0, num_bytes) / GIB:.2f} GiB for the KV cache, less than one block of "
            f"{block_bytes / GIB:.4f} GiB; raise it, or lower max_num_batched_tokens, "
            "max_num_seqs, block_size or the model's size",
        )
    return min(num_blocks, num_useful)


def _bytes_per_block(config: EngineConfig, captured: CapturedModel) -> int:
    dtype = kv_dtype(captured.loaded, config.kv_cache_dtype)
    return kv_bytes_per_block(dtype, captured.specs, config.block_size)
