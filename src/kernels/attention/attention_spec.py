"""The static parameters of an attention call: heads, sizes, scale, mask, softcap, sinks, slopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention call of the model, as found by the probe.

    Attributes:
        call: its number in order of execution, 0, 1, 2, ... The attention module has the same
            number as ``pagespec_call`` or among its ``pagespec_calls``.
        num_q_heads, num_kv_heads: numbers of heads; KV heads are counted before any repetition.
        k_dim, v_dim: head size of queries and keys, and head size of values.
        scale: factor on the scores.
        window: number of positions that a query sees, its own included; 0 means all.
        softcap: cap on the scores, 0 for none.
        has_sinks: whether the call passes one learned sink logit per query head.
        chunk: size of the chunks, counted from position 0; a query sees only its own chunk; 0 means
            all.
        alibi_slopes: per query head, the decrease of a score per position between query and key
            (ALiBi); empty for none.
        is_latent: whether the values are the first ``v_dim`` elements of the keys. Then only the
            keys are cached (:mod:`..mla.dispatch`).
        num_chosen: the most positions that a query sees, selected by an indexer
            (:mod:`..sparse.indexer`); 0 means all.
        index_dim: elements of the index key per token, if this call has its own indexer; else 0.
            index_dtype: name of their dtype.
    """

    call: int
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    chunk: int = 0
    alibi_slopes: tuple[float, ...] = ()
    is_latent: bool = False
    num_chosen: int = 0
    index_dim: int = 0
    index_dtype: str = ""

    @property
    def num_kv_elements(self) -> int:
        """Number of K and V elements per token in the caches of this call."""
        return self.num_kv_heads * (self.k_dim + (0 if self.is_latent else self.v_dim))


def reference_only(specs: Sequence[AttentionSpec]) -> str | None:
    """A feature of these calls that the GPU kernels do not support, or None."""
    if any(spec.chunk for spec in specs):
        return "have no attention within chunks"
    if any(spec.alibi_slopes for spec in specs):
        return "have no ALiBi slopes"
    return None
