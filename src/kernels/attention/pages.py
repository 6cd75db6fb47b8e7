"""Where the pages of a KV head lie: device functions for caches of numbers and of planes."""

from __future__ import annotations

import triton
import triton.language as tl

from ..fused.e4m3_store import SCALE_BYTES, is_e4m3
from .bundles import HeadPages


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
