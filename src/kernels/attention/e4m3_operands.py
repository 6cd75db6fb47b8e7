"""From pairs of e4m3 numbers to float16, in the registers of a matrix instruction's operands.

A module of its own: tests put another in its place, since Triton's interpreter has no assembly.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPERAND_UNIT = tl.constexpr(256.0)
"""What the operands have to be multiplied by; as :data:`..e4m3.DECODED_UNIT`."""


@triton.jit
def halves_of_pairs(pairs):  # type: ignore[no-untyped-def]
    """float16, 1 / 256 of the lower and of the upper bytes of ``pairs``, uint16: exact.

    The bits are moved to where float16 has them: the sign to the top, the others one below it, with
    the highest bit of the exponent 0. Neighbours share a register, so seven instructions convert
    four numbers. ``cvt.rn.f16x2.e4m3x2`` takes three, but of those a multiprocessor ends so few in
    a cycle that they were what decode waited for.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 shifted, sign;
        shl.b32 shifted, $2, 7;
        and.b32 shifted, shifted, 0x3F803F80;
        shl.b32 sign, $2, 8;
        lop3.b32 $0, sign, 0x80008000, shifted, 0xEA;
        shr.u32 shifted, $2, 1;
        and.b32 shifted, shifted, 0x3F803F80;
        lop3.b32 $1, $2, 0x80008000, shifted, 0xEA;
        }""",
        "=&r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
