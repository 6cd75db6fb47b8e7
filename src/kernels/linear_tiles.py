"""Tile sizes of our kernel for products of few rows: measured ones, and a rule for other shapes.

Only speed depends on the tile where its bits were compared (16-bit dtypes, rows of whole 16-byte
units). Elsewhere a weight has one tile for all numbers of rows (:func:`has_one_tile`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagespec.kernels.triton_linear import Tile

_BUCKETS = (16, 32, 64, 128, 256)  # rows; the last one is for all beyond it, too


def _tile(m: int, n: int, k: int, stages: int, prefetch_k: int = 0, warps: int = 4) -> Tile:
    return Tile(
        block_m=m,
        block_n=n,
        block_k=k,
        num_stages=stages,
        num_warps=warps,
        prefetch_k=prefetch_k,
    )


# (bucket, N, K): the weights of Qwen3-0.6B and 8B in bfloat16 on an H100, each product timed among
# 256 MB of others so that no weight was in the L2 cache; benchmarks/NOTES.md, "Few rows".
TUNED: Mapping[tuple[int, int, int], Tile] = MappingProxyType(
    {
        (16, 4096, 1024): _tile(16, 32, 128, 5),
        (16, 1024, 2048): _tile(16, 8, 256, 5),
        (16, 6144, 1024): _tile(16, 32, 128, 7, 512),
        (16, 3072, 1024): _tile(16, 32, 128, 5, 512),  # gate and up, SiLU at the store
        (16, 1024, 3072): _tile(16, 16, 256, 4),
        (16, 151936, 1024): _tile(16, 32, 256, 4, 512),
        (16, 6144, 4096): _tile(16, 32, 128, 5),
        (16, 12288, 4096): _tile(16, 32, 128, 5, 512),  # gate and up, SiLU at the store
        (16, 4096, 4096): _tile(16, 32, 128, 5),
        (16, 24576, 4096): _tile(16, 64, 128, 4),
        (16, 4096, 12288): _tile(16, 32, 128, 7, 512),
        (16, 151936, 4096): _tile(16, 32, 256, 4, 512),
        (32, 4096, 1024): _tile(64, 32, 128, 4, 512),
        (32, 6144, 1024): _tile(64, 32, 128, 4, 512),
        (32, 151936, 1024): _tile(32, 128, 128, 3, 128),
        (32, 6144, 4096): _tile(64, 32, 128, 4, 512),
        (32, 24576, 4096): _tile(32, 64, 128, 4, 256),
        (32, 151936, 4096): _tile(32, 128, 128, 3, 128),
    }
)


_ONE_TILE_WIDE = _tile(32, 32, 32, 3)  # no matrix unit: small, to fit the registers
_ONE_TILE_NARROW = _tile(32, 64, 64, 3)


def has_one_tile(k_size: int, itemsize: int) -> bool:
    """Whether a weight with rows of ``k_size`` elements has one tile for all numbers of rows.

    On an H100 (Triton 3.6) every tile gave the same bits for 16-bit dtypes and rows of whole
    16-byte units. float32 and float16 with K = 50 did not, all of it in products with a bias or a
    residual; the known causes are gone from the kernel, but it was not compared again since.
    """
    return itemsize == 4 or k_size * itemsize % 16 != 0


def choose_tile(num_rows: int, num_outs: int, k_size: int, itemsize: int, num_sms: int) -> Tile:
    """The tile for ``num_rows`` rows, by the bucket they fall into and the shape of the weight.

    One tile for all numbers of rows where :func:`has_one_tile`.

    Args:
        num_outs, k_size: N and K of the weight. itemsize: bytes of an element.
        num_sms: multiprocessors of the GPU.
    """
    if has_one_tile(k_size, itemsize):
        return _ONE_TILE_WIDE if itemsize == 4 else _ONE_TILE_NARROW
    bucket = next((b for b in _BUCKETS if num_rows <= b), _BUCKETS[-1])
    tuned = TUNED.get((bucket, num_outs, k_size))
    if tuned is not None:
        return tuned
    if bucket > 64:
        block_n = 128 if num_outs >= 64 * num_sms else 64
        block_m = 128 if bucket > 128 else 64
        num_warps = 8 if block_m * block_n > 64 * 128 else 4
        return Tile(block_m=block_m, block_n=block_n, block_k=64, num_stages=4, num_warps=num_warps)
    # The widest tile that keeps most of the multiprocessors at work.
    widths = (64, 32, 16)
    block_n = next((w for w in widths if 10 * num_outs >= 7 * w * num_sms), widths[-1])
    if bucket > 16:
        return Tile(block_m=bucket, block_n=block_n, block_k=128, num_stages=4, num_warps=4)
    return Tile(
        block_m=16,
        block_n=block_n,
        block_k=256 if block_n == 16 and k_size % 256 == 0 else 128,
        num_stages=5 if block_n == 32 else 4,
        num_warps=4,
        prefetch_k=min(k_size, (32 << 10) // (block_n * itemsize)),
    )


def rows_worth_it(num_outs: int, k_size: int) -> int:
    """Up to how many rows our kernel is the faster one, as far as is known: 16, or 32 for shapes
    that were measured to win there, too."""
    return 32 if (32, num_outs, k_size) in TUNED else 16
