"""Tile sizes of the attention kernels, and how decode distributes contexts over programs.

Tile and split sizes of the keys depend only on dtype and head sizes, never on the batch:
:mod:`.online_softmax` explains why. The spread changes no bits and depends on the batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from ..device import TUNED_SMS

ALL_SPLITS = tl.constexpr(1 << 20)  # more than any context has


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Tile sizes of one dtype and head size; measured in docs/notes/attention.md.

    Attributes:
        block_n: keys per tile. near_split: keys per split up to position ``split_change``.
            far_split: keys per split beyond it. All are multiples of block_n. These four determine
            the bits.
        decode_warps, decode_stages: of the decode kernel. decode_registers: its limit of registers
            per thread; None leaves the choice to the compiler. Change no bits.
        many_warps: warps of the decode kernel for ``some_unsplit_from`` programs or more without
            fused RoPE. many_fused_registers: register limit for as many programs with fused RoPE.
            unsplit_registers: register limit where each program reads a whole context without fused
            RoPE. With fewer registers, more programs share a multiprocessor.
        block_m: lines (queries x heads of a group) of a prefill tile.
        prefill_warps, prefill_stages: of the prefill kernel.
        prefill_parts: number of programs that share the value dimensions of a prefill tile, so that
            the accumulators of each fit its registers. More than 1 requires that these dimensions
            and the parts are powers of two. Changes no bits.
        combine_chunk: number of segments whose loads a combining program has in flight together,
            for groups of up to 512 values. Larger groups have proportionally fewer. A small number
            of segments is loaded at once.
        unsplit_from: number of decode programs (rows x KV heads) from which each reads its whole
            context. This and the other numbers of programs hold for a GPU with :data:`TUNED_SMS`
            multiprocessors; :func:`for_card` scales them for other GPUs.
        some_unsplit_from: number of programs from which each reads the whole of a context that ends
            below ``unsplit_below``, and the longest context may start first.
        first_splits_from: number of programs from which the first segment ends at ``split_change``.
        long_context: with fewer programs, the context length from which its first segment ends at
            ``split_change``; 0 for none.
        workers: programs that share a context of many segments. With few contexts there are more,
            up to ``few_programs`` in total. A program without a segment also costs time.
        max_programs: limit on the number of programs over which contexts of many segments are
            distributed.
    """

    block_n: int
    decode_warps: int = 4
    decode_stages: int = 3
    block_m: int = 128
    prefill_warps: int = 8
    prefill_stages: int = 2
    decode_registers: int | None = None
    many_warps: int = 4
    many_fused_registers: int | None = None
    unsplit_registers: int | None = None
    prefill_parts: int = 1
    near_split: int = 128
    far_split: int = 512
    split_change: int = 512
    combine_chunk: int = 16
    unsplit_from: int = 1024
    some_unsplit_from: int = 512
    unsplit_below: int = 2048
    first_splits_from: int = 64
    long_context: int = 4096
    workers: int = 16
    few_programs: int = 136
    max_programs: int = 4096

    def combine_chunk_of(self, num_values: int) -> int:
        """Segments loaded at once for groups of ``num_values`` (query heads x value elements)."""
        return max(1, self.combine_chunk * 512 // max(512, num_values))

    def num_splits(self, num_positions: int) -> int:
        """Number of splits that begin below ``num_positions``."""
        short = math.ceil(min(num_positions, self.split_change) / self.near_split)
        return short + math.ceil(max(num_positions - self.split_change, 0) / self.far_split)


@cache
def choose_tiling(
    dtype: torch.dtype, k_dim: int, v_dim: int, cache_dtype: torch.dtype | None = None
) -> Tiling:
    """The tiling for queries of ``dtype`` and these head sizes: the largest that fits shared memory
    and registers.

    Args:
        cache_dtype: dtype of the cache; None if it is that of the queries.
    """
    widest = triton.next_power_of_2(max(k_dim, v_dim))
    if dtype == torch.float32:
        return Tiling(block_n=16, decode_stages=2, block_m=32)
    if widest > 128:
        return Tiling(block_n=32, prefill_parts=2 if v_dim == widest else 1)
    if cache_dtype == torch.float8_e4m3fn:
        return Tiling(block_n=64, prefill_stages=3, many_warps=2, many_fused_registers=128)
    return Tiling(block_n=64, prefill_stages=3, unsplit_registers=168)


def for_card(t: Tiling, num_sms: int) -> Tiling:
    """``t`` with its numbers of decode programs scaled to the GPU's number of multiprocessors.
    Changes no bits."""
    # On the GPUs that were tuned for, avoid the cost of a lookup by 20 fields.
    return t if num_sms == TUNED_SMS else _scaled(t, num_sms)


@cache
def _scaled(t: Tiling, num_sms: int) -> Tiling:
    names = (
        "unsplit_from", "some_unsplit_from", "first_splits_from", "few_programs", "max_programs"
    )  # fmt: skip
    return replace(t, **{n: max(1, round(getattr(t, n) * num_sms / TUNED_SMS)) for n in names})


@dataclass(frozen=True, slots=True)
class Spread:
    """How a batch's contexts are distributed over decode programs.

    Attributes:
        first_splits: number of splits in the first segment of a context. A context that ends below
            position ``unsplit_below`` has all its splits in it. In a context of ``long_context``
            positions or more, it ends at ``Tiling.split_change``. 0 disables either rule.
        max_segments: the most segments that a context may have. num_workers: programs that share
            them.
    """

    first_splits: int
    unsplit_below: int
    long_context: int
    max_segments: int
    num_workers: int


def choose_spread(t: Tiling, num_programs: int, length: int, window: int) -> Spread:
    """The spread for ``num_programs`` (units x KV heads) and contexts of up to ``length``
    positions."""
    unsplit_below = long_context = 0
    if num_programs >= t.unsplit_from:
        first_splits = ALL_SPLITS.value
    elif num_programs >= t.first_splits_from:
        first_splits = t.num_splits(t.split_change)
        unsplit_below = t.unsplit_below if num_programs >= t.some_unsplit_from else 0
    else:
        first_splits, long_context = 1, t.long_context
    max_segments = max(1, t.num_splits(length) - first_splits + 1)
    if window:
        max_segments = min(max_segments, (window - 2) // t.near_split + 2)
    num_workers = min(
        t.max_programs // num_programs, max(t.workers, t.few_programs // num_programs)
    )
    num_workers = min(max_segments, max(1, num_workers))
    return Spread(first_splits, unsplit_below, long_context, max_segments, num_workers)


def warps_and_registers(
    t: Tiling, num_programs: int, spread: Spread, fuses_rope: bool
) -> tuple[int, int | None]:
    """Warps of a decode program, and its register limit per thread. Changes no bits."""
    is_many = num_programs >= t.some_unsplit_from
    if fuses_rope:
        return t.decode_warps, t.many_fused_registers if is_many else t.decode_registers
    is_unsplit = spread.first_splits == ALL_SPLITS.value
    registers = t.unsplit_registers if is_unsplit else t.decode_registers
    return t.many_warps if is_many else t.decode_warps, registers
