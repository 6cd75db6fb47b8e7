"""Argument bundles of the attention calls, as NamedTuples: FX graphs carry them like any tuple.

Shapes as in :mod:`.ops`. The ops themselves take every tensor by itself, as torch's dispatcher
needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class PagedKV(NamedTuple):
    """Keys and values in blocks of slots, and which of them belong to which row."""

    k_cache: Tensor
    v_cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_rows: Tensor


class LatentKV(NamedTuple):
    """Latent vectors in blocks of slots (:mod:`.mla.dispatch`), and which of them belong to which
    row."""

    cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_rows: Tensor


class LatentInputs(NamedTuple):
    """Of latent attention, what a token's vector is made of before norm and rotation, and what
    rotates and normalises it.

    Attributes:
        latent: ``[.., T, R]``. rope: ``[.., T, P]``; leading dimensions of size 1, rows strided.
        cos: float32 ``[1, T, P / 2]``, one for each pair of neighbours. sin: alike.
        weight: ``[R]``, of an RMSNorm over R. eps: of the norm.
        form: a :data:`.fused.dispatch.NormForm`.
    """

    latent: Tensor
    rope: Tensor
    cos: Tensor
    sin: Tensor
    weight: Tensor
    eps: float
    form: Any


class AttentionParams(NamedTuple):
    """Constants of an attention layer, 0 for no window, softcap or chunk, None for no sinks or
    slopes; and the positions that an indexer chose for each query, None for all in view."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    alibi_slopes: Sequence[float] | None = None
    indices: Tensor | None = None

    @property
    def is_reference_only(self) -> bool:
        """Whether the kernels for GPUs cannot serve such calls."""
        return self.chunk > 0 or self.alibi_slopes is not None


class RopeInputs(NamedTuple):
    """Queries, keys and values before norm and rotation, and what rotates and normalises them.

    Attributes:
        query: ``[T, Hq, D]``. key: ``[T, Hkv, D]``. value: ``[T, Hkv, Dv]``; strided in tokens and
            heads, as slices of one merged matmul are.
        cos: ``[1, T, R]`` or ``[1, T, R / 2]`` (then it serves both halves). sin: alike.
        rotary_dim: R, even; the first R of D are rotated, in halves: i with i + R / 2.
        q_weight: ``[D]``, for an RMSNorm over D before the rotation. k_weight: alike; both or none.
        eps: of the norms. form: a :data:`.fused.dispatch.NormForm`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    rotary_dim: int
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    form: Any
