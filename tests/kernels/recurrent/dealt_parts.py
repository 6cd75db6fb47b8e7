"""The assignment of parts of rows to programs, as its own kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from pagespec.kernels.recurrent.device_functions import part_of_row


@triton.jit
def deal(starts, out, num_rows, SIZE: tl.constexpr, MORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid: ``(programs,)``. ``out [programs, 2]``."""
    row, number = part_of_row(starts, num_rows, tl.program_id(0), SIZE, MORE)
    tl.store(out + 2 * tl.program_id(0), row)
    tl.store(out + 2 * tl.program_id(0) + 1, number)
