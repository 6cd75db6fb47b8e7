"""The paged KV cache: its tensors, one to three per attention call, and the bytes of a block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels import e4m3
from ..kernels.attention.spec import AttentionSpec
from .model.loaded import LoadedModel


def allocate_kv_caches(
    specs: Sequence[AttentionSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[tuple[Tensor, ...]]:
    """Keys and values, each ``[num_blocks + 1, block_size, Hkv, D]``, an attention call; keys
    alone of one that is latent; and last the index keys of one with an indexer.

    Zeroed, and with the null block as the last one. Of uint8 they hold rows, of float8_e4m3fn
    planes of :mod:`.kernels.e4m3`: ``D + 4`` bytes a vector. Index keys have a dtype of their own.
    """
    num_more = _num_scale_bytes(dtype)

    def zeros(num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        shape = (num_blocks + 1, block_size, num_heads, dim)
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy asks the system for zeroed pages, which take memory only once they are written;
        # torch.zeros would write them all now.
        pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)

    def of_call(spec: AttentionSpec) -> Iterator[Tensor]:
        for dim in _dims(spec):
            yield zeros(spec.num_kv_heads, dim + num_more, dtype)
        if spec.index_dim:
            yield zeros(1, spec.index_dim, _index_dtype(spec))

    return [tuple(of_call(spec)) for spec in specs]


def _dims(spec: AttentionSpec) -> tuple[int, ...]:
    """The head size of each tensor of a call, but for index keys."""
    return (spec.k_dim,) if spec.is_latent else (spec.k_dim, spec.v_dim)


def _index_dtype(spec: AttentionSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.index_dtype)
    return dtype


def kv_dtype(loaded: LoadedModel, kv_cache_dtype: str) -> torch.dtype:
    """Of the caches' tensors: the model's, or for "fp8" uint8 on a CPU and float8_e4m3fn on a
    GPU."""
    if kv_cache_dtype != "fp8":
        return loaded.dtype
    return torch.uint8 if loaded.device.type == "cpu" else torch.float8_e4m3fn


def _num_scale_bytes(dtype: torch.dtype) -> int:
    return e4m3.SCALE_BYTES if dtype in (torch.uint8, torch.float8_e4m3fn) else 0


def kv_bytes_per_block(dtype: torch.dtype, specs: Sequence[AttentionSpec], block_size: int) -> int:
    """Bytes one block of ``block_size`` tokens takes in the caches of all attention calls, of the
    dtype that :func:`kv_dtype` gave."""
    num_bytes = sum(spec.num_kv_elements for spec in specs) * dtype.itemsize
    num_scales = sum(len(_dims(spec)) * spec.num_kv_heads for spec in specs)
    num_bytes += num_scales * _num_scale_bytes(dtype)
    num_bytes += sum(s.index_dim * _index_dtype(s).itemsize for s in specs if s.index_dim)
    return num_bytes * block_size
