"""Paged caches of latent vectors with random contents, for kernel tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagespec.kernels.arguments import LatentKV
from pagespec.kernels.mla import dispatch as mla
from tests.support.paged import Batch, Rows, Shape, float64_attention, make_batch


def latent_shape(num_heads: int, rank: int, rope_dim: int, **others: Any) -> Shape:
    """One KV head, whose values are the first ``rank`` elements of the keys."""
    return Shape(hq=num_heads, hkv=1, dk=rank + rope_dim, dv=rank, **others)


def latent_batch(rows: Rows, shape: Shape, *, num_padding: int = 3, device: str = "cpu") -> Batch:
    """A batch whose new vectors are stored."""
    batch = make_batch(rows, shape, num_padding=num_padding, device=device)
    key, _, cache, _, slots = batch.store
    mla.store_latent(key[None, :, 0, : shape.dv], key[None, :, 0, shape.dv :], cache, slots)
    histories = [(k, k[..., : shape.dv]) for k, _ in batch.histories]
    return replace(batch, histories=histories)


def arguments(attend: tuple, rank: int) -> tuple[Tensor, LatentKV, float, int]:
    """Of ``attention``, from those of ``paged_attention``."""
    query, cache, _, *batch = attend[:7]
    return query, LatentKV(cache, *batch), attend[7], rank


def expected(batch: Batch, rows: Rows, shape: Shape) -> Tensor:
    """``[num_tokens, H, R]`` in float64."""
    return float64_attention(batch, rows, shape)


def float64_heads(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("thi,hio->tho", x.double(), weight.double())
