"""Copies KV blocks in all caches of a model in one launch, for requests that share a prompt.

A block that a prompt fills partly cannot be shared: each continuation writes into it. So each gets
a copy (``StepPlan.copies``), made before the step that needs it computes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024


@triton.jit(do_not_specialize=["num_copies"], do_not_specialize_on_alignment=["copies"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    copies, addresses, num_words, num_copies, IS_WIDE: tl.constexpr, CHUNK: tl.constexpr
):
    """``copies``: sources, then destinations, ``[num_copies]`` each. Words are 8 bytes or 2.

    Grid: chunks of the largest block, caches, copies.
    """
    cache, i = tl.program_id(1), tl.program_id(2)
    words = tl.load(num_words + cache)
    source = tl.load(copies + i).to(tl.int64) * words
    destination = tl.load(copies + num_copies + i).to(tl.int64) * words
    if IS_WIDE:
        memory = tl.load(addresses + cache).to(tl.pointer_type(tl.int64))
    else:
        memory = tl.load(addresses + cache).to(tl.pointer_type(tl.int16))
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = at < words
    tl.store(memory + destination + at, tl.load(memory + source + at, mask=mask), mask=mask)


class BlockCopier:
    """Copies blocks of one set of caches.

    Args:
        kv_caches: per call, tensors of ``[blocks, ...]``, contiguous, whose addresses do not
            change.
    """

    def __init__(self, kv_caches: Sequence[tuple[Tensor, ...]]) -> None:
        caches = [cache for call in kv_caches for cache in call]
        self._num_caches = len(caches)
        if not caches:  # in a model without attention
            return
        num_bytes = [cache[0].nbytes for cache in caches]
        self._is_wide = all(count % 8 == 0 for count in num_bytes)
        num_words = [count // (8 if self._is_wide else 2) for count in num_bytes]
        device = caches[0].device
        self._addresses = torch.tensor([cache.data_ptr() for cache in caches], device=device)
        self._num_words = torch.tensor(num_words, dtype=torch.int32, device=device)
        self._num_chunks = triton.cdiv(max(num_words), _CHUNK)

    def copy(self, copies: Tensor) -> None:
        """Queue the copies, in no order: no source may be a destination.

        Args:
            copies: int32 ``[2 * n]``: sources, then destinations.
        """
        num_copies = len(copies) // 2
        if num_copies and self._num_caches:
            _copy_kernel[(self._num_chunks, self._num_caches, num_copies)](
                copies,
                self._addresses,
                self._num_words,
                num_copies,
                IS_WIDE=self._is_wide,
                CHUNK=_CHUNK,
            )
