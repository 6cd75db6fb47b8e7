"""Measured tiles of the matmul kernels, per weight shape and number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..device import _LARGE_SHARED_BYTES
from .matmul import Tile


def _tile(m: int, n: int, k: int, stages: int, warps: int = 4) -> Tile:
    return Tile(block_m=m, block_n=n, block_k=k, num_stages=stages, num_warps=warps)


def _swapped(m: int, n: int, k: int, stages: int) -> Tile:
    return Tile(block_m=m, block_n=n, block_k=k, num_stages=stages, num_warps=4, swap_ab=True)


GATED = frozenset({(3072, 1024), (12288, 4096)})
"""Shapes (N, K) that were measured with a gate: 2 N rows of weight, twice the shared memory. The
other shapes hold only for matmuls without a gate."""

# By (N, K) and rows: the weights of Qwen3-0.6B and 8B in bfloat16 on an H100. Each matmul was timed
# among 256 MB of others, so that no weight was in the L2 cache; docs/notes/matmul.md. N is that of
# the matmul: gate and up are a weight of 2 N rows.
TUNED: Mapping[tuple[int, int], Mapping[int, Tile]] = MappingProxyType(
    {
        (4096, 1024): {
            16: _swapped(16, 64, 128, 5),
            32: _swapped(32, 64, 128, 5),
            64: _tile(64, 32, 128, 5),
            128: _tile(64, 64, 128, 4),
            256: _tile(128, 64, 64, 5),
        },
        (1024, 2048): {
            16: _swapped(16, 64, 256, 5),
            32: _swapped(32, 64, 128, 5),
            64: _tile(64, 16, 128, 6),
            128: _tile(64, 32, 128, 5),
            256: _tile(64, 32, 128, 6),
        },
        (3072, 1024): {
            16: _tile(16, 32, 256, 4),
            32: _swapped(32, 64, 128, 5),
            64: _tile(64, 32, 128, 5),
            128: _tile(64, 64, 128, 4),
        },
        (1024, 3072): {
            16: _swapped(16, 64, 256, 5),
            32: _swapped(32, 64, 128, 5),
            64: _tile(64, 16, 128, 6),
            128: _swapped(32, 64, 128, 5),
            256: _tile(64, 32, 128, 6),
        },
        (151936, 1024): {
            16: _swapped(16, 64, 256, 3),
            32: _swapped(32, 128, 128, 3),
            64: _tile(64, 64, 64, 6),
        },
        (6144, 4096): {16: _swapped(16, 64, 256, 3), 32: _swapped(32, 64, 128, 5)},
        (4096, 4096): {16: _swapped(16, 64, 256, 4), 32: _tile(32, 16, 256, 4)},
        (12288, 4096): {16: _tile(16, 32, 128, 5), 32: _swapped(32, 64, 128, 5)},
        (4096, 12288): {16: _swapped(16, 64, 256, 4)},
        (151936, 4096): {16: _tile(16, 32, 256, 6), 32: _swapped(32, 128, 128, 3)},
    }
)


@dataclass(frozen=True, slots=True)
class PrefetchTile:
    """Tile sizes of a skinny bfloat16 matmul, which prefetches its weight.

    Attributes:
        part: rows of the weight (of each half, with a gate) per program; a power of two.
        atoms: number of 64-summand atoms per stage; a power of two. stages: in shared memory at
            once.
        x_rows: rows of x per program; a power of two from 8 to 256. Up to 8 rows use 8.
    """

    part: int
    atoms: int
    stages: int
    x_rows: int = 16

    def fits(self, num_outs: int, k_size: int, has_gate: bool) -> bool:
        """Whether the tile matches the shape and fits shared memory."""
        rows = self.part * (2 if has_gate else 1)
        num_steps, rest = divmod(k_size, 64 * self.atoms)
        if (self.part & (self.part - 1)) | (self.atoms & (self.atoms - 1)):
            return False
        if rest or num_outs % self.part or rows > 128 or num_steps < self.stages:
            return False
        num_staged = self.stages * self.atoms
        left = 64 if rows <= 64 else 128
        behind = max(
            num_staged * self.x_rows, left - rows
        )  # x, or padding that the last operand reads
        return (num_staged * rows + behind) * 128 + 1024 <= _LARGE_SHARED_BYTES


# Measured as TUNED: the weights of a rank of two of Qwen3-8B and 32B, and the LM head of
# Qwen3-0.6B, on an H200 (`benchmarks.matmul_sweep`, docs/notes/tensor-parallel.md and matmul.md).
# The third element of a key is whether N is that of gate and up, each.
TUNED_PREFETCH: Mapping[tuple[int, int, bool], Mapping[int, PrefetchTile]] = MappingProxyType(
    {
        (4096, 1024, False): {
            32: PrefetchTile(64, 4, 4, 32),
            64: PrefetchTile(64, 4, 4, 32),
            128: PrefetchTile(64, 4, 3, 64),
            256: PrefetchTile(64, 2, 4, 128),
        },
        (1024, 2048, False): {
            16: PrefetchTile(32, 8, 4),
            32: PrefetchTile(16, 8, 4, 32),
            64: PrefetchTile(64, 4, 4, 32),
            128: PrefetchTile(64, 4, 4, 32),
            256: PrefetchTile(32, 4, 4, 64),
        },
        (3072, 1024, True): {
            32: PrefetchTile(32, 4, 4, 32),
            64: PrefetchTile(32, 2, 4, 32),
            128: PrefetchTile(64, 2, 4, 64),
            256: PrefetchTile(32, 1, 4, 64),
        },
        (1024, 3072, False): {
            16: PrefetchTile(16, 8, 6),
            32: PrefetchTile(16, 8, 4, 32),
            64: PrefetchTile(64, 4, 4, 32),
            128: PrefetchTile(64, 4, 4, 32),
            256: PrefetchTile(32, 4, 4, 64),
        },
        (6144, 4096, False): {32: PrefetchTile(64, 4, 4, 32), 64: PrefetchTile(128, 2, 5, 32)},
        (4096, 4096, False): {32: PrefetchTile(64, 4, 4, 32), 64: PrefetchTile(64, 4, 4, 32)},
        (12288, 4096, True): {
            32: PrefetchTile(32, 4, 4, 32),
            64: PrefetchTile(64, 2, 4, 64),
            128: PrefetchTile(64, 2, 4, 64),
        },
        (4096, 12288, False): {32: PrefetchTile(64, 4, 4, 32), 64: PrefetchTile(64, 4, 4, 32)},
        (151936, 1024, False): {
            32: PrefetchTile(64, 1, 6, 64),
            64: PrefetchTile(64, 1, 6, 64),
        },
        (3072, 4096, False): {
            16: PrefetchTile(32, 4, 9),
            32: PrefetchTile(64, 2, 9, 32),
            64: PrefetchTile(64, 4, 4, 32),
        },
        (4096, 2048, False): {
            8: PrefetchTile(64, 2, 11),
            16: PrefetchTile(64, 4, 5),
            32: PrefetchTile(64, 4, 4, 32),
            64: PrefetchTile(64, 2, 7, 64),
            128: PrefetchTile(64, 4, 3, 64),
            256: PrefetchTile(64, 2, 4, 128),
        },
        (6144, 4096, True): {
            32: PrefetchTile(32, 1, 6, 32),
            64: PrefetchTile(32, 2, 3, 64),
        },
        (4096, 6144, False): {32: PrefetchTile(64, 2, 9, 32), 64: PrefetchTile(64, 2, 7, 64)},
        (5120, 5120, False): {
            8: PrefetchTile(16, 4, 6),
            16: PrefetchTile(16, 2, 8),
            32: PrefetchTile(32, 4, 3, 32),
        },
        (5120, 4096, False): {
            8: PrefetchTile(16, 4, 6),
            16: PrefetchTile(16, 2, 8),
            32: PrefetchTile(64, 4, 4, 32),
            64: PrefetchTile(64, 2, 7, 64),
        },
        (12800, 5120, True): {
            16: PrefetchTile(32, 2, 11),
            32: PrefetchTile(32, 2, 4, 32),
            64: PrefetchTile(64, 2, 4, 64),
        },
    }
)
