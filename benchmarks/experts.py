"""The experts of one layer in the shape of Qwen3-30B-A3B on a GPU, compared with their roofline.

    python -m benchmarks.experts [--tokens 1 64 256 8192] [--sweep] [--seconds 60]
    TRITON_INTERPRET=1 python -m benchmarks.experts --dry       # a tiny shape, on a CPU

128 experts, 8 per token, 2048 x 768, bfloat16. Each call of a graph draws its eight experts
uniformly. The roofline is the larger of two times: the bytes of the experts that have a token, with
input and output rows, at the GPU's read bandwidth; and the operations at its matmul rate
(:mod:`benchmarks.card`). ``--sweep`` times the tiles of both matmuls and compares their bits with
those of the tile in use.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --dry runs on a CPU")  # before torch is imported

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.card import CardRates, rates_of_this_process
from benchmarks.plain_read import seconds_of
from pagespec.kernels.device import Gpu
from pagespec.kernels.fused.activation import act_mul
from pagespec.kernels.jit.compile_pool import compilers
from pagespec.kernels.jit.parallel_build import parallel_build, pin_triton_cache_dir
from pagespec.kernels.matmul.matmul import Tile
from pagespec.kernels.moe.grouped_mm import choose_grouped_tile, grouped_mm
from pagespec.kernels.moe.sort_by_expert import sort_by_expert

_GATED = "gate, up"  # with the activation
_CALLS = 4  # per graph, each with other experts: a small batch's weights fit the L2 cache


@dataclass(frozen=True)
class Shape:
    """A layer's experts: each has gate and up ``[2 * inner, hidden]`` and down ``[hidden, inner]``.

    Attributes:
        top_k: experts of a token.
    """

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def matmuls(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each matmul."""
        return {_GATED: (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}


_QWEN3_30B_A3B = Shape(128, 8, 2048, 768)
_DRY = Shape(4, 2, 64, 48, torch.float16)  # the interpreter has no bfloat16


@dataclass(frozen=True)
class Call:
    """Rows of one step in the order of their experts. offs: the end of each expert's rows."""

    ids: Tensor
    offs: Tensor
    num_touched: int


def draw_calls(shape: Shape, num_tokens: int, device: torch.device) -> list[Call]:
    generator = torch.Generator().manual_seed(num_tokens)
    found = []
    for _ in range(_CALLS):
        scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
        ids = scores.topk(shape.top_k).indices.flatten()
        counts = torch.bincount(ids, minlength=shape.num_experts)
        offs = counts.cumsum(0).to(device, torch.int32)
        found.append(Call(ids.to(device), offs, int((counts > 0).sum())))
    return found


def roofline_seconds(
    card: CardRates, num_rows: int, num_outs: int, k_size: int, num_touched: float
) -> tuple[float, bool]:
    """The least time of a matmul, and whether operations (not reads) determine it."""
    num_bytes = 2 * (num_touched * num_outs * k_size + num_rows * (num_outs + k_size))
    reading = num_bytes / card.read_bandwidth
    multiplying = 2 * num_rows * num_outs * k_size / card.matrix_rate
    return max(reading, multiplying), multiplying > reading


def tiles_to_try(num_tokens: int, shape: Shape, has_gate: bool) -> Iterator[Tile]:
    """Tiles for the average number of rows per expert that fit, most promising first."""
    average = num_tokens * shape.top_k / shape.num_experts
    if average <= 32:
        rows = [16] if average <= 4 else [16, 32, 64]
        swapped = [
            (64, 128, 5, 4), (64, 256, 3, 4), (64, 64, 8, 4), (128, 64, 5, 4), (128, 128, 3, 8),
            (64, 128, 3, 4), (128, 128, 4, 8), (64, 256, 4, 4), (128, 64, 8, 4), (64, 128, 7, 4),
        ]  # fmt: skip
        narrow = [(32, 128, 5, 4), (32, 256, 4, 4), (16, 256, 5, 4)]
        found = [(m, *block, True) for block, m in itertools.product(swapped, rows)]
        found += [(16, *block, False) for block in narrow]
    else:
        found = [
            (*block, False)
            for block in (
                (128, 128, 64, 4, 8), (128, 128, 64, 3, 8), (128, 256, 64, 3, 8),
                (256, 128, 64, 3, 8), (128, 64, 64, 4, 4), (128, 64, 64, 5, 8),
                (64, 128, 64, 4, 4), (256, 64, 64, 4, 8), (128, 128, 64, 4, 4),
                (128, 256, 64, 4, 8), (128, 128, 128, 2, 8), (64, 256, 64, 4, 4),
            )
        ]  # fmt: skip
    for m, n, k, stages, warps, swap in found:
        weights = 2 * n if has_gate else n
        num_shared_bytes = 2 * stages * k * (m + weights)
        if num_shared_bytes <= 226 << 10 and m * weights <= 128 * 32 * warps:
            yield Tile(
                block_m=m, block_n=n, block_k=k, num_stages=stages, num_warps=warps, swap_ab=swap
            )


class Layer:
    """Weights and rows of one layer's experts, and the times of their kernels.

    Attributes:
        device: a GPU, or the CPU to check that everything runs.
    """

    def __init__(self, shape: Shape, device: torch.device, repeats: int) -> None:
        self.shape, self.device, self.repeats = shape, device, repeats
        self.weights = {
            name: torch.randn(shape.num_experts, n, k, dtype=shape.dtype, device=device).transpose(
                1, 2
            )
            for name, (n, k) in shape.matmuls.items()
        }

    def rows(self, num_tokens: int, name: str) -> Tensor:
        k_size = self.shape.matmuls[name][1]
        num_rows = num_tokens * self.shape.top_k
        return torch.randn(num_rows, k_size, dtype=self.shape.dtype, device=self.device)

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        return seconds_of(calls, self.repeats, self.device)

    def tile_in_use(self, num_tokens: int, has_gate: bool) -> Tile:
        return choose_grouped_tile(
            num_tokens * self.shape.top_k,
            self.shape.num_experts,
            self.shape.dtype.itemsize,
            has_gate,
            Gpu.of(self.device),
        )

    def compile(self, tokens: list[int], is_sweep: bool) -> None:
        """Compile everything that is timed, in parallel."""
        for num_tokens in tokens:
            call = draw_calls(self.shape, num_tokens, self.device)[0]
            sort_by_expert(call.ids, self.shape.num_experts)
            for name, weight in self.weights.items():
                x, has_gate = self.rows(num_tokens, name), name == _GATED
                grouped_mm(x, weight, call.offs, has_gate=has_gate)
                if has_gate:
                    _apart(grouped_mm, x, weight, call.offs, has_gate)
                tiles = tiles_to_try(num_tokens, self.shape, has_gate) if is_sweep else ()
                for tile in tiles:
                    grouped_mm(x, weight, call.offs, has_gate=has_gate, tile=tile)

    def show(self, card: CardRates, num_tokens: int) -> None:
        """Print the times of both matmuls, of the same with a separate activation, of torch's,
        which have a separate activation, and of the sort."""
        calls = draw_calls(self.shape, num_tokens, self.device)
        for name, weight in self.weights.items():
            x, has_gate = self.rows(num_tokens, name), name == _GATED
            run = partial(grouped_mm, has_gate=has_gate)
            ours = self.seconds([partial(run, x, weight, c.offs) for c in calls])
            libraries = [grouped_mm] if has_gate else []
            if self.device.type == "cuda":
                functional = torch.nn.functional
                libraries.append(getattr(functional, "grouped_mm", None) or torch._grouped_mm)
            apart = [
                self.seconds([partial(_apart, f, x, weight, c.offs, has_gate) for c in calls])
                for f in libraries
            ]
            others = "".join(f"{seconds * 1e6:>10.1f}" for seconds in apart)
            others = others if has_gate else f"{'':>10}{others}"
            print(f"{num_tokens:>6} {name:<9} {self.figures(card, calls, name, x, ours)}{others}")
        num_experts = self.shape.num_experts
        ours = self.seconds([partial(sort_by_expert, c.ids, num_experts) for c in calls])
        theirs = self.seconds([partial(library_sort, c.ids, num_experts) for c in calls])
        print(f"{num_tokens:>6} {'sort':<9} {ours * 1e6:>9.1f} {'':>41}{theirs * 1e6:>10.1f}")

    def figures(
        self, card: CardRates, calls: list[Call], name: str, x: Tensor, seconds: float
    ) -> str:
        n, k = self.shape.matmuls[name]
        touched = sum(c.num_touched for c in calls) / len(calls)
        roofline, by_operations = roofline_seconds(card, len(x), n, k, touched)
        rate = 2 * len(x) * n * k / 1e12 if by_operations else touched * n * k * 2 / 1e9
        unit = "TFLOP/s" if by_operations else "GB/s"
        return (
            f"{seconds * 1e6:>9.1f} {roofline * 1e6:>8.1f} {roofline / seconds:>6.0%} "
            f"{rate / seconds:>7,.0f} {unit:<7}"
        )

    def sweep(self, card: CardRates, num_tokens: int, deadline: float) -> None:
        """Print each tile's line as it comes; tiles after ``deadline`` are skipped and counted."""
        calls = draw_calls(self.shape, num_tokens, self.device)
        for name, weight in self.weights.items():
            x, has_gate = self.rows(num_tokens, name), name == _GATED
            used = self.tile_in_use(num_tokens, has_gate)
            expected = grouped_mm(x, weight, calls[0].offs, has_gate=has_gate, tile=used)
            num_left = 0
            lines = []
            for tile in (used, *tiles_to_try(num_tokens, self.shape, has_gate)):
                if time.monotonic() > deadline:
                    num_left += 1
                    continue
                try:
                    result = grouped_mm(x, weight, calls[0].offs, has_gate=has_gate, tile=tile)
                    seconds = self.seconds(
                        [
                            partial(grouped_mm, x, weight, c.offs, has_gate=has_gate, tile=tile)
                            for c in calls
                        ]
                    )
                except Exception as error:  # of one tile, for example too much shared memory
                    lines.append((1.0, f"{tile}: {str(error).splitlines()[0][:80]}"))
                    continue
                bits = "" if torch.equal(result, expected) else "OTHER BITS"
                figures = self.figures(card, calls, name, x, seconds)
                mark = "(in use)" if tile is used else ""
                lines.append((seconds, f"{figures} {describe(tile)} {mark} {bits}"))
            print(
                f"\n{num_tokens} tokens, {name}:", *(text for _, text in sorted(lines)), sep="\n  "
            )
            if num_left:
                print(f"  no time for {num_left} tiles")


def describe(tile: Tile) -> str:
    swapped = " swapped" if tile.swap_ab else ""
    return (
        f"{tile.block_m} x {tile.block_n} x {tile.block_k}, {tile.num_stages} stages, "
        f"{tile.num_warps} warps{swapped}"
    )


def _apart(
    multiply: Callable[..., Tensor], x: Tensor, weight: Tensor, offs: Tensor, has_gate: bool
) -> Tensor:
    """The matmul, and the activation after it in a separate kernel."""
    out = multiply(x, weight, offs=offs)
    return act_mul(*out.chunk(2, 1), "silu") if has_gate else out


def library_sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The operations of transformers that :func:`sort_by_expert` replaces."""
    found, order = torch.sort(ids)
    counted = found.int() if ids.is_cuda else found.float()
    counts = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
    return order, counts.cumsum(0, dtype=torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 8192])
    parser.add_argument("--sweep", action="store_true", help="other tiles, too")
    parser.add_argument("--seconds", type=float, default=60.0, help="no tile is tried after these")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="a tiny shape, on a CPU")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    card = rates_of_this_process()
    print(card)
    if options.dry:
        tokens = [1, 3]
        layer = Layer(_DRY, torch.device("cpu"), 1)
    else:
        tokens = options.tokens
        layer = Layer(_QWEN3_30B_A3B, torch.device("cuda"), options.repeats)
        begin = time.monotonic()
        pin_triton_cache_dir()
        with compilers() as pool:
            pool.start()
            with parallel_build(layer.device) as report:
                layer.compile(tokens, options.sweep)
        print(f"{report.num_compiled} kernels compiled in {time.monotonic() - begin:.1f} s")
    heads = f"{'us':>9} {'roofline':>8} {'of it':>6} {'':>15}{'apart':>10}{'torch':>10}"
    print(f"\n{'tokens':>6} {'':<9} {heads}")
    for num_tokens in tokens:
        layer.show(card, num_tokens)
    for num_tokens in tokens if options.sweep else ():
        layer.sweep(card, num_tokens, deadline)


if __name__ == "__main__":
    main()
