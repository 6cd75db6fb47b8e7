"""Paged attention on a GPU: GB/s of KV for decode, TFLOP/s for prefill.

    python -m benchmarks.attention [--block-sizes 16 64 256] [--repeats 10]

Every implementation that can serve a case is timed: the Triton kernels, on caches of bfloat16 and
of e4m3 ("fp8"), FlashAttention where it is installed, and for prefill the reference in plain torch.
Decode counts every byte of K and V once, scales among them, beside the copy bandwidth of the same
run; prefill counts the products of visible (query, key)
pairs. Blocks of a row lie scattered. Each CUDA graph holds several calls, which share lengths and
block tables as the layers of a model do, over caches that together are larger than the L2 cache;
figures are medians of replays. The reference waits for the device and cannot be captured: its calls
are timed as they come.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagespec.errors import InvalidInputError
from pagespec.kernels import e4m3
from pagespec.kernels.arguments import AttentionParams, PagedKV
from pagespec.kernels.attention import flash
from pagespec.kernels.attention.backend import AttentionBackend, select_backend

_POOL_BYTES = 400 << 20  # eight times the L2 of an H100
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Rows of random lengths around ``context``; one new token each, or all of them.

    Attributes:
        spread: lengths are uniform in ``context * (1 - spread)`` to ``context * (1 + spread)``.
        target: GB/s that decode of this case should reach on an H100, 0 for none.

    Its other attributes are those of an attention call of a model, as
    :class:`pagespec.kernels.attention.spec.AttentionSpec` has them.
    """

    name: str
    num_rows: int
    context: int
    num_q_heads: int
    num_kv_heads: int
    spread: float = 0.0
    head_dim: int = 128
    is_prefill: bool = False
    target: int = 0
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def k_dim(self) -> int:
        return self.head_dim

    @property
    def v_dim(self) -> int:
        return self.head_dim

    def lengths(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        factors = 1 + self.spread * (2 * torch.rand(self.num_rows, generator=generator) - 1)
        return [round(self.context * f) for f in factors.tolist()]

    def kv_bytes(self, is_fp8: bool = False) -> int:
        size = self.head_dim + e4m3.SCALE_BYTES if is_fp8 else self.head_dim * DTYPE.itemsize
        return sum(self.lengths()) * self.num_kv_heads * 2 * size

    def flops(self) -> int:
        """Of a causal prefill: two products of ``2 * head_dim`` operations a visible pair."""
        pairs = sum(n * (n + 1) // 2 for n in self.lengths())
        return 4 * self.head_dim * self.num_q_heads * pairs


CASES = [
    Case("256 x ~0.8k, 16/8", 256, 800, 16, 8, spread=0.25, target=2650),
    Case("64 x ~1.5k, 32/8", 64, 1500, 32, 8, spread=0.25, target=2550),
    Case("1 x 8k, 32/8", 1, 8192, 32, 8, target=1800),
    Case("prefill 8 x 2k, 32/8", 8, 2048, 32, 8, is_prefill=True),
]


def inputs(
    case: Case,
    block_size: int,
    *,
    device: str = "cuda",
    num_layers: int | None = None,
    is_fp8: bool = False,
) -> list[tuple]:
    """Arguments of ``paged_attention`` for each layer of a step.

    Args:
        is_fp8: whether the caches hold planes of e4m3 numbers.
        num_layers: None for as many as make the caches larger than the L2 cache.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = case.lengths()
    needed = [math.ceil(n / block_size) for n in lengths]
    num_blocks = sum(needed)
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    # Room for contexts twice as long, as an engine's tables have.
    tables = torch.full((len(lengths), 2 * max(needed)), num_blocks, dtype=torch.int32)
    for row, blocks in enumerate(order.split(needed)):
        tables[row, : len(blocks)] = blocks
    new = torch.tensor(lengths if case.is_prefill else [1] * len(lengths))
    metadata = (
        torch.cat([torch.zeros(1, dtype=torch.long), new.cumsum(0)]).to(device, torch.int32),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(device),
    )

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=DTYPE, device=device)

    def cache() -> Tensor:
        heads = (num_blocks + 1, block_size, case.num_kv_heads)
        if not is_fp8:
            return normal(*heads, case.head_dim)
        sizes = (*heads, case.head_dim + e4m3.SCALE_BYTES)
        planes = torch.zeros(sizes, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        vectors, scales = e4m3.planes_of(planes)
        vectors.random_(0, 120)
        scales.fill_(1e-2)
        return planes

    return [
        (
            normal(int(new.sum()), case.num_q_heads, case.head_dim),
            PagedKV(*(cache() for _ in "kv"), *metadata),
            AttentionParams(case.head_dim**-0.5, case.window, case.softcap),
        )
        for _ in range(num_layers or max(2, math.ceil(_POOL_BYTES / case.kv_bytes(is_fp8))))
    ]


def median_seconds(calls: list[Callable[[], object]], repeats: int) -> float:
    """Of one call: all are captured in one graph, whose replays are timed with events."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _median_seconds(graph.replay, repeats) / len(calls)


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for repeat in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def attention_seconds(choice: AttentionBackend, layers: list[tuple], repeats: int) -> float:
    """Of one layer."""

    def call_of(layer: tuple) -> Callable[[], Tensor]:
        return lambda: choice.attend(*layer)

    if not choice.capturable:
        return _median_seconds(call_of(layers[0]), min(repeats, 3))
    return median_seconds([call_of(layer) for layer in layers], repeats)


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, bytes read and bytes written counted."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    # Not in a graph: there it would be a copy node, which is slower than the kernel.
    times = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[3:]) / 1e9


def implementations(case: Case, block_size: int) -> tuple[dict[str, AttentionBackend], list[str]]:
    """Those that can serve the case, and why the others cannot."""
    found, missing = {}, []
    for name in ("triton", "flash", "reference") if case.is_prefill else ("triton", "flash"):
        try:
            found[name] = select_backend(
                name,
                device=torch.device("cuda"),
                dtype=DTYPE,
                specs=[case],
                block_size=block_size,
                transparent=False,
            )
        except InvalidInputError as error:
            missing.append(f"{name}, block size {block_size}: {error.limit}")
    return found, missing


def environment() -> str:
    versions = [f"torch {torch.__version__}"]
    for name in ("triton", *flash.LIBRARIES):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    dtype = str(DTYPE).removeprefix("torch.")
    return ", ".join([torch.cuda.get_device_name(), *versions, dtype])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    copy = copy_bandwidth()
    print(environment())
    print(f"copy: {copy:,.0f} GB/s\n")
    print(
        f"{'case':<21} {'by':<10} {'block':>5} {'us':>9} {'GB/s':>7} {'of copy':>7} {'target':>7} "
        f"{'TFLOP/s':>8}"
    )
    notes: dict[str, None] = {}
    for case in CASES:
        for block_size in options.block_sizes:
            found, missing = implementations(case, block_size)
            notes.update(dict.fromkeys(missing))
            if "triton" in found:
                found["triton fp8"] = found["triton"]
            layers: list[tuple] = []
            for name, choice in found.items():
                is_fp8 = name.endswith("fp8")
                if not layers or is_fp8:
                    del layers
                    layers = inputs(case, block_size, is_fp8=is_fp8)
                seconds = attention_seconds(choice, layers, options.repeats)
                row = f"{case.name:<21} {name:<10} {block_size:>5} {seconds * 1e6:>9.1f} "
                if case.is_prefill:
                    row += f"{'':>23} {case.flops() / seconds / 1e12:>8.0f}"
                else:
                    rate = case.kv_bytes(is_fp8) / seconds / 1e9
                    row += f"{rate:>7,.0f} {rate / copy:>7.2f} {case.target:>7,}"
                print(row, flush=True)
            del layers
            torch.cuda.empty_cache()
    print(*notes, sep="\n")


if __name__ == "__main__":
    main()
