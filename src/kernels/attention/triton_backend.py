"""The Triton attention backend of one engine, with the arrival counters its launches share."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import e4m3
from ..arguments import AttentionParams, PagedKV, RopeInputs
from ..device import count_sms
from ..fused.e4m3_groups import QuantizedRows
from ..fused.norm_rope_store import norm_rope_store
from .decode_prologue import fits
from .launch import fused_rope_attention, paged_attention, quantized_like
from .tiling import choose_tiling, for_card

_MAX_FUSED = 64  # rows; with more, what each worker does again costs more than a launch


class TritonBackend:
    """:func:`paged_attention` with counters of its own, on the device of the first call.

    An engine makes one, whose counters the calls of all layers, steps and CUDA graphs share: on one
    stream a launch waits for those before it. Larger batches need no more, they combine nothing.
    """

    def __init__(self) -> None:
        self._arrived: Tensor | None = None

    def attend(
        self, query: Tensor, kv: PagedKV, params: AttentionParams, order: Tensor | None = None
    ) -> Tensor:
        """As :func:`paged_attention`.

        Raises:
            RuntimeError: the first call is being captured in a CUDA graph.
        """
        return paged_attention(
            query, kv, params, arrival_counters=self._counters(query), order=order
        )

    def attend_quantized(
        self, query: Tensor, kv: PagedKV, params: AttentionParams, order: Tensor | None = None
    ) -> QuantizedRows:
        """:func:`..fused.quantize_rows.quantize_rows` of :meth:`attend`, a token a row, with no
        kernel of its own. Heads have a multiple of 128 values.

        Raises:
            RuntimeError: as :meth:`attend`.
        """
        rows = quantized_like(query, kv.v_cache)
        counters = self._counters(query)
        paged_attention(query, kv, params, arrival_counters=counters, rows=rows, order=order)
        return rows

    def fused_rope_attention(
        self,
        inputs: RopeInputs,
        slot_mapping: Tensor,
        kv: PagedKV,
        params: AttentionParams,
        order: Tensor | None = None,
    ) -> Tensor:
        """:func:`fused.norm_rope_store`, then :func:`paged_attention` of the queries it returns.

        One launch for the steps of up to 64 rows that have as many tokens, two for others: by
        shapes alone, and with the same bits.

        Raises:
            RuntimeError: as :meth:`attend`.
        """
        return self._fused_rope_attention(inputs, slot_mapping, kv, params, None, order)

    def fused_rope_attention_quantized(
        self,
        inputs: RopeInputs,
        slot_mapping: Tensor,
        kv: PagedKV,
        params: AttentionParams,
        order: Tensor | None = None,
    ) -> QuantizedRows:
        """:meth:`fused_rope_attention`, quantised as by :meth:`attend_quantized`."""
        rows = quantized_like(inputs.query, kv.v_cache)
        self._fused_rope_attention(inputs, slot_mapping, kv, params, rows, order)
        return rows

    def _fused_rope_attention(
        self,
        inputs: RopeInputs,
        slot_mapping: Tensor,
        kv: PagedKV,
        params: AttentionParams,
        rows: QuantizedRows | None,
        order: Tensor | None,
    ) -> Tensor:
        query, key, value = inputs[:3]
        counters = self._counters(query)
        is_decode = 0 < len(query) == len(kv.context_lens) <= _MAX_FUSED
        has_norm, are_planes = inputs.q_weight is not None, e4m3.are_planes(kv.k_cache)
        if is_decode and fits(query, key, value, has_norm, are_planes, rows is not None):
            return fused_rope_attention(
                inputs, slot_mapping, kv, params, arrival_counters=counters, rows=rows, order=order
            )
        query = norm_rope_store(inputs, kv.k_cache, kv.v_cache, slot_mapping)
        return paged_attention(query, kv, params, arrival_counters=counters, rows=rows, order=order)

    def _counters(self, query: Tensor) -> Tensor:
        """Made at the first call, on the device of ``query``."""
        if self._arrived is None:
            # The zeros would be written when that graph is replayed, and by it alone.
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("attention has to be called once before it is captured")
            most = for_card(choose_tiling(query.dtype, 1, 1), count_sms(query.device)).unsplit_from
            self._arrived = torch.zeros(most, dtype=torch.int32, device=query.device)
        return self._arrived
