"""Bits and rates of the Hopper matmul of many bfloat16 rows beside cuBLAS.

On an H100 or H200: ``python .kit_gemm/bench.py [--seconds 75]``.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagespec.kernels.fused.dispatch import act_mul
from pagespec.kernels.jit.compile_pool import compilers
from pagespec.kernels.jit.parallel_build import parallel_build, pin_triton_cache_dir
from pagespec.kernels.linear.cublas import without_split_k
from pagespec.kernels.linear.matmul_sm90_many import _pair, _unpacked, silu_of_bfloat16
from pagespec.kernels.linear.matmul_sm90_many_launch import ManyTile, matmul_many

DEVICE = torch.device("cuda")
SHAPES = [  # outputs, summands, gate
    (12288, 4096, True),
    (3072, 1024, True),
    (4096, 12288, False),
    (6144, 4096, False),
    (4096, 4096, False),
    (14336, 4096, True),
    (4096, 1024, False),
    (1024, 2048, False),
    (1024, 3072, False),
]
ROWS = [8192, 2048, 512]
RAGGED = [1000, 8191]
BASE = {
    "256": ManyTile(),
    "256 band 8": ManyTile(band=8),
    "256 band 32": ManyTile(band=32),
    "256 at once": ManyTile(defer=False),
    "128 x 6": ManyTile(wide=128, stages=6),
}
GATED = {
    "256 ex2": ManyTile(silu=1),
    "256 ex2 rcp": ManyTile(silu=3),
}


def tiles_of(n: int, k: int, gate: bool) -> dict[str, ManyTile]:
    found = BASE | (GATED if gate else {})
    return {name: tile for name, tile in found.items() if tile.fits(n, k, gate)}


def present(x: Tensor, weight: Tensor, gate: bool) -> Tensor:
    out = F.linear(x, weight)
    if not gate:
        return out
    left, right = out.chunk(2, dim=-1)
    return act_mul(left, right, "silu")


@gluon.jit
def silu_kernel(x, out, FORM: gl.constexpr):
    """Grid: (64,); 512 pairs each."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.program_id(0) * 512 + gl.arange(0, 512, LINE)
    even, odd = _unpacked(gl.load(x + i))
    gl.store(out + i, _pair(silu_of_bfloat16(even, FORM), silu_of_bfloat16(odd, FORM)))


def check_silu() -> None:
    """Each form for all numbers of bfloat16."""
    bits = torch.arange(65536, dtype=torch.int32, device=DEVICE).to(torch.int16)
    x = bits.view(torch.bfloat16).view(64, -1)
    expected = act_mul(x, torch.ones_like(x), "silu").view(torch.int16).flatten()
    for form in range(4):
        try:
            out = torch.zeros(32768, dtype=torch.int32, device=DEVICE)
            silu_kernel[(64,)](bits.view(torch.int32), out, FORM=form, num_warps=4)
            found = out.view(torch.int16)
            other = (found != expected).nonzero().flatten()
            where = x.flatten()[other[:12]].tolist()
            print(f"silu form {form}: {len(other)} of 65,536 differ {where}", flush=True)
        except Exception as error:
            print(f"silu form {form}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def compile_all() -> None:
    begin = time.monotonic()
    pin_triton_cache_dir()
    with compilers() as pool:
        pool.start()
        with parallel_build(DEVICE) as report:
            act_mul(*torch.zeros(2, 8, 64, dtype=torch.bfloat16, device=DEVICE), "silu")
            for n, k, gate in SHAPES:
                x = torch.zeros(128, k, dtype=torch.bfloat16, device=DEVICE)
                w = torch.zeros(n * (1 + gate), k, dtype=torch.bfloat16, device=DEVICE)
                for name, tile in tiles_of(n, k, gate).items():
                    try:
                        matmul_many(x, w, gate, tile=tile)
                    except Exception as error:
                        print(f"compile {n} {k} {name}: {str(error)[:300]}", flush=True)
    took = time.monotonic() - begin
    print(f"{report.num_compiled} kernels compiled in {took:.1f} s", flush=True)


def difference(found: Tensor, expected: Tensor) -> str:
    if torch.equal(found.view(torch.int16), expected.view(torch.int16)):
        return "same"
    differs = found.view(torch.int16) != expected.view(torch.int16)
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    rows = differs.any(1).sum().item()
    return f"OTHER ({differs.float().mean():.1e} of outputs, {rows} rows, relative {error:.1e})"


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def times_of(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """Median seconds of a replay of each, in turns, so that all have the same temperature."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def run_shape(n: int, k: int, gate: bool, deadline: float) -> list[str]:
    lines = []
    num_weights = n * (1 + gate) * k
    copies = min(12, max(2, -(-(256 << 20) // (2 * num_weights))))
    weights = [
        torch.randn(n * (1 + gate), k, device=DEVICE, dtype=torch.bfloat16) * k**-0.5
        for _ in range(copies)
    ]
    tiles = tiles_of(n, k, gate)
    for rows in ROWS + RAGGED:
        is_timed = rows in ROWS
        if time.monotonic() > deadline:
            print(f"no time for {n} x {k}, {rows} rows", flush=True)
            continue
        xs = [torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        expected = present(xs[0], weights[0], gate)
        bits: dict[str, str] = {}
        work = 2.0 * rows * num_weights
        # About 3 ms a replay.
        count = max(2, min(24, round(3e-3 / (work / 600e12))))
        graphs: dict[str, torch.cuda.CUDAGraph] = {}

        pairs = [(xs[i % 2], weights[i % copies]) for i in range(count)]
        if is_timed:
            graphs["cuBLAS"] = captured([lambda p=p: present(*p, gate) for p in pairs])
            if gate:
                graphs["cuBLAS alone"] = captured([lambda p=p: F.linear(*p) for p in pairs])
        for name, tile in tiles.items():
            try:
                found = matmul_many(xs[0], weights[0], gate, tile=tile)
                bits[name] = difference(found, expected)
                if bits[name] == "same":  # the ring, once more and on other data
                    other = matmul_many(xs[1], weights[-1], gate, tile=tile)
                    bits[name] = difference(other, present(xs[1], weights[-1], gate))
                if is_timed:
                    graphs[name] = captured(
                        [lambda p=p, t=tile: matmul_many(*p, gate, tile=t) for p in pairs]
                    )
            except Exception as error:
                print(f"{n} x {k}, {rows} rows, {name}: {str(error)[:400]}", flush=True)
        label = f"{n:>5} x {k:>5} {'gate' if gate else '    '} {rows:>5} rows"
        if not is_timed:
            wrong = {name: text for name, text in bits.items() if text != "same"}
            print(f"{label}  bits: {wrong or 'all the same'}", flush=True)
            continue
        seconds = times_of(graphs, 7)
        base = seconds["cuBLAS"]
        print(label, flush=True)
        for name, whole in seconds.items():
            each = whole / count
            text = (
                f"  {name:<14} {each * 1e6:>9.1f} us {work / each / 1e12:>7.1f} TFLOP/s "
                f"{base / whole:>6.3f} of cuBLAS's rate  {bits.get(name, '')}"
            )
            print(text, flush=True)
        best = min((name for name in seconds if name in tiles), key=seconds.__getitem__, default="")
        if best:
            each, ref = seconds[best] / count, base / count
            lines.append(
                f"{label} {ref * 1e6:>9.1f} {each * 1e6:>9.1f} us {work / ref / 1e12:>6.1f} "
                f"{work / each / 1e12:>6.1f} TFLOP/s {ref / each:>6.3f}  {best}  {bits[best]}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=75.0, help="no shape begins after these")
    parser.add_argument("--kill", type=int, default=240, help="a kernel that hangs ends then")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.kill, exit=True)
    begin = time.monotonic()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    torch.manual_seed(1)
    with without_split_k(), torch.inference_mode():
        one = torch.ones(64, 64, device=DEVICE, dtype=torch.bfloat16)
        F.linear(one, one)  # reads the settings
        compile_all()
        check_silu()
        lines: list[str] = []
        for shape in SHAPES:
            try:
                lines += run_shape(*shape, begin + options.seconds)
            except Exception as error:
                print(f"{shape}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            torch.cuda.empty_cache()
    print("\nshape, rows: cuBLAS us, best of ours us, their TFLOP/s, speed-up, which, bits")
    print(*lines, sep="\n")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
