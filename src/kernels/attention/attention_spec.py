"""The static parameters of an attention call: heads, sizes, scale, mask, softcap, sinks, slopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention call of the model, as the probe found it.

    Attributes:
        call: its number in order of execution, 0, 1, 2, ...; the same number is set on the
            attention module as ``pagespec_call``, or is among its ``pagespec_calls``.
        num_q_heads, num_kv_heads: the latter before any repetition.
        k_dim, v_dim: head sizes of (query and) key, and of value.
        scale: factor on the scores.
        window: positions a query sees, itself included; 0 means all.
        softcap: cap on the scores, 0 for none.
        has_sinks: whether the call passes one learned sink logit per query head.
        chunk: positions of a chunk, counted from 0, of which a query sees its own; 0 means all.
        alibi_slopes: of each query head, what a score falls by per position between query and key
            (ALiBi); empty for none.
        is_latent: whether the values are the first ``v_dim`` elements of the keys, which alone are
            cached (:mod:`..mla.dispatch`).
        num_chosen: positions a query sees at most, which an indexer chose (:mod:`.indexer`); 0
            means all.
        index_dim: elements of the key that an indexer of the call's own leaves of a token; 0 if it
            has none. index_dtype: of these, by name.
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
        """Elements of K and V a token leaves in the caches of this call."""
        return self.num_kv_heads * (self.k_dim + (0 if self.is_latent else self.v_dim))


def reference_only(specs: Sequence[AttentionSpec]) -> str | None:
    """The feature of one of the calls that the kernels for GPUs lack; None if they lack nothing."""
    if any(spec.chunk for spec in specs):
        return "have no attention within chunks"
    if any(spec.alibi_slopes for spec in specs):
        return "have no ALiBi slopes"
    return None
