"""The Triton attention backend of one engine: the arrival counters that its launches share, and the
order of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import e4m3
from ..arguments import AttentionParams, PagedKV, RopeInputs
from ..device import count_sms
from ..fused.e4m3_groups import QuantizedRows
from ..fused.norm_rope_store import norm_rope_store
from ..jit.parallel_build import may_skip_launches
from .decode_prologue import fits
from .launch import fused_rope_attention, paged_attention, quantized_like
from .tiling import choose_tiling, for_card


@triton.jit
def _longest_first_kernel(contexts, order, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``order[n]``: the row with n rows before it. Grid: ``(num_rows,)``; ROWS >= num_rows."""
    row = tl.program_id(0)
    others = tl.arange(0, ROWS)
    lengths = tl.load(contexts + others, mask=others < num_rows, other=-1)
    length = tl.load(contexts + row)
    is_before = (lengths > length) | ((lengths == length) & (others < row))
    tl.store(order + tl.sum(is_before.to(tl.int32)), row)


def longest_first(contexts: Tensor, num_kv_heads: int) -> Tensor | None:
    """The rows of a step in the order of their decode programs: longest contexts first, equal ones
    in batch order.

    List scheduling by longest processing time first (Graham 1969): programs that start last should
    not take longest. With e4m3 caches, a multiprocessor rather than memory limits the read rate of
    its programs, so long contexts must be distributed over all multiprocessors
    (docs/notes/attention.md). The order changes no bits and is computed once per step.

    Args:
        contexts: int32 ``[B]``.
        num_kv_heads: the largest number among the attention calls.

    Returns:
        int32 ``[B]``, a permutation; None if there are so few rows that no call uses it.
    """
    num_rows = len(contexts)
    tiling = for_card(choose_tiling(torch.bfloat16, 1, 1), count_sms(contexts.device))
    if num_rows * num_kv_heads < tiling.some_unsplit_from:
        return None
    order = torch.empty_like(contexts)
    if may_skip_launches():  # other kernels read data that this kernel has not written
        torch.arange(num_rows, out=order)
    _longest_first_kernel[(num_rows,)](
        contexts, order, num_rows, ROWS=triton.next_power_of_2(num_rows)
    )
    return order


_MAX_FUSED = 64  # rows; with more rows, the work repeated by each worker costs more than a launch


class TritonBackend:
    """:func:`paged_attention` with its own counters, on the device of the first call.

    An engine has one backend. The calls of all layers, steps and CUDA graphs share its counters,
    because a launch waits for those before it on the same stream. Larger batches need no more
    counters, because they combine nothing.
    """

    def __init__(self) -> None:
        self._arrived: Tensor | None = None

    def attend(
        self,
        query: Tensor,
        kv: PagedKV,
        params: AttentionParams,
        order: Tensor | None = None,
        rows: QuantizedRows | None = None,
    ) -> Tensor:
        """Same as :func:`paged_attention`.

        Raises:
            RuntimeError: the first call happens while a CUDA graph is captured.
        """
        counters = self._counters(query)
        return paged_attention(query, kv, params, arrival_counters=counters, rows=rows, order=order)

    def attend_quantized(
        self, query: Tensor, kv: PagedKV, params: AttentionParams, order: Tensor | None = None
    ) -> QuantizedRows:
        """:func:`..fused.quantize_rows.quantize_rows` of :meth:`attend`, one row per token, without
        a separate kernel. Head sizes are multiples of 128.

        Raises:
            RuntimeError: see :meth:`attend`.
        """
        rows = quantized_like(query, kv.v_cache)
        self.attend(query, kv, params, order, rows)
        return rows

    def fused_rope_attention(
        self,
        inputs: RopeInputs,
        slot_mapping: Tensor,
        kv: PagedKV,
        params: AttentionParams,
        order: Tensor | None = None,
        rows: QuantizedRows | None = None,
    ) -> Tensor:
        """:func:`fused.norm_rope_store`, then :func:`paged_attention` of the queries it returns.

        One launch for steps of up to 64 rows with at most as many tokens, two for others. The
        choice depends only on shapes, and the bits are the same.

        Raises:
            RuntimeError: see :meth:`attend`.
        """
        query, key, value = inputs[:3]
        is_decode = 0 < len(query) == len(kv.context_lens) <= _MAX_FUSED
        has_norm, are_planes = inputs.q_weight is not None, e4m3.are_planes(kv.k_cache)
        if is_decode and fits(query, key, value, has_norm, are_planes, rows is not None):
            counters = self._counters(query)
            return fused_rope_attention(
                inputs, slot_mapping, kv, params, arrival_counters=counters, rows=rows, order=order
            )
        query = norm_rope_store(inputs, kv.k_cache, kv.v_cache, slot_mapping)
        return self.attend(query, kv, params, order, rows)

    def fused_rope_attention_quantized(
        self,
        inputs: RopeInputs,
        slot_mapping: Tensor,
        kv: PagedKV,
        params: AttentionParams,
        order: Tensor | None = None,
    ) -> QuantizedRows:
        """:meth:`fused_rope_attention` with outputs quantised as in :meth:`attend_quantized`."""
        rows = quantized_like(inputs.query, kv.v_cache)
        self.fused_rope_attention(inputs, slot_mapping, kv, params, order, rows)
        return rows

    def _counters(self, query: Tensor) -> Tensor:
        """Created by the first call, on the device of ``query``."""
        if self._arrived is None:
            # Zeros created during capture would be written by each replay of that graph, and only
            # then.
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("attention must be called once before it is captured")
            most = for_card(choose_tiling(query.dtype, 1, 1), count_sms(query.device)).unsplit_from
            self._arrived = torch.zeros(most, dtype=torch.int32, device=query.device)
        return self._arrived
