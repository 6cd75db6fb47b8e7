"""Norm and rotation inside the kernels that write latents and absorb queries, on a GPU.

They must be bit-identical to the calls that they replace, in any schedule.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagespec.kernels.arguments import LatentInputs
from pagespec.kernels.fused.dispatch import rms_norm
from pagespec.kernels.mla import dispatch as mla

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [(16, 128, 512, 64), (40, 64, 256, 32), (4, 16, 16, 8)]  # heads, N, R, P
COUNTS = (1, 2, 3, 7, 16, 17, 31, 32, 33, 64, 65, 129, 256)


def tables(num_rows: int, dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(dim // 2, num_rows, device="cuda").T[None] * 9
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_stored_vectors(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    num_heads, nope_dim, rank, dim = sizes
    width = num_heads * (nope_dim + dim) + rank + dim
    merged = torch.randn(1, 300, width, device="cuda").to(dtype)
    weight = (torch.rand(rank, device="cuda") + 0.5).to(dtype)
    cos, sin = tables(300, dim)
    slots = torch.randperm(320, device="cuda")[:300]

    def stored(merged: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        _, latent, rope = merged.split((width - rank - dim, rank, dim), -1)
        cache = torch.zeros(5, 64, 1, rank + dim, device="cuda", dtype=dtype)
        inputs = LatentInputs(latent, rope[None], cos, sin, weight, 1e-6, "rounded")
        mla.norm_rope_store_latent(inputs, cache, slots)
        return cache.view(-1, rank + dim)[slots]

    whole = stored(merged, cos, sin, slots)
    latent, rope = merged[0, :, -rank - dim : -dim], merged[0, :, -dim:]
    assert torch.equal(whole[:, :rank], rms_norm(latent, weight, 1e-6, "rounded"))
    assert torch.equal(whole[:, rank:], mla.rotate_pairs(rope[:, None], cos, sin)[:, 0])
    for count in COUNTS:
        first = 5 * count % (300 - count)
        some = slice(first, first + count)
        own = merged[:, some].contiguous()
        part = stored(own, cos[:, some].contiguous(), sin[:, some].contiguous(), slots[some])
        assert torch.equal(part, whole[some]), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_queries(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    num_heads, nope_dim, rank, dim = sizes
    query = torch.randn(300, num_heads, nope_dim + dim, device="cuda").to(dtype)
    weight = torch.randn(num_heads, nope_dim, rank, device="cuda").to(dtype) / 16
    cos, sin = tables(300, dim)
    rotated = mla.rotate_pairs(query[..., nope_dim:], cos, sin)
    apart = mla.latent_query(torch.cat((query[..., :nope_dim], rotated), -1), weight)
    found = mla.rope_latent_query(query, cos, sin, weight)
    assert torch.equal(found, apart)
    for count in COUNTS:
        first = 5 * count % (300 - count)
        some = slice(first, first + count)
        own = mla.rope_latent_query(
            query[some].contiguous(), cos[:, some].contiguous(), sin[:, some], weight
        )
        assert torch.equal(own, found[some]), count
