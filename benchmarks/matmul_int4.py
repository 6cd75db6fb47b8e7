"""Linear layers of Qwen3-8B on a GPU, with 4-bit, 8-bit and bfloat16 weights.

    python -m benchmarks.matmul_int4 [--rows 1 --rows 8 ...] [--tiles]

Columns are microseconds, GB/s of the weight's bytes (scales included), and the roofline: the longer
of reading the weight and multiplying, at rates measured on an H200. One CUDA graph has several
matmuls with different weights, 256 MiB or more in total, so that no weight stays in the L2 cache.
Figures are medians of replays. "before" dequantises into memory in each call. ``--tiles`` times all
tiles of a list instead of the chosen one.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor

from pagespec.kernels.jit.parallel_build import parallel_build
from pagespec.kernels.matmul import dispatch
from pagespec.kernels.matmul.cublas import without_split_k
from pagespec.kernels.matmul.matmul import Tile
from pagespec.kernels.matmul.plan_cache import LinearPlans
from pagespec.kernels.matmul.quantized import dispatch_int4
from pagespec.kernels.matmul.quantized.int4_packing import PackedWeight, pack_numbers
from pagespec.kernels.matmul.quantized.matmul_int4 import matmul

READ_BANDWIDTH = 4.5e12  # bytes/s
MATRIX_RATE = 790e12  # operations/s
SHAPES = {
    "q, k, v": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate, up": (24576, 4096, True),
    "down": (4096, 12288, False),
}
KINDS = {"int4 g128": (4, 128), "int4 g32": (4, 32), "int8 g32": (8, 32)}
"""Number of bits, and inputs that share a scale."""
TILES = [
    (16, 32, 256, 4, 4),
    (16, 32, 512, 4, 4),
    (16, 64, 256, 4, 8),
    (16, 64, 512, 3, 8),
    (64, 32, 256, 3, 4),
    (64, 64, 128, 5, 4),
    (64, 64, 256, 3, 4),
    (64, 64, 256, 3, 8),
    (64, 128, 128, 4, 8),
]
_POOL_BYTES = 256 << 20
_DEVICE = torch.device("cuda")
Rows = Annotated[list[int], typer.Option("--rows", help="Repeatable.")]


def median_us(calls: list[Callable[[], object]], repeats: int = 11) -> float:
    """Microseconds of one of ``calls``, all captured in one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def random_weight(num_outs: int, num_inputs: int, num_bits: int, group: int) -> PackedWeight:
    """A random weight with zero points."""
    words = (num_outs, num_inputs * num_bits // 32)
    shape = (num_inputs // group, num_outs)
    scales = torch.rand(shape, device=_DEVICE) / 64
    zeros = torch.randint(0, 2**num_bits, shape, device=_DEVICE)
    made = torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device=_DEVICE)
    numbers = pack_numbers(scales, zeros, torch.float16)
    return PackedWeight(made, numbers, num_bits, group, "float16", has_minima=False)


def num_bytes(weight: PackedWeight) -> int:
    return sum(part.nbytes for part in weight[:2])


def roofline_us(num_read: int, num_rows: int, num_outs: int, num_inputs: int) -> float:
    operations = 2 * num_rows * num_outs * num_inputs
    return 1e6 * max(num_read / READ_BANDWIDTH, operations / MATRIX_RATE)


def copies(size: int) -> range:
    return range(max(4, -(-_POOL_BYTES // size)))


def tiles_of(x: Tensor, has_gate: bool) -> dict[str, Callable[..., object]]:
    """All tiles that fit the number of rows."""
    found: dict[str, Callable[..., object]] = {}
    for m, n, k, stages, warps in TILES:
        if m > max(16, 2 * len(x)) or (len(x) > 16 and m == 16):
            continue
        tile = Tile(block_m=m, block_n=n, block_k=k, num_stages=stages, num_warps=warps)
        found[f"{m}x{n}x{k} s{stages} w{warps}"] = lambda w, tile=tile: matmul(
            x, w, tile=tile, has_gate=has_gate
        )
    return found


def chosen_ways(x: Tensor, shape: tuple[int, int, bool]) -> dict[str, Callable[..., object]]:
    """Unpacked in the matmul, and before it."""
    num_outs, num_inputs, has_gate = shape
    call = dispatch_int4.linear_silu_mul if has_gate else dispatch_int4.linear
    limit = custom_rows(num_outs, num_inputs)
    return {
        title: partial(_call, call, x, max_fused_rows, limit)
        for title, max_fused_rows in (("in the matmul", 1 << 30), ("before", 0))
    }


def _call(
    call: Callable[..., object], x: Tensor, fused: int, custom: int, weight: PackedWeight
) -> object:
    return call(x, *weight[:2], None, *weight[2:], fused, custom)


def measure(name: str, num_rows: int, kind: tuple[str, int, int], *, tiles: bool) -> None:
    num_outs, num_inputs, has_gate = SHAPES[name]
    x = torch.randn(num_rows, num_inputs, device=_DEVICE).bfloat16()
    first = random_weight(num_outs, num_inputs, *kind[1:])
    size = num_bytes(first)
    weights = [first._replace(words=first.words.clone()) for _ in copies(size)]
    ways = tiles_of(x, has_gate) if tiles else chosen_ways(x, SHAPES[name])
    with parallel_build(_DEVICE):
        for way in ways.values():
            way(first)
    roofline = roofline_us(size, num_rows, num_outs, num_inputs)
    for title, way in ways.items():
        us = median_us([partial(way, weight) for weight in weights])
        row = f"{name} | {num_rows} | {kind[0]} {title} | {us:.1f} | {size / us / 1e3:.0f}"
        print(f"| {row} | {roofline:.1f} |", flush=True)


def main(
    rows: Rows = [1, 8, 64, 256],  # noqa: B006 - typer copies it
    shape: Annotated[list[str], typer.Option(help="Repeatable.")] = list(SHAPES),  # noqa: B006
    kind: Annotated[list[str], typer.Option(help="Repeatable.")] = list(KINDS),  # noqa: B006
    tiles: bool = False,
) -> None:
    torch.manual_seed(0)
    print(
        "| matmul | rows | weights | us | GB/s | roofline us |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for name, num_rows in itertools.product(shape, rows):
        for chosen in kind:
            measure(name, num_rows, (chosen, *KINDS[chosen]), tiles=tiles)
        if not tiles:
            print_bfloat16(name, torch.randn(num_rows, SHAPES[name][1], device=_DEVICE).bfloat16())


def custom_rows(num_outs: int, num_inputs: int) -> int:
    weight = torch.empty(num_outs, num_inputs, dtype=torch.bfloat16, device="meta")
    return LinearPlans(False).max_custom_rows(weight.new_empty(weight.shape, device=_DEVICE), None)


def print_bfloat16(name: str, x: Tensor) -> None:
    num_outs, num_inputs, has_gate = SHAPES[name]
    made = [
        torch.randn(num_outs, num_inputs, device=_DEVICE, dtype=torch.bfloat16)
        for _ in copies(2 * num_outs * num_inputs)
    ]
    call = dispatch.linear_silu_mul if has_gate else dispatch.linear
    limit = custom_rows(num_outs, num_inputs)
    us = median_us([partial(call, x, weight, None, limit) for weight in made])
    size = made[0].nbytes
    roofline = roofline_us(size, len(x), num_outs, num_inputs)
    print(f"| {name} | {len(x)} | bfloat16 | {us:.1f} | {size / us / 1e3:.0f} | {roofline:.1f} |")


if __name__ == "__main__":
    with torch.inference_mode(), without_split_k():
        typer.run(main)
