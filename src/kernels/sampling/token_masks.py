"""Bit masks of the tokens that rows may sample, as the samplers' kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class MaskedRows(NamedTuple):
    """Rows of logits to sample, each with a mask.

    Attributes:
        places: of the rows, int32 ``[n]``. numbers: of their masks, int32 ``[n]``.
        masks: int32 ``[.., >= ceil(V / 32)]``, rows contiguous: a bit for each id.
    """

    places: Tensor
    numbers: Tensor
    masks: Tensor


@triton.jit
def allowed(  # type: ignore[no-untyped-def]
    logit, words, first, VOCAB: tl.constexpr, SIZE: tl.constexpr
):
    """Logits ``[SIZE]`` of the ids from ``first`` on, a multiple of 32: -inf where the bit of the
    mask ``words`` is 0. As they are without a mask (None).

    A word is loaded once, and the load of the logits decides how they lie in the threads.
    """
    if words is not None:
        at = first // 32 + tl.arange(0, SIZE // 32)
        word = tl.load(words + at, mask=at < (VOCAB + 31) // 32, other=0)
        bits = tl.reshape(word[:, None] >> tl.arange(0, 32)[None, :], [SIZE])
        logit = tl.where((bits & 1) != 0, logit, float("-inf"))
    return logit
