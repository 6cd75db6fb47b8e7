"""Argument bundles of attention and recurrences, as NamedTuples, which FX graphs treat as tuples.

Shapes: see :mod:`.ops` and :mod:`.recurrent.ops`. The ops themselves take each field as a separate
argument, as torch's dispatcher requires (:func:`.custom_op.custom_op`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class PagedKV(NamedTuple):
    """Keys and values in blocks of slots, and the blocks that belong to each row.

    Attributes:
        k_cache: ``[num_blocks + 1, block_size, Hkv, Dk]``. v_cache: likewise with Dv.
        query_starts: int32 ``[B + 1]``. context_lens: int32 ``[B]``.
        block_tables: int32 ``[rows, M]``; the table of row b is ``block_tables[table_rows[b]]``.
        table_rows: int32 ``[B]``.
    """

    k_cache: Tensor
    v_cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_rows: Tensor


class LatentKV(NamedTuple):
    """Latent vectors in blocks of slots (:mod:`.mla.dispatch`), and the blocks that belong to each
    row."""

    cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_rows: Tensor


class LatentInputs(NamedTuple):
    """Inputs of latent attention: a token's vector before norm and rotation, and the operands of
    these.

    Attributes:
        latent: ``[.., T, R]``. rope: ``[.., T, P]``; leading dimensions of size 1, rows strided.
        cos: float32 ``[1, T, P / 2]``, one per pair of adjacent elements. sin: likewise.
        weight: ``[R]``, of an RMSNorm over R. eps: epsilon of that norm.
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
    """Constants of an attention layer, and the positions that an indexer selected for each query.

    Attributes:
        scale: factor on the scores. window: 0 for none. softcap: 0 for none.
        sinks: ``[Hq]``, one more logit per head that takes probability only, or None.
        chunk: 0 for none.
        alibi_slopes: one per query head, or None; ``slope * (key position - query position)`` is
            added to a score.
        indices: int32 ``[T, K]`` from :func:`.ops.index_topk`, without window, chunk and slopes;
            None for all positions in view.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    alibi_slopes: Sequence[float] | None = None
    indices: Tensor | None = None

    @property
    def is_reference_only(self) -> bool:
        """Whether the GPU kernels do not support such calls."""
        return self.chunk > 0 or self.alibi_slopes is not None


class RopeInputs(NamedTuple):
    """Queries, keys and values before norm and rotation, and the operands of these.

    Attributes:
        query: ``[T, Hq, D]``. key: ``[T, Hkv, D]``. value: ``[T, Hkv, Dv]``; strided in tokens and
            heads, as slices of one merged matmul are.
        cos: ``[1, T, R]``, or ``[1, T, R / 2]``, which then applies to both halves. sin: likewise.
        rotary_dim: R, even. The first R of D elements are rotated, in halves: i with i + R / 2.
        q_weight: ``[D]``, of an RMSNorm over D before the rotation. k_weight: likewise. Both or
            none.
        eps: epsilon of the norms. form: a :data:`.fused.dispatch.NormForm`.
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


class DeltaInputs(NamedTuple):
    """Inputs of a gated delta rule.

    Attributes:
        query: ``[T, Hk, K]``. key: likewise. value: ``[T, H, V]``, H a multiple of Hk: consecutive
            value heads share a key head.
        decay: log a, ``[T, H]``, or ``[T, H, K]`` for one per channel (Kimi Linear).
        beta: ``[T, H]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


class SsdInputs(NamedTuple):
    """Inputs of Mamba-2.

    Attributes:
        x: ``[T, H, P]``. dt: ``[T, H]``. A: ``[H]``, negative.
        B: ``[T, G, N]``, H a multiple of G. C: likewise. D: ``[H]`` or None.
        dt_bias: ``[H]`` or None, added to dt before softplus and the limits.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None


class ScanInputs(NamedTuple):
    """Inputs of Mamba-1.

    Attributes:
        x: ``[T, I]``. dt: likewise. A: ``[I, N]``, negative. B: ``[T, N]``. C: likewise.
        D: ``[I]`` or None. z: ``[T, I]`` or None.
        dt_bias: ``[I]`` or None, added to dt before softplus.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
