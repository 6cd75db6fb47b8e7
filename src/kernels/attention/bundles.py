"""Argument bundles of the attention kernels' device functions, and where a KV head's pages lie.

They are gone when a kernel is compiled: the PTX is that of separate arguments. Kernels themselves
take no tuples: Triton ignores ``do_not_specialize`` for a tuple's elements, and the forms of
kernels that are compiled ahead (:mod:`..jit`) are JSON, which keeps no tuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..fused.e4m3_store import SCALE_BYTES, is_e4m3


@triton.jit
def head_pages(  # type: ignore[no-untyped-def]
    k_cache, v_cache, table, head, part,
    HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """:class:`.bundles.HeadPages` of a KV head, its values from element ``part`` on."""
    pages = HeadPages(k_cache + head * DK, v_cache + head * DV + part, table, 0, 0)
    if is_e4m3(k_cache.dtype.element_ty):
        pages = HeadPages(
            k_cache + head * (PAGE * DK),
            v_cache + (head * (PAGE * DV) + part),
            table,
            HKV * PAGE * DK + head * (PAGE * (SCALE_BYTES - DK)),
            HKV * PAGE * DV + head * (PAGE * (SCALE_BYTES - DV)) - part,
        )
    return pages


class Splits(NamedTuple):
    """Where the splits of a sequence begin: constants."""

    NEAR_SPLIT: Any  # positions of a split up to SPLIT_CHANGE
    FAR_SPLIT: Any  # positions of a split beyond
    SPLIT_CHANGE: Any


class Scoring(NamedTuple):
    """How scores are masked, scaled and capped."""

    window: Any  # or None
    factor: Any  # turns scores into logarithms to base 2; of e4m3 keys, one a line
    cap_in: Any  # of a softcap, or None
    cap_out: Any
    PRECISION: Any  # of tl.dot
    unit: Any = None  # of e4m3 keys, what products with them are in units of, one a line


class TileShape(NamedTuple):
    """Sizes of a tile of keys and values: constants."""

    DK: Any
    DV: Any
    DK_PAD: Any
    DV_PAD: Any
    K_WIDTH: Any  # elements from a slot of the cache to the next in its block
    V_WIDTH: Any
    K_BLOCK: Any  # elements from a block to the next
    V_BLOCK: Any
    PAGE: Any
    BLOCK_N: Any


class HeadPages(NamedTuple):
    """Pointers to the pages of one KV head, in the first block, and to the row's block table."""

    k_cache: Any
    v_cache: Any
    table: Any
    k_scales: Any  # bytes from k_cache to the head's scales, of e4m3 caches
    v_scales: Any
