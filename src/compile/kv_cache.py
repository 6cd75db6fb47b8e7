"""Memory of requests: the paged KV cache, one to three tensors per attention call, and recurrent
states, one tensor of slots per recurrent call. Also the bytes per block and per slot.

A *slot* holds the recurrent state of one request in all recurrent layers: the last inputs of short
convolutions, and the states of scans (docs/recurrent.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..kernels import e4m3
from ..kernels.attention.attention_spec import AttentionSpec
from ..kernels.recurrent.recurrent_spec import RecurrentSpec
from .model.loaded import LoadedModel
from .step_inputs import RecurrentStates


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy gets zeroed pages from the operating system, which use memory only once they are
    # written. torch.zeros would write all of them now.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def allocate_kv_caches(
    specs: Sequence[AttentionSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[tuple[Tensor, ...]]:
    """Keys and values, each ``[num_blocks + 1, block_size, Hkv, D]``, per attention call. A latent
    call has only keys. A call with an indexer has index keys as the last tensor.

    Zeroed, with the null block as the last one. uint8 caches contain rows and float8_e4m3fn caches
    planes of :mod:`..kernels.e4m3`: ``D + 4`` bytes per vector. Index keys have their own dtype.
    """
    num_more = _num_scale_bytes(dtype)

    def zeros(num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return _zeros((num_blocks + 1, block_size, num_heads, dim), dtype, device)

    def of_call(spec: AttentionSpec) -> Iterator[Tensor]:
        for dim in _dims(spec):
            yield zeros(spec.num_kv_heads, dim + num_more, dtype)
        if spec.index_dim:
            yield zeros(1, spec.index_dim, _index_dtype(spec))

    return [tuple(of_call(spec)) for spec in specs]


def _dims(spec: AttentionSpec) -> tuple[int, ...]:
    """The head size of each tensor of a call, except index keys."""
    return (spec.k_dim,) if spec.is_latent else (spec.k_dim, spec.v_dim)


def _index_dtype(spec: AttentionSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.index_dtype)
    return dtype


def kv_dtype(loaded: LoadedModel, kv_cache_dtype: str) -> torch.dtype:
    """The dtype of the cache tensors: the model's, or for "fp8" uint8 on a CPU and float8_e4m3fn on
    a GPU."""
    if kv_cache_dtype != "fp8":
        return loaded.dtype
    return torch.uint8 if loaded.device.type == "cpu" else torch.float8_e4m3fn


def _num_scale_bytes(dtype: torch.dtype) -> int:
    return e4m3.SCALE_BYTES if dtype in (torch.uint8, torch.float8_e4m3fn) else 0


def kv_bytes_per_block(dtype: torch.dtype, specs: Sequence[AttentionSpec], block_size: int) -> int:
    """Bytes per block of ``block_size`` tokens in the caches of all attention calls, with the dtype
    from :func:`kv_dtype`."""
    num_bytes = sum(spec.num_kv_elements for spec in specs) * dtype.itemsize
    num_scales = sum(len(_dims(spec)) * spec.num_kv_heads for spec in specs)
    num_bytes += num_scales * _num_scale_bytes(dtype)
    num_bytes += sum(s.index_dim * _index_dtype(s).itemsize for s in specs if s.index_dim)
    return num_bytes * block_size


def allocate_states(
    specs: Sequence[RecurrentSpec], num_slots: int, interval: int, device: torch.device | str
) -> RecurrentStates:
    """One tensor ``[num_slots + 1, *slot_shape]`` per recurrent call, with the null slot as the
    last one.

    Only the null slot is read before it is written.
    """
    num = num_slots + 1
    states = [_zeros((num, *spec.slot_shape(device)), spec.dtype, device) for spec in specs]
    return RecurrentStates(states, interval)


def check_interval(specs: Iterable[RecurrentSpec], interval: int) -> None:
    """Refuse intervals shorter than the inputs that a convolution keeps: its kernel would read a
    part of a state that it has just written.

    Raises:
        InvalidInputError: field "state_interval".
    """
    longest = max((s.state_shape[0] for s in specs if s.kind == "short_conv"), default=0)
    if interval < longest:
        limit = f"must be {longest} or more on a GPU: a convolution keeps as many inputs"
        raise InvalidInputError("state_interval", interval, limit)


def bytes_per_slot(specs: Iterable[RecurrentSpec], device: torch.device | str) -> int:
    """Bytes per state slot in the tensors of all recurrent calls."""
    return sum(spec.num_bytes(device) for spec in specs)
