"""Try tiles of the matmul kernels on this GPU, for weights of models or of a rank.

    python -m benchmarks.matmul_sweep [--model 32b | 30b-a3b | ...] [--rows 2 16] [--seconds 60]

Columns, for each weight and number of rows: the roofline (the weight once at 4.54 TB/s, or the
operations at 790 TFLOP/s, whichever takes longer; both measured on an H200); cuBLAS as in the
engine (no split-K, float32 accumulators; with a gate, a separate launch for the activation); the
engine's present choice ("present"); and the fastest tiles of the Gluon and the Triton kernel. Times
are microseconds. Each call is timed among 256 MB or more of others, so that no weight stays in the
L2 cache, in a CUDA graph with dependent launch. Every tile keeps the order along K. A tile whose
bits differ from cuBLAS with 512 rows is marked "BITS".

``--names`` prints cuBLAS's names of its kernels.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import median_seconds
from pagespec.kernels.fused import dispatch as fused
from pagespec.kernels.jit.compile_pool import compilers
from pagespec.kernels.jit.parallel_build import parallel_build, pin_triton_cache_dir
from pagespec.kernels.matmul import dispatch, matmul
from pagespec.kernels.matmul.cublas import without_split_k
from pagespec.kernels.matmul.matmul import Tile
from pagespec.kernels.matmul.plan import REFERENCE_ROWS, rows_worth_it
from pagespec.kernels.matmul.tuned_tiles import PrefetchTile, _swapped, _tile

# Per model and number of ranks: (name, N, K, whether N is that of gate and up, each).
WEIGHTS: dict[str, list[tuple[str, int, int, bool]]] = {
    "32b/2": [
        ("qkv", 5120, 5120, False),
        ("o", 5120, 4096, False),
        ("gate up", 12800, 5120, True),
        ("down", 5120, 12800, False),
    ],
    "8b/2": [
        ("qkv", 3072, 4096, False),
        ("o", 4096, 2048, False),
        ("gate up", 6144, 4096, True),
        ("down", 4096, 6144, False),
    ],
    "32b": [
        ("qkv", 10240, 5120, False),
        ("o", 5120, 8192, False),
        ("gate up", 25600, 5120, True),
        ("down", 5120, 25600, False),
    ],
    "30b-a3b": [
        ("qkv", 5120, 2048, False),
        ("o", 2048, 4096, False),
        ("router", 128, 2048, False),
    ],
    "v2-lite": [
        ("q, latent", 3648, 2048, False),
        ("o", 2048, 2048, False),
        ("shared gate up", 2816, 2048, True),
        ("shared down", 2048, 2816, False),
    ],
    "gemma-4b": [
        ("qkv", 4096, 2560, False),
        ("o", 2560, 2048, False),
        ("gate up", 20480, 2560, False),
        ("down", 2560, 10240, False),
    ],
    "granite-tiny": [
        ("mamba in", 6448, 1536, False),
        ("mamba out", 1536, 3072, False),
        ("shared, router", 2112, 1536, False),
    ],
    "35b-a3b": [
        ("qkv of delta rule", 12352, 2048, False),
        ("qkv of attention", 9216, 2048, False),
        ("shared, router", 1296, 2048, False),
    ],
    "heads": [
        ("0.6b", 151936, 1024, False),
        ("8b", 151936, 4096, False),
    ],
}
ROWS = (2, 256, 64, 128, 16, 32)
_READ, _MATRIX = 4.54e12, 790e12
_AMONG_BYTES = 256 << 20
_SHARED_BYTES = 227 << 10
_LEAST_STAGES, _MOST_STAGES = 3, 12
# Rows of the weight per program (both halves of a gate), and programs per multiprocessor.
_FEW_ROWS = [
    *((8, n) for n in (1, 2)),
    *((16, n) for n in (1, 2, 3, 4)),
    *((32, n) for n in (1, 2, 3, 4)),
    *((64, n) for n in (1, 2, 3, 4)),
    *((128, n) for n in (1, 2)),
]
_MORE_ROWS = [(32, 2), (64, 1), (64, 2), (64, 3), (128, 1), (128, 2)]
_MANY_ROWS_TRITON = (
    _tile(128, 128, 64, 4, warps=8),
    _tile(128, 256, 64, 3, warps=8),
    _tile(256, 128, 64, 3, warps=8),
    _tile(128, 64, 64, 5),
    _swapped(128, 128, 64, 4),
)


def prefetch_tiles(num_rows: int, num_outs: int, k_size: int, has_gate: bool) -> list[PrefetchTile]:
    """Tiles worth a test: as many stages as fit with this many programs per multiprocessor, of the
    largest size and of half of it."""
    if num_rows <= 16:
        wanted = [(8 if num_rows <= 8 else 16, *cut) for cut in _FEW_ROWS]
    else:
        wide = [n for n in (num_rows // 2, num_rows) if n >= 32]
        wanted = [(x_rows, *cut) for x_rows in wide for cut in _MORE_ROWS]
    found: dict[PrefetchTile, None] = {}
    for x_rows, weight_rows, num_programs in wanted:
        part = weight_rows // (2 if has_gate else 1)
        behind = max(0, (64 if weight_rows <= 64 else 128) - weight_rows) * 128
        room = _SHARED_BYTES // num_programs - 2048 - behind
        tiles = []
        for atoms in (8, 4, 2, 1):
            stage = atoms * (weight_rows + x_rows) * 128
            stages = min(room // stage, k_size // 64 // atoms, _MOST_STAGES)
            tile = PrefetchTile(part, atoms, stages, x_rows)
            if stages >= _LEAST_STAGES and tile.fits(num_outs, k_size, has_gate):
                tiles.append(tile)
        found |= dict.fromkeys(tiles[: 2 if num_rows <= 64 else 1])
    return list(found)


def triton_tiles(num_rows: int, has_gate: bool) -> list[Tile]:
    return list(_MANY_ROWS_TRITON) if num_rows >= 256 and not has_gate else []


class Sweep:
    """The sweep of one weight.

    Args:
        memory: bfloat16, for copies of the weight.
    """

    def __init__(self, memory: Tensor, num_outs: int, k_size: int, has_gate: bool) -> None:
        self.num_outs, self.k_size, self.has_gate = num_outs, k_size, has_gate
        size = num_outs * k_size * (2 if has_gate else 1)
        num_copies = max(2, -(-_AMONG_BYTES // (2 * size)))
        self.weights = memory[: num_copies * size].view(num_copies, -1, k_size)
        self.x = torch.randn(REFERENCE_ROWS, k_size, device=memory.device).bfloat16()
        self.expected = self.cublas(self.x, self.weights[0])
        torch.cuda.synchronize()

    def cublas(self, x: Tensor, weight: Tensor) -> Tensor:
        out = F.linear(x, weight)
        return fused.act_mul(*out.chunk(2, -1), "silu") if self.has_gate else out

    def present(self, x: Tensor, weight: Tensor) -> Tensor:
        most = rows_worth_it(weight, self.has_gate)
        multiply = dispatch.linear_silu_mul if self.has_gate else dispatch.linear
        return multiply(x, weight, None, most)

    def tiled(self, tile: PrefetchTile | Tile, x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(tile, Tile):
            return matmul.matmul(x, weight, tile=tile, has_gate=self.has_gate)
        from pagespec.kernels.matmul.sm90 import matmul_sm90

        return matmul_sm90.matmul(x, weight, tile=tile, has_gate=self.has_gate)

    def calls(self, num_rows: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        tiles: list[PrefetchTile | Tile] = [
            *prefetch_tiles(num_rows, self.num_outs, self.k_size, self.has_gate),
            *triton_tiles(num_rows, self.has_gate),
        ]
        return {
            "cuBLAS": self.cublas,
            "present": self.present,
            **{_name(tile): partial(self.tiled, tile) for tile in tiles},
        }

    def roofline(self, num_rows: int) -> float:
        """Microseconds."""
        size = self.weights[0].numel()
        return max(2 * size / _READ, 2 * size * num_rows / _MATRIX) * 1e6

    def times(self, num_rows: int) -> Iterator[tuple[float, str]]:
        """Microseconds per call."""
        x = self.x[:num_rows]
        for name, call in self.calls(num_rows).items():
            try:
                is_same = torch.equal(call(x, self.weights[0]), self.expected[:num_rows])
                chain = [partial(call, x, weight) for weight in self.weights]
                took = median_seconds(chain * max(1, 8 // len(chain)), 7) * 1e6
            except Exception as error:
                torch.cuda.synchronize()
                print(f"{name}: {type(error).__name__} {str(error)[:150]}", flush=True)
                continue
            yield took, name if is_same or name == "cuBLAS" else f"{name} BITS"


def _name(tile: PrefetchTile | Tile) -> str:
    if isinstance(tile, PrefetchTile):
        return f"Prefetch({tile.part}, {tile.atoms}, {tile.stages}, {tile.x_rows})"
    kind = "swapped" if tile.swap_ab else "tile"
    sizes = tile.block_m, tile.block_n, tile.block_k, tile.num_stages, tile.num_warps
    return f"{kind}{sizes}"


def compile_all(memory: Tensor, weights: list[tuple[str, int, int, bool]], rows: list[int]) -> None:
    begin = time.monotonic()
    pin_triton_cache_dir()
    with compilers() as pool:
        pool.start()
        for _, *shape in weights:  # cuBLAS also computes here
            sweep = Sweep(memory, *shape)
            with parallel_build(memory.device) as report:
                for num_rows in rows:
                    for name, call in sweep.calls(num_rows).items():
                        if name != "cuBLAS":
                            call(sweep.x[:num_rows], sweep.weights[0])
            print(f"{report.num_compiled} kernels, {time.monotonic() - begin:.1f} s", flush=True)


def names_of_cublas(memory: Tensor, weights: list[tuple[str, int, int, bool]]) -> None:
    from torch.profiler import ProfilerActivity, profile

    for name, *shape in weights:
        sweep = Sweep(memory, *shape)
        for num_rows in (64, 128, 192, 256, 8192):
            x = torch.empty(num_rows, sweep.k_size, dtype=torch.bfloat16, device=memory.device)
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                F.linear(x, sweep.weights[0])
                torch.cuda.synchronize()
            print(name, num_rows, [event.key for event in found.key_averages()], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing")
    parser.add_argument("--names", action="store_true", help="cuBLAS' names of its kernels")
    options = parser.parse_args()
    weights = [
        (f"{model} {name}", *shape) for model in options.model for name, *shape in WEIGHTS[model]
    ]
    with without_split_k(), torch.inference_mode():
        largest = max(num_outs * k_size * (1 + gate) for _, num_outs, k_size, gate in weights)
        memory = torch.randn(1 << 28, device="cuda").bfloat16() / 64
        memory = memory.repeat(max(2, -(-2 * largest // len(memory))))
        compile_all(memory, weights, options.rows)
        begin = time.monotonic()
        for num_rows in options.rows:
            print(f"\n{num_rows} rows, us\nweight | roofline | cuBLAS | present | quickest tiles")
            for name, *shape in weights:
                if time.monotonic() - begin > options.seconds:
                    print(f"{name}: no time left")
                    continue
                sweep = Sweep(memory, *shape)
                times = list(sweep.times(num_rows))
                known = {name: took for took, name in times}
                others = sorted(each for each in times if each[1] not in ("cuBLAS", "present"))
                first = " | ".join(f"{known.get(n, 0):.2f}" for n in ("cuBLAS", "present"))
                rest = ", ".join(f"{took:.2f} {tile}" for took, tile in others[:6])
                print(f"{name} | {sweep.roofline(num_rows):.2f} | {first} | {rest}", flush=True)
        if options.names:
            names_of_cublas(memory, weights)


if __name__ == "__main__":
    main()
