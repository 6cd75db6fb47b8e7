"""Host side of attention over latent vectors: tiles, grids and launches.

Everything here depends only on shapes and dtypes. No code waits for the device, so calls can be
captured in a CUDA graph and replayed with other contents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from ..arguments import LatentKV
from ..attention.online_softmax import LOG2E
from ..device import Gpu, has_dependent_launch
from ..registry import registry
from .decode import combine_kernel, latent_decode_kernel
from .prefill import latent_prefill_kernel

_COMBINE_CHUNK = 16
_MAX_PARTIAL_BYTES = 1 << 30  # of the states of splits


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTiling:
    """Tile sizes of one dtype; measured in docs/notes/mla.md.

    Attributes:
        block_n: vectors per tile. near_split: positions per split up to position ``split_change``.
            far_split: positions per split beyond it. All are multiples of block_n. These four
            determine the bits.
        ones: rows of the matrix of ones that sums the weights.
        decode_lines, prefill_lines: heads, or queries and heads, that a program serves.
        decode_warps, prefill_warps, num_stages: of the kernels.
        unsplit_from: number of decode programs from which each reads its whole context.
        num_programs: with fewer units, up to this many programs share their contexts.
    """

    block_n: int
    ones: int = 16
    decode_lines: int = 16
    decode_warps: int = 4
    prefill_lines: int = 16
    prefill_warps: int = 4
    num_stages: int = 2
    near_split: int = 256
    far_split: int = 512
    split_change: int = 2048
    unsplit_from: int = 128
    num_programs: int = 264

    def num_splits(self, num_positions: int) -> int:
        """Number of splits that begin below ``num_positions``."""
        near = math.ceil(min(num_positions, self.split_change) / self.near_split)
        return near + math.ceil(max(num_positions - self.split_change, 0) / self.far_split)


@cache
def choose_tiling(dtype: torch.dtype, num_heads: int, device: torch.device) -> LatentTiling:
    """The tiling for vectors of ``dtype`` and queries of ``num_heads``."""
    if dtype == torch.float32:
        return LatentTiling(block_n=16, decode_warps=8, prefill_warps=8, num_stages=1)
    gpu = Gpu.of(device)
    is_large = gpu.is_large
    is_many = num_heads > 16
    # Hopper's kernel occupies a whole multiprocessor: additional programs would wait.
    together: dict[str, int] = {}
    if is_large and not is_many and registry().find("latent_attention", "", gpu.arch):
        together = {"unsplit_from": gpu.num_sms // 2 + 1, "num_programs": gpu.num_sms}
    return LatentTiling(
        block_n=64 if is_large else 32,
        ones=64 if is_large else 16,
        decode_lines=32 if is_many else 16,
        decode_warps=8 if is_many else 4,
        **together,
    )


def attention(
    query: Tensor,
    kv: LatentKV,
    scale: float,
    rank: int,
    tiling: LatentTiling | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    """Same as :func:`.dispatch.attention`; any block size that is a power of two.

    Args:
        tiling: a tiling to use instead of :func:`choose_tiling`'s; may change the bits.
        indices: in order of position. The kernels for Hopper read contexts as stored, so selected
            positions go to Triton's decode kernel.

    Raises:
        ValueError: the block size is not a power of two, or the cache has another dtype than the
            query.
    """
    num_tokens, num_heads, width = query.shape
    page = kv.cache.shape[1]
    num_rows, table_width = len(kv.context_lens), kv.block_tables.shape[1]
    if page & (page - 1):
        raise ValueError(f"block size {page}: the Triton kernels need a power of two")
    if kv.cache.dtype != query.dtype:
        raise ValueError(f"a cache of {kv.cache.dtype} for queries of {query.dtype}")
    query = query.contiguous()
    out = query.new_empty(num_tokens, num_heads, rank)
    if num_tokens == 0 or num_rows == 0:
        return out.zero_()
    t = tiling or choose_tiling(query.dtype, num_heads, query.device)
    factor = scale * LOG2E.value
    shared = {
        "H": num_heads,
        "R": rank,
        "NEAR_SPLIT": t.near_split,
        "FAR_SPLIT": t.far_split,
        "SPLIT_CHANGE": t.split_change,
    }
    tiles = {"P": width - rank, "PAGE": page, "BLOCK_N": t.block_n, "ONES": t.ones}
    num_positions = table_width * page
    num_chosen = 0
    # If no context can be longer, all positions are selected. Other kernels then see the same
    # positions.
    if indices is not None and indices.shape[1] < num_positions:
        num_chosen = num_positions = indices.shape[1]
    by_token = num_chosen > 0 or num_tokens <= num_rows
    num_units = num_tokens if by_token else num_rows
    num_groups = triton.cdiv(num_heads, t.decode_lines)
    max_splits = t.num_splits(num_positions)
    is_split = max_splits > 1 and num_units * num_groups < t.unsplit_from
    is_split &= num_units * num_heads * max_splits * rank * 4 <= _MAX_PARTIAL_BYTES
    num_workers = 1
    if is_split:
        num_workers = min(max_splits, max(t.num_programs // (num_units * num_groups), 1))
    by_arch = None
    if not num_chosen:
        by_arch = registry().find("latent_attention", "", Gpu.of(query.device).arch)
    if by_arch is not None and not by_arch.function("serves")(query, kv.cache, rank, t.block_n):
        by_arch = None
    if by_arch is not None and not is_split and by_arch.function("serves_singles")(num_heads):
        by_arch.function("launch")(query, kv, out, shared, factor, True)
        return out
    # With whole contexts nothing is combined: these are empty, of the usual dtype.
    shape = (num_units if is_split else 0, num_heads, max_splits)
    partial = torch.empty(*shape, rank, dtype=torch.float32, device=query.device)
    stats = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    overlap = has_dependent_launch(query.device)
    grid = (num_groups * num_workers, num_units)
    batch = {"BY_TOKEN": by_token, "IS_SPLIT": is_split, "PDL": overlap}
    if by_arch is not None and by_arch.function("serves_decode")(num_heads):
        by_arch.function("launch_decode")(
            query, kv, out, partial, stats, factor, grid, num_workers, max_splits, shared | batch
        )
    else:
        latent_decode_kernel[grid](
            query, kv.cache, out, partial, stats, indices if num_chosen else None, *kv[1:], factor,
            kv.block_tables.stride(0), num_rows, num_workers, max_splits,
            **shared,
            **tiles,
            **batch,
            NUM_CHOSEN=num_chosen,
            LINES=t.decode_lines,
            num_warps=t.decode_warps,
            num_stages=t.num_stages,
            launch_pdl=overlap,
        )  # fmt: skip
    if is_split:
        combine_kernel[(num_heads, num_units)](
            partial, stats, out, *kv[1:3], factor, num_rows, num_workers, max_splits,
            **shared,
            CHUNK=_COMBINE_CHUNK,
            NUM_CHOSEN=num_chosen,
            BY_TOKEN=by_token,
            PDL=overlap,
            num_warps=4,
            launch_pdl=overlap,
        )  # fmt: skip
    if by_token:
        return out
    if by_arch is not None:
        by_arch.function("launch")(query, kv, out, shared, factor, False)
        return out
    latent_prefill_kernel[(num_tokens * num_heads // t.prefill_lines + num_rows + 2,)](
        query, kv.cache, out, *kv[1:], factor,
        kv.block_tables.stride(0), num_tokens, num_rows,
        **shared,
        **tiles,
        LINES=t.prefill_lines,
        ROWS=min(2048, triton.next_power_of_2(num_rows + 1)),
        num_warps=t.prefill_warps,
        num_stages=t.num_stages,
    )  # fmt: skip
    return out
