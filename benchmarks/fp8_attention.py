"""Attention and the FP8 projection of its outputs on a GPU: outputs quantised by attention itself,
compared with a separate kernel. Microseconds per layer.

    python -m benchmarks.fp8_attention [--rows 1 --rows 64 ...] [--context 1024] [--block-size 16]

Qwen3-8B's shape: 32/8 heads of 128, a projection of 4,096 x 4,096. Decode of one token per row,
over caches of bfloat16 and of e4m3, then prefill of one prompt. Layers have different caches and
weights and are captured in one CUDA graph. Figures are medians of replays.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.attention import Case, backend_of, inputs
from benchmarks.gpu_timing import median_seconds
from benchmarks.matmul import Rows, random_fp8

_PROMPTS = (512, 8192)
Context = Annotated[int, typer.Option(help="Of a row that decodes.")]
BlockSize = Annotated[int, typer.Option()]


def measure(case: Case, block_size: int) -> tuple[float, float]:
    """(separate, fused), per layer."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    backend = backend_of("triton", case, block_size)
    if isinstance(backend, str):
        raise typer.BadParameter(backend)
    attend = backend.attend
    quantizing = backend.quantizing[attend]
    layers = inputs(case, block_size)
    width = case.num_q_heads * case.head_dim
    weights = [random_fp8(width, width) for _ in layers]

    def apart(layer: tuple, weight: tuple[Tensor, Tensor]) -> Tensor:
        return dispatch_fp8.linear(attend(*layer).flatten(1), *weight)

    def joined(layer: tuple, weight: tuple[Tensor, Tensor]) -> Tensor:
        rows = quantizing(*layer)
        return dispatch_fp8.linear_of_rows(rows, torch.bfloat16, 2, *weight, None)

    def microseconds(call: Callable[[tuple, tuple[Tensor, Tensor]], Tensor]) -> float:
        pairs = zip(layers, weights, strict=True)
        calls = [lambda layer=layer, weight=weight: call(layer, weight) for layer, weight in pairs]
        return median_seconds(calls, 15) * 1e6

    return microseconds(apart), microseconds(joined)


def main(
    rows: Rows = [1, 8, 64, 256],  # noqa: B006 - typer copies it
    context: Context = 1024,
    block_size: BlockSize = 16,
) -> None:
    """Print times of attention and the projection after it, with outputs quantised separately and
    by attention."""
    print(torch.cuda.get_device_name())
    print(f"{'case':<24} {'apart us':>9} {'joined us':>9} {'less':>6}")
    cases = [Case(f"{n} rows of {context}", n, context, 32, 8) for n in rows]
    cases += [replace(case, name=f"{case.name}, e4m3", is_fp8=True) for case in cases]
    cases += [Case(f"prompt of {n}", 1, n, 32, 8, is_prefill=True) for n in _PROMPTS]
    with torch.inference_mode():
        for case in cases:
            apart, joined = measure(case, block_size)
            print(
                f"{case.name:<24} {apart:>9.2f} {joined:>9.2f} {apart - joined:>6.2f}", flush=True
            )


if __name__ == "__main__":
    typer.run(main)
