"""``pagespec::paged_attention`` on a GPU: chooses tiles and grids, and launches the kernels.

Everything here follows shapes and dtypes alone. Nothing waits for the device, so that calls can be
captured in a CUDA graph and replayed with other contents.

- At most as many tokens as rows (decode, with or without padding): one decode program (or several
  lanes of them) a token and KV head, of which the last to arrive merges what all computed.
- More: rows of one query go to the decode kernel, the others to the prefill kernel; each leaves
  the other's alone.

Tile and split of the keys depend on dtype and head sizes only, never on the batch: see
:mod:`pagespec.kernels.triton_softmax` for what that buys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from pagespec.kernels.triton_decode import decode_kernel
from pagespec.kernels.triton_prefill import prefill_kernel
from pagespec.kernels.triton_softmax import LOG2E
from pagespec.kernels.triton_store import has_dependent_launch, steps

_ALL = 1 << 20  # splits; more than any context has
_MIN_DOT = 16  # smallest side of a matrix instruction
_WHOLE_FROM = 1024  # decode programs; with as many or more there is nothing to merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Tile sizes of one dtype and head size; measured in benchmarks/NOTES.md, "Attention".

    Attributes:
        block_n: keys a tile. short_split: keys a split up to position ``knee``, long_split: beyond;
            multiples of it. These four decide the bits.
        decode_warps, decode_stages: of the decode kernel.
        block_m: lines (queries x heads of a group) of a prefill tile.
        prefill_warps, prefill_stages: of the prefill kernel.
        prefill_parts: programs that share the values of a prefill tile, each with as many of their
            dimensions, so that its sums fit its registers. More than 1 only if those dimensions and
            the parts are powers of two. Changes no bits.
        merge_chunk: pieces whose loads a merging program has under way together; of groups of more
            than 4 heads as many fewer.
        whole_from: decode programs (rows x KV heads) from which each walks its whole context.
        knee_from: those from which the first piece reaches to the knee.
        max_programs: what contexts of many pieces are spread over.
    """

    block_n: int
    decode_warps: int
    decode_stages: int
    block_m: int
    prefill_warps: int
    prefill_stages: int
    prefill_parts: int = 1
    short_split: int = 128
    long_split: int = 512
    knee: int = 512
    merge_chunk: int = 8
    whole_from: int = _WHOLE_FROM
    knee_from: int = 128
    max_programs: int = 4096

    def num_splits(self, num_positions: int) -> int:
        """Splits that begin below ``num_positions``."""
        short = math.ceil(min(num_positions, self.knee) / self.short_split)
        return short + math.ceil(max(num_positions - self.knee, 0) / self.long_split)


@cache
def choose_tiling(dtype: torch.dtype, k_dim: int, v_dim: int) -> Tiling:
    """The tiling for ``dtype`` and head sizes, by what fits shared memory and registers."""
    widest = triton.next_power_of_2(max(k_dim, v_dim))
    if dtype == torch.float32:
        return Tiling(
            block_n=16,
            decode_warps=4,
            decode_stages=2,
            block_m=32,
            prefill_warps=8,
            prefill_stages=2,
        )
    if widest > 128:
        return Tiling(
            block_n=32,
            decode_warps=4,
            decode_stages=3,
            block_m=128,
            prefill_warps=8,
            prefill_stages=2,
            prefill_parts=2 if v_dim == widest else 1,
        )
    return Tiling(
        block_n=64,
        decode_warps=4,
        decode_stages=3,
        block_m=128,
        prefill_warps=8,
        prefill_stages=3,
    )


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    tiling: Tiling | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """As :func:`pagespec.kernels.ops.paged_attention`, with shapes as there.

    ``query`` may be strided in tokens and heads. Products have operands of the query's dtype and
    float32 sums; float32 operands are multiplied as such, not as TF32. Any block size that is a
    power of two.

    Args:
        tiling: to try another than :func:`choose_tiling` gives; may change the bits.
        arrived: int32 zeros, left as zeros, for calls that follow one another on one stream. One
            for each unit and KV head, if those are fewer than ``tiling.whole_from``, else none.
            None makes some for the call, which costs one more launch.

    Raises:
        ValueError: the block size is no power of two, or there are too few counters.
    """
    num_tokens, num_q_heads, k_dim = query.shape
    page, num_kv_heads, v_dim = v_cache.shape[1:]
    num_rows, table_width = block_tables.shape
    if page & (page - 1):
        raise ValueError(f"block size {page}: the Triton kernels need a power of two")
    if query.stride(2) != 1:
        query = query.contiguous()
    out = query.new_empty(num_tokens, num_q_heads, v_dim)
    if num_tokens == 0:
        return out
    if num_rows == 0:
        return out.zero_()
    t = tiling or choose_tiling(query.dtype, k_dim, v_dim)
    group_size = num_q_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group_size)
    # exp2 of score * factor; with a softcap the kernel scales and caps the scores first.
    factor = LOG2E.value if softcap else scale * LOG2E.value
    cap_in = scale / softcap if softcap else 0.0
    token_stride, head_stride, step = steps(query)
    walking = {
        "HQ": num_q_heads,
        "HKV": num_kv_heads,
        "DK": k_dim,
        "DV": v_dim,
        "DK_PAD": max(_MIN_DOT, triton.next_power_of_2(k_dim)),
        "DV_PAD": max(_MIN_DOT, triton.next_power_of_2(v_dim)),
        "BLOCK_N": t.block_n,
        "SHORT": t.short_split,
        "LONG": t.long_split,
        "KNEE": t.knee,
        "PAGE": page,
        "ONES": _MIN_DOT,
        "Q_STEP": step,
        "HAS_WINDOW": window > 0,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    strides = (token_stride, head_stride, block_tables.stride(0))

    by_token = num_tokens <= num_rows
    num_units = num_tokens if by_token else num_rows
    num_programs = num_units * num_kv_heads
    max_splits = t.num_splits(table_width * page)
    if num_programs >= t.whole_from:
        splits_in_first = _ALL
    else:
        splits_in_first = t.num_splits(t.knee) if num_programs >= t.knee_from else 1
    max_pieces = max(1, max_splits - splits_in_first + 1)
    if window:
        max_pieces = min(max_pieces, (window - 2) // t.short_split + 2)
    num_lanes = min(max_pieces, max(1, t.max_programs // num_programs))
    # With one piece at most, nothing is merged: these are empty, of the dtype they always have.
    num_merging = num_units if max_pieces > 1 else 0
    shape = (num_merging, num_q_heads, max_pieces)
    partial = torch.empty(*shape, v_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    num_counters = num_merging * num_kv_heads
    if arrived is None:
        arrived = torch.zeros(num_counters, dtype=torch.int32, device=query.device)
    elif arrived.numel() < num_counters:
        raise ValueError(f"{arrived.numel()} counters of arrival where {num_counters} are needed")
    overlap = has_dependent_launch(query.device)
    decode_kernel[(num_kv_heads * num_lanes, num_units)](
        query,
        k_cache,
        v_cache,
        out,
        partial,
        stats,
        arrived,
        query_starts,
        context_lens,
        block_tables,
        sinks,
        factor,
        cap_in,
        float(softcap),
        window,
        *strides,
        num_rows,
        num_lanes,
        max_pieces,
        **walking,
        BLOCK_M=max(_MIN_DOT, padded_group),
        GROUP=padded_group,
        CHUNK=max(1, t.merge_chunk * 4 // max(4, padded_group)),
        BY_TOKEN=by_token,
        FIRST=splits_in_first,
        PDL=overlap,
        num_warps=t.decode_warps,
        num_stages=t.decode_stages,
        launch_pdl=overlap,
    )
    if not by_token:
        block_m = max(t.block_m, padded_group)
        num_tiles = num_tokens // (block_m // group_size) + num_rows + 1
        prefill_kernel[(num_tiles * num_kv_heads * t.prefill_parts,)](
            query,
            k_cache,
            v_cache,
            out,
            query_starts,
            context_lens,
            block_tables,
            sinks,
            factor,
            cap_in,
            float(softcap),
            window,
            *strides,
            num_tokens,
            num_rows,
            num_tiles,
            **walking,
            BLOCK_M=block_m,
            PARTS=t.prefill_parts,
            num_warps=t.prefill_warps,
            num_stages=t.prefill_stages,
        )
    return out


class CountedAttention:
    """:func:`paged_attention` with counters of its own, on the device of the first call.

    An engine makes one, whose counters the calls of all layers, steps and CUDA graphs share: on one
    stream a launch waits for those before it. Larger batches need no more, they merge nothing.
    """

    def __init__(self) -> None:
        self._arrived: Tensor | None = None

    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """As :func:`paged_attention`.

        Raises:
            RuntimeError: the first call is being captured in a CUDA graph.
        """
        if self._arrived is None:
            # The zeros would be written when that graph is replayed, and by it alone.
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("attention has to be called once before it is captured")
            self._arrived = torch.zeros(_WHOLE_FROM, dtype=torch.int32, device=query.device)
        tensors = (query, k_cache, v_cache, query_starts, context_lens, block_tables)
        return paged_attention(*tensors, scale, window, softcap, sinks, arrived=self._arrived)
