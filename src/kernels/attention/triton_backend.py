"""The Triton attention of one engine: it keeps what its launches share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fused.norm_rope_store import norm_rope_store
from .decode_prologue import fits
from .launch import fused_rope_attention, paged_attention
from .tiling import WHOLE_FROM

_MAX_TURNED = 64  # rows; with more, what each lane does again costs more than a launch


class TritonBackend:
    """:func:`paged_attention` with counters of its own, on the device of the first call.

    An engine makes one, whose counters the calls of all layers, steps and CUDA graphs share: on one
    stream a launch waits for those before it. Larger batches need no more, they merge nothing.
    """

    def __init__(self) -> None:
        self._arrived: Tensor | None = None

    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """As :func:`paged_attention`.

        Raises:
            RuntimeError: the first call is being captured in a CUDA graph.
        """
        arrival_counters = self._counters(query)
        tensors = (query, k_cache, v_cache, query_starts, context_lens, block_tables)
        return paged_attention(
            *tensors, scale, window, softcap, sinks, arrival_counters=arrival_counters
        )

    def fused_rope_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        rotary_dim: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        form: str,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """:func:`fused.norm_rope_store`, then :func:`paged_attention` of the queries it returns.

        One launch for the steps of up to 64 rows that have as many tokens, two for others: by
        shapes alone, and with the same bits.

        Raises:
            RuntimeError: as :meth:`attend`.
        """
        rope = (
            *(query, key, value, cos, sin, rotary_dim, q_weight, k_weight, eps, form),
            *(k_cache, v_cache, slot_mapping),
        )
        layout = (query_starts, context_lens, block_tables, scale, window, softcap, sinks)
        is_decode = 0 < len(query) == len(block_tables) <= _MAX_TURNED
        if is_decode and fits(query, key, q_weight is not None):
            return fused_rope_attention(*rope, *layout, arrival_counters=self._counters(query))
        return self.attend(norm_rope_store(*rope), k_cache, v_cache, *layout)

    def _counters(self, query: Tensor) -> Tensor:
        """Made at the first call, on the device of ``query``."""
        if self._arrived is None:
            # The zeros would be written when that graph is replayed, and by it alone.
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("attention has to be called once before it is captured")
            self._arrived = torch.zeros(WHOLE_FROM, dtype=torch.int32, device=query.device)
        return self._arrived
