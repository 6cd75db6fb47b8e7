"""The paged KV cache: its tensors, a pair per attention call, and the bytes of a block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention.spec import AttentionSpec
from .model.loaded import LoadedModel


def allocate_kv_caches(
    specs: Sequence[AttentionSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[tuple[Tensor, Tensor]]:
    """One (K, V) pair of ``[num_blocks + 1, block_size, Hkv, D]`` an attention call.

    Zeroed, and with the null block as the last one.
    """

    def zeros(num_heads: int, dim: int) -> Tensor:
        shape = (num_blocks + 1, block_size, num_heads, dim)
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy asks the system for zeroed pages, which take memory only once they are written;
        # torch.zeros would write them all now.
        pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)

    return [
        (zeros(spec.num_kv_heads, spec.k_dim), zeros(spec.num_kv_heads, spec.v_dim))
        for spec in specs
    ]


def kv_bytes_per_block(loaded: LoadedModel, specs: Sequence[AttentionSpec], block_size: int) -> int:
    """Bytes one block of ``block_size`` tokens takes in the caches of all attention calls."""
    return sum(spec.num_kv_elements for spec in specs) * block_size * loaded.dtype.itemsize
