"""Try parameters of the attention kernels on this GPU, one by one and in combination.

    python -m benchmarks.attention_sweep [--only 0.8k 1.5k prefill ...] [--seconds 60] [--fp8]
    TRITON_INTERPRET=1 python -m benchmarks.attention_sweep --dry     # tiny shapes, on a CPU

First all variants are compiled in parallel in other processes. Then each is timed on each shape, as
in :mod:`benchmarks.attention`. The same run also times a plain read, and a read of the same blocks
without computation, for several numbers of heads per program. That read bounds every decode kernel.

A variant is marked if its outputs differ from the present kernel's in any bit. Variants with other
tiles or splits have other bits by design: adopting one changes the order of summation of all
kernels (docs/transparency.md). The most promising variants come first. Variants that the time does
not suffice for are listed. ``--fp8`` is the same over caches of e4m3 values, without the read of
blocks.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --dry runs on a CPU")  # before torch is imported

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import attention
from benchmarks.attention import Case, inputs, small_form
from benchmarks.plain_read import plain_read, seconds_of
from pagespec.kernels.attention.launch import paged_attention
from pagespec.kernels.attention.tiling import Tiling, choose_tiling
from pagespec.kernels.attention.triton_backend import longest_first
from pagespec.kernels.jit.compile_pool import compilers
from pagespec.kernels.jit.parallel_build import parallel_build, pin_triton_cache_dir
from pagespec.kernels.registry import registry

DECODE = [
    Case("256 x ~0.8k, 16/8", 256, 800, 16, 8, spread=0.25),
    Case("64 x ~1.5k, 32/8", 64, 1500, 32, 8, spread=0.25),
    Case("1 x 8k, 32/8", 1, 8192, 32, 8),
    Case("8 x ~3k, 32/8", 8, 3000, 32, 8, spread=0.25),
    Case("32 x ~3k, 32/8", 32, 3000, 32, 8, spread=0.25),
    Case("128 x ~1k, 32/8", 128, 1000, 32, 8, spread=0.25),
    Case("512 x ~0.8k, 16/8", 512, 800, 16, 8, spread=0.25),
    Case("32 x 8k, 32/8", 32, 8192, 32, 8),
    Case("1 x 32k, 32/8", 1, 32768, 32, 8),
]
PREFILL = [
    Case("prefill 1 x 8k, 16/8", 1, 8192, 16, 8, is_prefill=True),
    Case("prefill 8 x 2k, 32/8", 8, 2048, 32, 8, is_prefill=True),
    Case("prefill 1 x 8k, 16/8, window 1k", 1, 8192, 16, 8, is_prefill=True, window=1024),
    Case("prefill 1 x 8k, 16/8, softcap", 1, 8192, 16, 8, is_prefill=True, softcap=50.0),
    Case("prefill 1 x 8k, 32/32 of 96", 1, 8192, 32, 32, is_prefill=True, head_dim=96),
    Case("prefill 1 x 8k, 16/8 of 256", 1, 8192, 16, 8, is_prefill=True, head_dim=256),
    Case(
        "prefill 1 x 8k, 16/8 of 256, window 1k",
        1, 8192, 16, 8, is_prefill=True, head_dim=256, window=1024,
    ),
]  # fmt: skip
_DRY = [
    Case("3 x ~40, 4/2", 3, 40, 4, 2, spread=0.25, head_dim=16),
    Case("1 x 150, 4/2", 1, 150, 4, 2, head_dim=16),
    Case("prefill 2 x 20, 4/2", 2, 20, 4, 2, head_dim=16, is_prefill=True),
]
_MANY = 1 << 30

# Changes of the tiling. The first group changes no bits, the last one does.
_SAME_BITS: dict[str, dict[str, Any]] = {
    "any registers": {"unsplit_registers": None},
    "8 warps": {"decode_warps": 8, "many_warps": 8},
    "4 warps": {"many_warps": 4},
    "2 warps": {"decode_warps": 2, "many_warps": 2},
    "1 warp": {"decode_warps": 1, "many_warps": 1},
    "128 registers": {"decode_registers": 128, "unsplit_registers": 128},
    "4 stages": {"decode_stages": 4},
    "1,024 programs at most": {"max_programs": 1024},
}
_OTHER_BITS: dict[str, dict[str, Any]] = {
    "near 256": {"near_split": 256},
    "far 1,024": {"far_split": 1024},
}
_ALLOCATED_ROWS = 2048  # arrival counters, also for "never unsplit"


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    k_words, v_words, out, contexts, tables, table_stride,
    HKV: tl.constexpr, WORDS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Read what a decode program reads, SEGMENT positions of HEADS heads, and compute nothing.

    Grid: ``(HKV // HEADS * segments, rows)``; WORDS: 4-byte words per head.
    """
    GROUPS: tl.constexpr = HKV // HEADS
    row = tl.program_id(1)
    head = tl.program_id(0) % GROUPS * HEADS
    begin = tl.program_id(0) // GROUPS * SEGMENT
    context = tl.load(contexts + row)
    if begin >= context:
        return
    end = tl.minimum(begin + SEGMENT, context)
    words = tl.arange(0, HEADS * WORDS)
    total = tl.zeros((BLOCK_N, HEADS * WORDS), tl.int32)
    for start in range(begin, end, BLOCK_N):
        positions = tl.minimum(start + tl.arange(0, BLOCK_N), context - 1)
        blocks = tl.load(tables + row * table_stride + positions // PAGE).to(tl.int64)
        slots = (blocks * PAGE + positions % PAGE) * (HKV * WORDS) + head * WORDS
        at = slots[:, None] + words[None, :]
        total ^= tl.load(k_words + at) ^ tl.load(v_words + at)
    program = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + program, tl.xor_sum(tl.xor_sum(total, 1), 0))


def gather_call(layer: tuple, heads: int) -> Callable[[], object]:
    """Reads the blocks of a layer, with ``heads`` heads per program."""
    kv = layer[1]
    page, num_kv_heads, _ = kv.k_cache.shape[1:]
    k_words, v_words = (cache.view(torch.int32) for cache in kv[:2])
    segment = 512
    num_segments = -(-int(kv.context_lens.max()) // segment)
    grid = (num_kv_heads // heads * num_segments, len(kv.context_lens))
    out = torch.empty(grid[0] * grid[1], dtype=torch.int32, device=kv.k_cache.device)
    return lambda: _gather_kernel[grid](
        k_words, v_words, out, kv.context_lens, kv.block_tables, kv.block_tables.stride(0),
        HKV=num_kv_heads, WORDS=k_words.shape[3], HEADS=heads, PAGE=page, SEGMENT=segment,
        BLOCK_N=max(1, 64 // heads),
    )  # fmt: skip


def attention_call(
    layer: tuple, tiling: Tiling, counters: Tensor, order: Tensor | None = None
) -> Callable[[], object]:
    query, kv, params = layer
    return lambda: paged_attention(query, kv, params, tiling, counters, order=order)


@dataclasses.dataclass
class Outcome:
    """The result of a variant on one shape. ``bits``: "" if they equal those of the present
    kernel."""

    name: str
    rate: float
    seconds: float
    bits: str


class Sweep:
    """One run: device, shapes, variants, and the time at which it must end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.is_dry: bool = options.dry
        self.device = torch.device("cpu" if self.is_dry else "cuda")
        self.repeats: int = 1 if self.is_dry else options.repeats
        self.block_size: int = options.block_size
        self.seconds: float = options.seconds
        self.deadline = 0.0  # set after the compilation
        if self.is_dry:
            self.cases = _DRY
            attention.DTYPE = torch.float16  # the interpreter has no bfloat16
        else:
            self.cases = [
                dataclasses.replace(case, is_fp8=options.fp8)
                for case in [*DECODE, *PREFILL]
                if any(part in case.name for part in options.only)
            ]
        self.left_out: list[str] = []

    def variants_of(self, case: Case) -> dict[str, Tiling]:
        """By name, the present one first."""
        cache_dtype = torch.float8_e4m3fn if case.is_fp8 else None
        base = choose_tiling(attention.DTYPE, case.head_dim, case.head_dim, cache_dtype)
        changes = {} if case.is_prefill else _SAME_BITS | _OTHER_BITS
        found = {"present": base}
        if self.is_dry:
            changes = {name: changes[name] for name in [*changes][::3]}
        for name, change in changes.items():
            tiling = dataclasses.replace(base, **change)
            if tiling != base and tiling.near_split % tiling.block_n == 0:
                found[name] = tiling
        return found

    def counters(self) -> Tensor:
        return torch.zeros(_ALLOCATED_ROWS * 8, dtype=torch.int32, device=self.device)

    def compile(self) -> None:
        """Compile all variants of all shapes, on small caches: contexts do not create new kernel
        variants."""
        if self.is_dry:
            return
        begin = time.monotonic()
        pin_triton_cache_dir()
        with compilers() as pool:
            pool.start()
            with parallel_build(self.device) as report:
                for case in self.cases:
                    query, kv, params = small_form(case, self.block_size)
                    for tiling in self.variants_of(case).values():
                        paged_attention(query, kv, params, tiling, self.counters())
                    if case.is_prefill:
                        with registry().changed(without=("prefill_attention",)):
                            paged_attention(query, kv, params, tiling, self.counters())
                    if not (case.is_prefill or case.is_fp8):
                        for heads in (1, 2):
                            gather_call((query, kv, params), heads)()
                plain_read(self.device, 1 << 20, 0)
        took = time.monotonic() - begin
        print(f"{report.num_compiled} kernels compiled in {took:.1f} s", flush=True)

    def time_variants(self, case: Case, layers: list[tuple]) -> Iterator[Outcome]:
        """Time as many as possible, and at the end the present one again."""
        counters = self.counters()
        expected = None
        variants = self.variants_of(case)
        for name, tiling in [*variants.items(), ("present, again", variants["present"])]:
            if time.monotonic() > self.deadline and expected is not None:
                self.left_out.append(f"{case.name}: {name}")
                continue
            try:
                yield self._outcome(case, layers, name, tiling, counters, expected)
            except Exception as error:  # of one variant, for example too much shared memory
                print(f"{case.name}: {name}: {str(error).splitlines()[0][:120]}", flush=True)
                counters = self.counters()
            if expected is None:
                query, kv, params = layers[0]
                expected = paged_attention(query, kv, params, tiling, counters)

    def _outcome(
        self,
        case: Case,
        layers: list[tuple],
        name: str,
        tiling: Tiling,
        counters: Tensor,
        expected: Tensor | None,
    ) -> Outcome:
        query, kv, params = layers[0]
        result = paged_attention(query, kv, params, tiling, counters)
        is_same = expected is None or torch.equal(result, expected)
        bits = "" if is_same else _difference(result, expected)
        calls = [attention_call(layer, tiling, counters) for layer in layers]
        return self.outcome(case, name, calls, bits)

    def outcome(
        self, case: Case, name: str, calls: list[Callable[[], object]], bits: str = ""
    ) -> Outcome:
        seconds = seconds_of(calls, self.repeats, self.device)
        work = case.flops() / 1e3 if case.is_prefill else case.kv_bytes()
        return Outcome(name, work / seconds / 1e9, seconds, bits)

    def run_case(self, case: Case, read: float) -> None:
        """Print the results of a shape as they come, and again at the end, fastest first."""
        num_layers = 1 if self.is_dry else None
        if case.is_prefill:
            num_layers = 1 if self.is_dry else 2
        layers = inputs(case, self.block_size, device=self.device.type, num_layers=num_layers)
        found: list[Outcome] = []
        print(f"\n{case.name}, as they come, us", flush=True)
        for outcome in self.outcomes(case, layers):
            found.append(outcome)
            print(f"  {outcome.seconds * 1e6:>9.1f}  {outcome.name} {outcome.bits}", flush=True)
        unit = "TFLOP/s" if case.is_prefill else "GB/s"
        print(f"\n{case.name}: {unit}, {'' if case.is_prefill else 'of the plain read, '}us")
        for outcome in sorted(found, key=lambda outcome: -outcome.rate):
            share = "" if case.is_prefill else f"{outcome.rate / read:>6.2f}"
            print(
                f"  {outcome.rate:>7,.0f} {share} {outcome.seconds * 1e6:>9.1f}  "
                f"{outcome.name:<40} {outcome.bits}",
                flush=True,
            )
        if not self.is_dry:
            torch.cuda.empty_cache()

    def outcomes(self, case: Case, layers: list[tuple]) -> Iterator[Outcome]:
        counters, base = self.counters(), self.variants_of(case)["present"]
        if not (case.is_prefill or case.is_fp8):
            for heads in (1, 2):
                calls = [gather_call(layer, heads) for layer in layers]
                yield self.outcome(case, f"(blocks alone, {heads} heads)", calls)
        yield from self.time_variants(case, layers)
        if case.is_prefill:
            with registry().changed(without=("prefill_attention",)):
                calls = [attention_call(layer, base, counters) for layer in layers]
                yield self.outcome(case, "(not Hopper's kernel)", calls)
        if not case.is_prefill and case.spread:
            order = longest_first(layers[0][1].context_lens, case.num_kv_heads)
            ordered = [attention_call(layer, base, counters, order) for layer in layers]
            yield self.outcome(case, "(present, longest rows first)", ordered)

    def run(self) -> None:
        self.compile()
        self.deadline = time.monotonic() + self.seconds
        num_bytes = 1 << (12 if self.is_dry else 31)
        read = plain_read(self.device, num_bytes, self.repeats)
        print(f"plain read: {read:,.0f} GB/s")
        for case in self.cases:
            self.run_case(case, read)
        if self.left_out:
            print("\nno time for:", *self.left_out, sep="\n  ")


def _difference(result: Tensor, expected: Tensor | None) -> str:
    assert expected is not None
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    return f"OTHER BITS, relative {error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[" x "], help="parts of names of shapes")
    parser.add_argument("--seconds", type=float, default=60.0, help="none begins after these")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--fp8", action="store_true", help="caches of e4m3 numbers")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, interpreted on a CPU")
    options = parser.parse_args()
    if not options.dry:
        print(attention.environment())
    Sweep(options).run()


if __name__ == "__main__":
    main()
