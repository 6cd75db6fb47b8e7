"""From pairs of e4m3 numbers to float16, in the registers of a matrix instruction's operands.

A module of its own: tests put another in its place, since Triton's interpreter has no assembly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves_of_pairs(pairs):  # type: ignore[no-untyped-def]
    """float16 of the lower and of the upper bytes of ``pairs``, uint16: exact."""
    # Two neighbours along the sum share a register: their lower bytes go together, and the upper
    # ones. From bytes the compiler makes three times the instructions.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 lower, upper;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {lower, upper}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, lower;
        cvt.rn.f16x2.e4m3x2 $1, upper;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
