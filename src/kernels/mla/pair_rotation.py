"""Device function of rotary embeddings that rotate neighbours, as Llama 4 and DeepSeek-V2 do."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated_pairs(  # type: ignore[no-untyped-def]
    source, cos, sin, offsets, mask, cos_step, sin_step
):
    """``x c - y s`` of the first and ``x c + y s`` of the second of a pair (x, its neighbour y), in
    float32, not rounded. To be compiled without contraction, as torch rounds each product.

    Args:
        source: pointers to the beginnings of vectors. cos, sin: to those of their tables, of half
            the length, whose elements lie ``cos_step`` and ``sin_step`` apart.
        offsets: which elements, together with ``mask`` of the shape of the result.
    """
    x = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + (offsets ^ 1), mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + offsets // 2 * cos_step, mask=mask, other=0.0)
    s = tl.load(sin + offsets // 2 * sin_step, mask=mask, other=0.0)
    return x * c + tl.where(offsets % 2 == 0, -y, y) * s
