"""Warp-specialised prefill over latent vectors for Hopper (after FlashMLA, DeepSeek 2025).

The arithmetic is that of :mod:`.prefill`, and the bits are equal: the same tiles of vectors in the
same order, the same matmuls, each one chain over k, and the same operations per line. The
differences: 64 lines share a tile, which is read from the L2 cache once for them, and warps divide
the work:

- a producer warp loads queries and a ring of tiles through TMA;
- a warpgroup multiplies queries with a tile and computes the weights
  (:mod:`.prefill_sm90_warpgroups`);
- two warpgroups each sum half of the values with those weights. With 512 values, the accumulators
  of a split take all their registers. The sums of the splits before it are in memory, in practice
  in the L2 cache. One thread per element reads and writes them where a split ends.

There are as many programs as multiprocessors. They claim tiles of lines from a counter.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..arguments import LatentKV
from ..attention.online_softmax import Splits
from ..attention.prefill_sm90 import descriptor
from ..device import Gpu
from .prefill_sm90_warpgroups import (
    LINES,
    STEP_N,
    Barriers,
    Batch,
    barriers,
    needs_scratch,
    produce,
    sum_values,
    weigh_vectors,
)

_SHARED_BYTES = 226 << 10  # without barriers and maxima
_PANEL_BYTES = 64 * 64 * 2


@gluon.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=["table_stride", "num_tokens", "num_rows", "num_tiles"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "table_rows"],
)
def latent_prefill_kernel(
    q_desc,  # [T * H, R + P], boxes [64, 64]
    c_desc,  # [slots, R + P], boxes [min(PAGE, 64), 64]
    out,
    scratch,  # float32 [programs, R * 64], if needed
    counter,  # of tiles claimed by programs after their first one: 0
    starts, contexts, tables, table_rows, factor, table_stride, num_tokens, num_rows, num_tiles,
    H: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    NEAR_SPLIT: gl.constexpr, FAR_SPLIT: gl.constexpr, SPLIT_CHANGE: gl.constexpr,
    SINGLES: gl.constexpr,  # whether rows of one query are served, too
    GROUP: gl.constexpr,  # panels of 64 elements that share a barrier
    SLOTS: gl.constexpr,  # of the ring
):  # fmt: skip
    """Same as :func:`.prefill.latent_prefill_kernel`, with tiles of 64 lines. Grid: any number of
    programs."""
    PANELS: gl.constexpr = R // 64 + 1
    SPLITS: gl.constexpr = Splits(NEAR_SPLIT, FAR_SPLIT, SPLIT_CHANGE)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = c_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [PANELS, LINES, 64], OPERAND)
    ring = gl.allocate_shared_memory(dtype, [SLOTS * PANELS, STEP_N, 64], OPERAND)
    p_smem = gl.allocate_shared_memory(dtype, [LINES, STEP_N], OPERAND)
    line_smem = gl.allocate_shared_memory(
        gl.float32, [LINES], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    tile_smem = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = Barriers(
        full=barriers(SLOTS * (PANELS // GROUP), 1),
        empty=barriers(SLOTS, 2),
        q_full=barriers(1, 1).index(0),
        q_empty=barriers(1, 1).index(0),
        p_full=barriers(1, 1).index(0),
        p_empty=barriers(1, 2).index(0),
        t_full=barriers(1, 1).index(0),
        t_empty=barriers(1, 3).index(0),
    )
    fence_async_shared()
    batch = Batch(starts, contexts, num_tokens, num_rows, num_tiles)
    gl.warp_specialize(
        [
            (sum_values, (
                0, ring, p_smem, line_smem, tile_smem, bars, batch, out, scratch, factor, SPLITS, H,
                SINGLES, R, PANELS, SLOTS,
            )),
            (sum_values, (
                1, ring, p_smem, line_smem, tile_smem, bars, batch, out, scratch, factor, SPLITS, H,
                SINGLES, R, PANELS, SLOTS,
            )),
            (weigh_vectors, (
                q_smem, ring, p_smem, line_smem, tile_smem, bars, batch, factor, SPLITS, H, SINGLES,
                PANELS, GROUP, SLOTS,
            )),
            (produce, (
                q_desc, c_desc, batch, counter, tables, table_rows, table_stride, q_smem, ring,
                tile_smem, bars, H, SINGLES, PAGE, PANELS, GROUP, SLOTS,
            )),
        ],
        [4, 4, 1],
        [200, 88, 24],  # registers per thread; the first partition also gets 200
    )  # fmt: skip


def fits(query: Tensor, cache: Tensor, rank: int, block_n: int) -> bool:
    """Whether this kernel supports the sizes. ``block_n``: vectors per tile."""
    width = query.shape[2]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == cache.dtype
        and rank in (256, 512)
        and rank < width <= rank + 64
        and width % 8 == 0
        and cache.shape[1] >= 16  # with smaller blocks, one warp cannot issue the copies in time
        and block_n == STEP_N.value
        and cache.is_contiguous()
        and query.data_ptr() % 16 == cache.data_ptr() % 16 == 0
    )


def is_served(query: Tensor, cache: Tensor, rank: int, block_n: int) -> bool:
    """Whether :func:`fits` holds, and the GPU has enough shared memory."""
    return query.is_cuda and Gpu.of(query.device).is_large and fits(query, cache, rank, block_n)


def serves_singles(num_heads: int) -> bool:
    """Whether rows of one query fill its tiles."""
    return num_heads % LINES.value == 0


def constants_of(rank: int) -> dict[str, int]:
    """The constants of this kernel alone."""
    panels = num_panels(rank)
    return ring_constants(panels, _SHARED_BYTES - (panels + 1) * _PANEL_BYTES)


def num_panels(rank: int) -> int:
    """Number of panels of 64 elements per vector: its latent, and the rotated part after it."""
    return rank // 64 + 1


def ring_constants(panels: int, num_bytes: int) -> dict[str, int]:
    """Constants of a ring of tiles in ``num_bytes`` of shared memory: panels that share a barrier,
    and as many slots as fit."""
    group = 3 if panels % 3 == 0 else panels
    return {"GROUP": group, "SLOTS": num_bytes // (panels * _PANEL_BYTES)}


def descriptors(
    query: Tensor, cache: Tensor, num_lines: int = LINES.value
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of queries ``[T, H, R + P]`` in tiles of ``num_lines``, and of a cache
    ``[blocks, page, 1, R + P]``. TMA reads zeros after the end of a row's last panel."""
    width = query.shape[2]
    page = min(cache.shape[1], STEP_N.value)
    of_queries = descriptor(query, [query.numel() // width, width], [num_lines, 64])
    return of_queries, descriptor(cache, [cache.numel() // width, width], [page, 64])


def launch(
    query: Tensor, kv: LatentKV, out: Tensor, shared: dict[str, Any], factor: float, singles: bool
) -> None:
    """Launch attention of all rows for a batch that :func:`is_served` accepts; zeros for padding.

    Args:
        query: ``[T, H, R + P]``, contiguous, on a GPU. out: ``[T, H, R]``, contiguous.
        shared: the constants that all kernels share.
        singles: whether to serve rows of one query, too. Otherwise they stay unchanged.
    """
    (num_tokens, num_heads, _), num_rows = query.shape, len(kv.context_lens)
    num_tiles = num_tokens * num_heads // LINES.value + num_rows + 2
    num_programs = min(Gpu.of(query.device).num_sms, num_tiles)
    rank = shared["R"]
    num_sums = rank * LINES.value if needs_scratch(rank) else 0
    scratch = torch.empty(num_programs, num_sums, dtype=torch.float32, device=out.device)
    counter = torch.zeros(1, dtype=torch.int32, device=out.device)
    q_desc, c_desc = descriptors(query, kv.cache)
    latent_prefill_kernel[(num_programs,)](
        q_desc, c_desc, out, scratch, counter, *kv[1:], factor,
        kv.block_tables.stride(0), num_tokens, num_rows, num_tiles,
        PAGE=kv.cache.shape[1],
        SINGLES=singles,
        **shared,
        **constants_of(rank),
        num_warps=4,
    )  # fmt: skip
