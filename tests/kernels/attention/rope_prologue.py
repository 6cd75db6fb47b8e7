"""Norm, rotation, cache write and attention, called as one launch and as two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagespec.kernels.arguments import AttentionParams, PagedKV, RopeInputs
from pagespec.kernels.attention import launch
from pagespec.kernels.attention.tiling import Tiling
from pagespec.kernels.fused import norm_rope_store
from tests.support.paged import Rows, Shape, make_batch

Results = tuple[Tensor, Tensor, Tensor]
"""Output ``[T, Hq, Dv]`` and both caches."""


class Case:
    """Arguments of both, from a batch whose new tokens are not in the caches yet, and which has as
    many rows as tokens or more.

    Args:
        num_padding: tokens of no row, and rows of no token. rotary_dim: R, 0 for all of a head.
        half_tables: cos and sin have R / 2 elements. form: of the norms, "" for none.
    """

    def __init__(
        self,
        shape: Shape,
        rows: Rows,
        *,
        num_padding: int = 2,
        rotary_dim: int = 0,
        half_tables: bool = False,
        form: str = "rounded",
        device: str = "cpu",
    ) -> None:
        s = shape
        padded = [*rows, *[(0, 0)] * num_padding]
        batch = make_batch(padded, s, num_padding=num_padding, device=device)
        key, value, self.k_cache, self.v_cache, slots = batch.store
        query, _, _, *self.layout = batch.attend
        num_tokens, rotary = len(query), rotary_dim or s.dk
        # Slices of one tensor, as the merged projection gives them; padding holds NaN.
        merged = torch.cat([x.flatten(1) for x in (query, key, value)], 1)
        parts = merged.split([s.hq * s.dk, s.hkv * s.dk, s.hkv * s.dv], 1)
        qkv = [
            part.view(num_tokens, -1, dim)
            for part, dim in zip(parts, (s.dk, s.dk, s.dv), strict=True)
        ]
        generator = torch.Generator().manual_seed(1)
        angles = torch.randn(1, num_tokens, rotary // 2, generator=generator) * 100
        if not half_tables:
            angles = torch.cat((angles, angles), -1)
        cos, sin = (x.to(device, s.dtype) for x in (angles.cos(), angles.sin()))
        weights = [
            torch.randn(s.dk, generator=generator).to(device, s.dtype) if form else None
            for _ in range(2)
        ]
        self.new_slots = slots[: batch.num_tokens]
        self.slots = slots
        self.inputs = RopeInputs(*qkv, cos, sin, rotary, *weights, 1e-6, form or "rounded")

    def two(self, tiling: Tiling | None = None) -> Results:
        """By two launches."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        query = norm_rope_store.norm_rope_store(self.inputs, k_cache, v_cache, self.slots)
        out = launch.paged_attention(query, *self.attention_of(k_cache, v_cache), tiling=tiling)
        return out, k_cache, v_cache

    def one(self, call: Callable[..., Tensor] | None = None, **options: Any) -> Results:
        """By one, or by ``call`` with the same arguments."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        call = call or launch.fused_rope_attention
        out = call(self.inputs, self.slots, *self.attention_of(k_cache, v_cache), **options)
        return out, k_cache, v_cache

    def attention_of(self, k_cache: Tensor, v_cache: Tensor) -> tuple[PagedKV, AttentionParams]:
        """The caches that are attended over, and the attention's parameters."""
        return PagedKV(k_cache, v_cache, *self.layout[:4]), AttentionParams(*self.layout[4:])

    def check(
        self, tiling: Tiling | None = None, call: Callable[..., Tensor] | None = None
    ) -> None:
        """One call stores and returns the same bits as two."""
        expected = self.two(tiling)
        assert self.k_cache.flatten(0, 1)[self.new_slots].isnan().all()  # nothing there before
        assert expected[1].flatten(0, 1)[self.new_slots].isfinite().all()
        assert expected[0].isfinite().all()
        found = self.one(call, **({} if tiling is None else {"tiling": tiling}))
        # Of the null block, the last one, nothing is promised.
        assert same_bits(found[0], expected[0])
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            assert same_bits(mine[:-1], theirs[:-1])


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
