"""Where sampled tokens are stored: for the next step on the device, and for the host."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_token(token, row, sampled, results, result_row, results_stride):  # type: ignore[no-untyped-def]
    """Store a row's token for the next step, and for the host if there are ``results``."""
    tl.store(sampled + row, token.to(tl.int64))
    if results is not None:
        tl.store(results + tl.load(result_row) * results_stride + row, token.to(tl.int64))


@dataclass(frozen=True, slots=True)
class Results:
    """Where the host reads tokens. A kernel stores them there itself: a copy behind it would stand
    between it and the next step.

    Attributes:
        tokens: int64 ``[steps, >= S]``, in memory of the host that the device writes to (pinned).
        row: int32 ``[1]``, on the device: which of them this step's are.
    """

    tokens: Tensor
    row: Tensor


def places_of(results: Results | None) -> tuple[Tensor | None, Tensor | None, int]:
    """What :func:`store_token` takes of them: tokens, row, and elements from step to step."""
    if results is None:
        return None, None, 0
    return results.tokens, results.row, results.tokens.stride(0)
