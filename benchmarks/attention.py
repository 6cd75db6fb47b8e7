"""Paged attention alone on a GPU: TFLOP/s of prefill and GB/s of KV in decode, in one table.

    python -m benchmarks.attention [--rows 1 64] [--contexts 1024 8192] [--block-size 16]

Prefill of one prompt counts the FLOPs of visible (query, key) pairs. Its columns compare with the
GPU's matmul rate, with torch's SDPA (its FlashAttention and cuDNN; without pages, a layer's keys
and values are contiguous), and with flash-attn-4 if it is installed. Decode counts every byte of K
and V once, compared with the GPU's plain read (:mod:`benchmarks.card`). The blocks of a row are
scattered. Each CUDA graph has several calls, which share lengths and block tables as the layers of
a model do, over caches that together exceed the L2 cache. Figures are medians of replays. Caches
that do not fit the free memory are skipped. "fp8" is the same over caches of e4m3 values.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import argparse
import importlib.metadata
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.card import CardRates, rates_of_this_process
from benchmarks.gpu_timing import median_of_runs, median_seconds
from pagespec.errors import InvalidInputError
from pagespec.kernels import e4m3
from pagespec.kernels.arguments import AttentionParams, PagedKV
from pagespec.kernels.attention import flash
from pagespec.kernels.attention.backend import AttentionBackend, select_backend
from pagespec.kernels.jit.compile_pool import compilers
from pagespec.kernels.jit.parallel_build import parallel_build, pin_triton_cache_dir

_POOL_BYTES = 400 << 20  # several times the L2 cache of any GPU
_LONG_CALL = 1 << 15  # prompts from this length on take so long that only few calls are timed
PREFILL_CONTEXTS = (2048, 8192, 32_768, 131_072)
DECODE_ROWS = (1, 8, 64, 256, 512)
DECODE_CONTEXTS = (1024, 8192, 32_768, 131_072)
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Rows of random lengths around ``context``: each with one new token, or with all tokens new.

    Attributes:
        spread: lengths are uniform in ``context * (1 - spread)`` to ``context * (1 + spread)``.
        is_fp8: whether the caches contain planes of e4m3 values.

    For its other attributes see :class:`pagespec.kernels.attention.attention_spec.AttentionSpec`.
    """

    name: str
    num_rows: int
    context: int
    num_q_heads: int
    num_kv_heads: int
    spread: float = 0.0
    head_dim: int = 128
    is_prefill: bool = False
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    chunk: int = 0
    alibi_slopes: tuple[float, ...] = ()
    num_chosen: int = 0
    is_fp8: bool = False

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

    def kv_bytes(self) -> int:
        """Bytes of K and V, including scales."""
        size = self.head_dim * DTYPE.itemsize
        if self.is_fp8:
            size = self.head_dim + e4m3.SCALE_BYTES
        return sum(self.lengths()) * self.num_kv_heads * 2 * size

    def flops(self) -> int:
        """FLOPs of a causal prefill: two matmuls with ``2 * head_dim`` operations per visible
        pair."""
        pairs = 0
        for n in self.lengths():
            hidden = max(0, n - self.window) if self.window else 0
            pairs += n * (n + 1) // 2 - hidden * (hidden + 1) // 2
        return 4 * self.head_dim * self.num_q_heads * pairs


def inputs(
    case: Case, block_size: int, *, device: str = "cuda", num_layers: int | None = None
) -> list[tuple]:
    """Arguments of ``paged_attention`` for each layer of a step.

    Args:
        num_layers: None for as many as exceed the L2 cache, at least two.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = case.lengths()
    needed = [math.ceil(n / block_size) for n in lengths]
    num_blocks = sum(needed)
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    # Space for contexts twice as long, as in an engine's tables.
    tables = torch.full((len(lengths), 2 * max(needed)), num_blocks, dtype=torch.int32)
    for row, blocks in enumerate(order.split(needed)):
        tables[row, : len(blocks)] = blocks
    new = torch.tensor(lengths if case.is_prefill else [1] * len(lengths))
    metadata = (
        torch.cat([torch.zeros(1, dtype=torch.long), new.cumsum(0)]).to(device, torch.int32),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(device),
        torch.arange(len(tables), dtype=torch.int32, device=device),
    )

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=DTYPE, device=device)

    def cache() -> Tensor:
        heads = (num_blocks + 1, block_size, case.num_kv_heads)
        if not case.is_fp8:
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
        for _ in range(num_layers or max(2, math.ceil(_POOL_BYTES / case.kv_bytes())))
    ]


def small_form(case: Case, block_size: int) -> tuple:
    """Arguments of a call that needs the kernels of ``case`` but has small caches: kernel variants
    depend on rows and on the width of the table, not on contexts."""
    if case.is_prefill:
        return inputs(replace(case, context=64), block_size, num_layers=1)[0]
    small = replace(case, context=16, spread=0.0)
    (query, kv, params), *_ = inputs(small, block_size, num_layers=1)
    width = 2 * -(-round(case.context * (1 + case.spread)) // block_size)
    table = kv.block_tables[:, :1].expand(-1, width).contiguous()
    return query, kv._replace(block_tables=table), params


def backend_of(name: str, case: Case, block_size: int) -> AttentionBackend | str:
    """The backend that supports ``case``, or the reason why it does not."""
    try:
        return select_backend(
            name,
            device=torch.device("cuda"),
            dtype=DTYPE,
            specs=[case],
            block_size=block_size,
        )
    except InvalidInputError as error:
        return f"{name}: {error.limit}"


def attention_seconds(backend: AttentionBackend, case: Case, layers: list[tuple]) -> float:
    """Seconds of one layer."""

    def call_of(layer: tuple) -> Callable[[], Tensor]:
        return lambda: backend.attend(*layer)

    if case.is_prefill and case.context >= _LONG_CALL:
        return median_of_runs(call_of(layers[0]), 3, 1)
    return median_seconds([call_of(layer) for layer in layers], 7)


def sdpa_seconds(case: Case, backend: SDPBackend) -> float | None:
    """Seconds of torch's attention over one prompt of ``case``; None if this backend does not
    support it."""

    def heads(count: int) -> Tensor:
        return torch.randn(1, count, case.context, case.head_dim, dtype=DTYPE, device="cuda")

    query, key, value = heads(case.num_q_heads), heads(case.num_kv_heads), heads(case.num_kv_heads)

    def call() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    try:
        with sdpa_kernel(backend):
            repeats = (3, 1) if case.context >= _LONG_CALL else (7, 3)
            return median_of_runs(call, *repeats)
    except RuntimeError:
        return None


def environment() -> str:
    versions = [f"torch {torch.__version__}"]
    for name in ("triton", *flash.LIBRARIES):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    dtype = str(DTYPE).removeprefix("torch.")
    return ", ".join([torch.cuda.get_device_name(), *versions, dtype])


class Table:
    """Prints the lines as they are measured.

    Attributes:
        heads: of queries and of keys. notes: reasons why a library was not timed, once each.
    """

    def __init__(self, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
        self.heads, self.head_dim, self.block_size = heads, head_dim, block_size
        self.card: CardRates = rates_of_this_process()
        self.notes: dict[str, None] = {}

    def prefill_case(self, context: int) -> Case:
        name = f"prefill 1 x {context:,}"
        return Case(name, 1, context, *self.heads, head_dim=self.head_dim, is_prefill=True)

    def decode_case(self, num_rows: int, context: int) -> Case:
        name = f"decode {num_rows} x {context:,}"
        return Case(name, num_rows, context, *self.heads, head_dim=self.head_dim)

    def compile(self, cases: list[Case]) -> None:
        """Compile the kernels of all cases in parallel."""
        begin = time.monotonic()
        pin_triton_cache_dir()
        with compilers() as pool:
            pool.start()
            with parallel_build(torch.device("cuda")) as report:
                for case in cases:
                    backend = backend_of("triton", case, self.block_size)
                    if isinstance(backend, AttentionBackend):
                        backend.attend(*small_form(case, self.block_size))
        took = time.monotonic() - begin
        print(f"{report.num_compiled} kernels compiled in {took:.1f} s", flush=True)

    def seconds(self, name: str, case: Case) -> float | None:
        """Seconds of one layer with a pagespec backend, or None if it does not support ``case``."""
        backend = backend_of(name, case, self.block_size)
        if isinstance(backend, str):
            self.notes[backend] = None
            return None
        count = max(1, math.ceil(_POOL_BYTES / case.kv_bytes()))
        layers = inputs(case, self.block_size, num_layers=2 if case.is_prefill else count)
        return attention_seconds(backend, case, layers)

    def show_prefill(self, contexts: list[int]) -> None:
        print(
            f"\n{'prefill, TFLOP/s':<20} {'ms':>9} {'pagespec':>9} {'of rate':>8} {'fp8':>5} "
            f"{'SDPA flash':>11} {'SDPA cuDNN':>11} {'library':>9}"
        )
        for context in contexts:
            case = self.prefill_case(context)
            ours = self.seconds("triton", case)
            if ours is None:
                continue
            rate = case.flops() / ours
            line = (
                f"1 x {context:<16,} {ours * 1e3:>9.2f} {rate / 1e12:>9.0f} "
                f"{rate / self.card.matrix_rate:>8.0%}"
            )
            fp8 = self.seconds("triton", replace(case, is_fp8=True))
            line += f" {case.flops() / fp8 / 1e12:>5.0f}" if fp8 else f" {'-':>5}"
            others = [
                (11, sdpa_seconds(case, SDPBackend.FLASH_ATTENTION)),
                (11, sdpa_seconds(case, SDPBackend.CUDNN_ATTENTION)),
                (9, self.seconds("flash", case)),
            ]
            for width, theirs in others:
                line += (
                    f" {case.flops() / theirs / 1e12:>{width}.0f}" if theirs else " " * width + "-"
                )
            print(line, flush=True)
            torch.cuda.empty_cache()

    def show_decode(self, rows: list[int], contexts: list[int]) -> None:
        """Print GB/s and the fraction of the plain read; further lines for e4m3 caches and for a
        library."""
        print(f"\n{'decode, GB/s':<20}" + "".join(f"{n:>17,}" for n in contexts))
        for num_rows in rows:
            labels = {"triton": f"{num_rows} rows", "fp8": "  fp8", "flash": "  by a library"}
            for name, label in labels.items():
                cells = [self._decode_cell(name, num_rows, n) for n in contexts]
                if any(cells):
                    print(
                        f"{label:<20}" + "".join(f"{cell or '-':>17}" for cell in cells), flush=True
                    )

    def _decode_cell(self, name: str, num_rows: int, context: int) -> str:
        """Empty if the caches do not fit, or no such library supports the case."""
        case = replace(self.decode_case(num_rows, context), is_fp8=name == "fp8")
        free, _ = torch.cuda.mem_get_info()
        if case.kv_bytes() > 0.9 * free:
            return ""
        seconds = self.seconds("triton" if case.is_fp8 else name, case)
        torch.cuda.empty_cache()
        if seconds is None:
            return ""
        rate = case.kv_bytes() / seconds
        return f"{rate / 1e9:,.0f} {rate / self.card.read_bandwidth:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, nargs="*", default=PREFILL_CONTEXTS)
    parser.add_argument("--rows", type=int, nargs="*", default=DECODE_ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=DECODE_CONTEXTS)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    table = Table(tuple(options.heads), options.head_dim, options.block_size)
    print(table.card)
    print(
        f"{environment()}; {options.heads[0]} query heads and {options.heads[1]} KV heads of "
        f"{options.head_dim}, blocks of {options.block_size}"
    )
    cases = [table.prefill_case(n) for n in options.prompts]
    cases += [table.decode_case(r, n) for r in options.rows for n in options.contexts]
    table.compile([replace(case, is_fp8=x) for case in cases for x in (False, True)])
    table.show_prefill(list(options.prompts))
    table.show_decode(list(options.rows), list(options.contexts))
    print(*table.notes, sep="\n")


if __name__ == "__main__":
    main()
