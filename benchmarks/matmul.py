"""Linear layers of Qwen3-8B on a GPU, BF16 and FP8: microseconds, GB/s, TFLOP/s, roofline.

    python -m benchmarks.matmul [--rows 1 --rows 8 ...]

One CUDA graph has several matmuls with different weights, 256 MiB or more in total, so that no
weight stays in the L2 cache. Figures are medians of replays. FP8 rows are quantised in advance, as
by the norm or gate before the matmul in a model. A separate column has the time of that
quantisation. GB/s count the weight once. The roofline is the longer of reading the weight and
multiplying, at rates measured on an H200.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor

READ_BANDWIDTH = 4.5e12  # bytes/s
MATRIX_RATES = {"bf16": 790e12, "fp8": 1580e12}  # operations/s
SHAPES = {
    "q, k, v": (6144, 4096),
    "o": (4096, 4096),
    "gate, up": (24576, 4096),
    "down": (4096, 12288),
}
_POOL_BYTES = 256 << 20
_DEVICE = "cuda"
Rows = Annotated[list[int], typer.Option("--rows", help="Repeatable.")]


def median_us(calls: list[Callable[[], object]], repeats: int = 15) -> float:
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


def num_copies(num_bytes: int) -> int:
    return max(4, -(-_POOL_BYTES // num_bytes))


def random_rows(num_rows: int, width: int) -> Tensor:
    return torch.randn(num_rows, width, device=_DEVICE, dtype=torch.bfloat16)


def random_fp8(num_outs: int, width: int) -> tuple[Tensor, Tensor]:
    """A weight in the form that the kernels take."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8
    from pagespec.kernels.matmul.quantized.quantized_weight import quantize_fp8

    weight = torch.randn(num_outs, width, device=_DEVICE) * width**-0.5
    return dispatch_fp8.pack(quantize_fp8(weight))


def measure_bf16(num_rows: int, num_outs: int, width: int) -> float:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul import dispatch
    from pagespec.kernels.matmul.tiles import fastest_custom_rows

    limit = fastest_custom_rows(num_outs, width, False, Gpu.of(torch.device(_DEVICE)))
    x = random_rows(num_rows, width)
    calls = []
    for _ in range(num_copies(2 * num_outs * width)):
        weight = random_rows(num_outs, width) * width**-0.5
        calls.append(lambda w=weight: dispatch.linear(x, w, None, limit))
    return median_us(calls)


def measure_fp8(num_rows: int, num_outs: int, width: int) -> tuple[float, float]:
    """Times of the matmul, and of quantising its rows."""
    from pagespec.kernels.fused.quantize_rows import quantize_rows
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    x = random_rows(num_rows, width)
    rows = quantize_rows(x)
    calls = []
    for _ in range(num_copies(num_outs * width)):
        parts = random_fp8(num_outs, width)
        calls.append(lambda p=parts: dispatch_fp8.multiply(rows, x, *p, None))
    return median_us(calls), median_us([lambda: quantize_rows(x)] * 20)


def main(rows: Rows = [1, 8, 64, 256, 512, 8192]) -> None:  # noqa: B006 - typer copies it
    """Print times of linear layers, bfloat16 and FP8."""
    print(torch.cuda.get_device_name())
    print(
        f"{'weight':<9} {'rows':>5} {'bf16 us':>8} {'GB/s':>6} {'TFLOP/s':>8} "
        f"{'fp8 us':>8} {'roofline':>8} {'GB/s':>6} {'TFLOP/s':>8} {'ratio':>6} {'quantise us':>11}"
    )
    with torch.inference_mode():
        for name, (num_outs, width) in SHAPES.items():
            size = num_outs * width
            for num_rows in rows:
                bf16 = measure_bf16(num_rows, num_outs, width)
                fp8, quantise = measure_fp8(num_rows, num_outs, width)
                work = 2 * num_rows * size
                roofline = max(size / READ_BANDWIDTH, work / MATRIX_RATES["fp8"]) * 1e6
                print(
                    f"{name:<9} {num_rows:>5} {bf16:>8.2f} {2 * size / bf16 / 1e3:>6.0f} "
                    f"{work / bf16 / 1e6:>8.0f} {fp8:>8.2f} {roofline:>8.2f} "
                    f"{size / fp8 / 1e3:>6.0f} "
                    f"{work / fp8 / 1e6:>8.0f} {bf16 / fp8:>6.2f} {quantise:>11.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    typer.run(main)
