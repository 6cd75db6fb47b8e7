"""Block copies copy whole blocks in every cache and change nothing else (Triton's interpreter)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pagespec.runner.block_copies import BlockCopier


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        ([(4, 2, 8), (4, 2, 6)], torch.bfloat16),
        ([(16, 8, 24), (2, 1, 4)], torch.float32),
        ([(1, 1, 3), (3, 1, 5)], torch.float16),  # no whole number of wide words
    ],
    ids=["bfloat16", "two chunks", "odd"],
)
def test_blocks_are_copied_in_all_caches(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    check(shapes, dtype, "cpu")


def check(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> None:
    caches = [
        tuple(torch.randn(9, *shape, device=device).to(dtype) for _ in range(2)) for shape in shapes
    ]
    before = [tuple(cache.clone() for cache in pair) for pair in caches]
    copies = torch.tensor([1, 1, 7, 4, 0, 8], dtype=torch.int32, device=device)
    BlockCopier(caches).copy(copies)
    for pair, old_pair in zip(caches, before, strict=True):
        for cache, old in zip(pair, old_pair, strict=True):
            old[[4, 0, 8]] = old[[1, 1, 7]]
            assert torch.equal(cache, old)


def test_calls_may_have_one_cache() -> None:
    """Calls of latent attention have one cache."""
    caches = [(torch.randn(4, 2, 1, 24),), (torch.randn(4, 2, 2, 8), torch.randn(4, 2, 2, 6))]
    before = [tuple(cache.clone() for cache in call) for call in caches]
    BlockCopier(caches).copy(torch.tensor([1, 3], dtype=torch.int32))
    for call, old_call in zip(caches, before, strict=True):
        for cache, old in zip(call, old_call, strict=True):
            old[3] = old[1]
            assert torch.equal(cache, old)


def test_no_copy_is_no_launch() -> None:
    caches = [(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4))]
    BlockCopier(caches).copy(torch.empty(0, dtype=torch.int32))


@pytest.mark.gpu
def test_blocks_are_copied_on_the_gpu() -> None:
    check([(16, 8, 128), (16, 2, 64)], torch.bfloat16, "cuda")
    check([(1, 1, 3)], torch.float16, "cuda")
