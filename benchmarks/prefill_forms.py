"""Prefill attention for Hopper with other orders of summation: TFLOP/s, and errors of the outputs.

    python -m benchmarks.prefill_forms [--only 8k ...] [--forms tile ...] [--block-size 16]

The forms are those of :mod:`benchmarks.prefill_forms_kernel`; docs/notes/attention.md has results.
First all forms are compiled in parallel. Then their outputs for three short prompts are compared
with a float32 reference. Each shape is timed by single calls and by graphs of several calls that
are replayed without a pause, twice in opposite order. cuDNN reads contiguous keys and values.

``exp2`` is checked as well: integer maxima need ``exp2(x - k)`` to be ``exp2(x) / 2^k`` in every
bit.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import argparse
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import attention
from benchmarks.attention import Case, inputs
from benchmarks.gpu_timing import median_of_runs
from benchmarks.prefill_forms_kernel import form_kernel
from pagespec.kernels.attention import prefill_sm90
from pagespec.kernels.attention.launch import factors, shared_arguments
from pagespec.kernels.attention.tiling import choose_tiling
from pagespec.kernels.device import count_sms, vector_strides
from pagespec.kernels.jit.compile_pool import compilers
from pagespec.kernels.jit.parallel_build import parallel_build, pin_triton_cache_dir

_TWO = {
    "WARPGROUPS": 2, "UNIT": 128, "ORDER": "late", "SUMS": "added",
    "TOTALS": "none", "MAXIMA": "exact", "SPLIT": 512, "CHANGE": 8192, "K_SLOTS": 3, "V_SLOTS": 3,
}  # fmt: skip
_THREE = _TWO | {"WARPGROUPS": 3, "ORDER": "serial", "V_SLOTS": 2}
PRESENT = "present"
FORMS: dict[str, dict[str, Any]] = {
    "two warpgroups, late": _TWO,
    "three": _THREE,
    "three, sums by matmul": _THREE | {"SUMS": "matmul"},
    "three, sums by warpgroup": _THREE | {"SUMS": "warpgroup"},
    "three, unit of 64": _THREE | {"UNIT": 64, "K_SLOTS": 5, "V_SLOTS": 5},
    "three, integer maxima": _THREE | {"MAXIMA": "integer"},
    "three, totals in L2, 512 and 2,048": _THREE | {"TOTALS": "l2"},
    "three, totals in L2, 512": _THREE | {"TOTALS": "l2", "CHANGE": 1 << 30},
    "three, totals in L2, 2,048": _THREE | {"TOTALS": "l2", "SPLIT": 2048, "CHANGE": 1 << 30},
    "three, tile": _THREE | {"TOTALS": "tile"},
    "three, tile, integer maxima": _THREE | {"TOTALS": "tile", "MAXIMA": "integer"},
}
CASES = [
    Case("1 x 8k, 32/8", 1, 8192, 32, 8, is_prefill=True),
    Case("1 x 32k, 32/8", 1, 32_768, 32, 8, is_prefill=True),
    Case("8 x 2k, 32/8", 8, 2048, 32, 8, is_prefill=True),
    Case("1 x 8k, 16/8", 1, 8192, 16, 8, is_prefill=True),
    Case("1 x 130k, 32/8", 1, 131_072, 32, 8, is_prefill=True),
]
_CHECKED = Case("three short prompts", 3, 1400, 32, 8, spread=0.8, is_prefill=True)
_LONG = 60_000  # from this context on, only single calls are timed
_CACHED_BYTES = 32 << 20
_SUSTAINED_SECONDS = 0.2
_LARGEST_ERROR = 5e-3

Call = Callable[[], Tensor]


def call_of(name: str, layer: tuple) -> Call:
    """A call of the form, which holds the memory that a graph of it writes to."""
    query, kv, params = layer
    page, num_kv_heads = kv.k_cache.shape[1:3]
    num_heads, num_rows = query.shape[1], len(kv.context_lens)
    out = torch.empty_like(query)
    if name == PRESENT:
        tiling = choose_tiling(query.dtype, query.shape[2], query.shape[2])
        shared = shared_arguments(query, kv, params, tiling)

        def present() -> Tensor:
            assert prefill_sm90.launch(query, kv, out, shared, tiling)
            return out

        return present
    form = FORMS[name]
    lines = form["WARPGROUPS"] * 64
    num_tiles = len(query) // (lines // (num_heads // num_kv_heads)) + num_rows + 1
    token_stride, head_stride, step = vector_strides(query)
    k_desc, v_desc = (
        prefill_sm90._descriptor(cache, min(page, form["UNIT"])) for cache in (kv[0], kv[1])
    )
    scratch = None
    if form["TOTALS"] == "l2":
        # Twice the multiprocessors, because their numbers may have gaps.
        scratch = torch.empty(2 * count_sms(query.device) * lines * 128, device=query.device)

    def run() -> Tensor:
        form_kernel[(num_tiles * num_kv_heads,)](
            k_desc, v_desc, query, out, *kv[2:], scratch, factors(params)[0], token_stride,
            head_stride, kv.block_tables.stride(0), len(query), num_rows,
            HQ=num_heads, HKV=num_kv_heads, STEP=step, PAGE=page,
            HEAD_BY_HEAD=_CACHED_BYTES // (num_kv_heads * 256 * query.itemsize),
            **form,
            num_warps=4,
        )  # fmt: skip
        return out

    return run


def reference(layer: tuple, lengths: list[int]) -> Tensor:
    """Causal attention of whole prompts in float32, ``[T, Hq, D]``."""
    query, kv, params = layer
    outs = []
    for row, q in enumerate(query.float().split(lengths)):
        blocks = kv.block_tables[row, : -(-len(q) // kv.k_cache.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[: len(q)].float() for x in kv[:2])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * params.scale
        hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


@triton.jit
def _exp2_kernel(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.exp2(tl.load(x + at)))


def inexact_shifts() -> list[int]:
    """How many x of the grid of 2^-14 in (-1, 0] have other bits of ``exp2(x - k) * 2^k``, for k
    from 1 on."""
    x = -torch.arange(1 << 14, device="cuda", dtype=torch.float32) / (1 << 14)

    def powers(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _exp2_kernel[(len(x) // 1024,)](x, out, 1024)
        return out

    expected = powers(x)
    return [int((powers(x - k) * 2.0**k != expected).sum()) for k in range(1, 41)]


def compile_all(names: list[str], cases: list[Case], block_size: int) -> None:
    """Compile all forms; kernels depend on heads, not on contexts."""
    pin_triton_cache_dir()
    small = {
        case.num_q_heads: Case("", 1, 64, case.num_q_heads, 8, is_prefill=True)
        for case in [*cases, _CHECKED]
    }
    with compilers() as pool:
        pool.start()
        with parallel_build(torch.device("cuda")) as report:
            for case in small.values():
                layer = inputs(case, block_size, num_layers=1)[0]
                for name in names:
                    call_of(name, layer)()
    print(f"{report.num_compiled} kernels compiled", flush=True)


def good_forms(names: list[str], block_size: int) -> list[str]:
    """The forms whose outputs are close to float32."""
    query, kv, params = inputs(_CHECKED, block_size, num_layers=1)[0]
    layer = (query * 2, kv, params)
    expected = reference(layer, _CHECKED.lengths())
    good = []
    for name in names:
        found = call_of(name, layer)().float()
        error = float((found - expected).norm() / expected.norm())
        print(f"  {name:<36} {error:.2e} from float32", flush=True)
        if error < _LARGEST_ERROR:
            good.append(name)
    return good


def captured(call: Call, count: int) -> torch.cuda.CUDAGraph:
    call()  # before the capture: the first call of a library may allocate or wait
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def sustained_seconds(run: Callable[[], object], once: float) -> float:
    """Seconds per run without pauses; ``once``: of a single run."""
    count = max(4, round(_SUSTAINED_SECONDS / once))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(count // 4):
        run()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def cudnn_call(case: Case) -> Call:
    def heads(count: int) -> Tensor:
        sizes = (case.num_rows, count, case.context, case.head_dim)
        return torch.randn(sizes, dtype=attention.DTYPE, device="cuda")

    query, key, value = heads(case.num_q_heads), heads(case.num_kv_heads), heads(case.num_kv_heads)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

    return run


def measure(case: Case, names: list[str], block_size: int) -> None:
    layer = inputs(case, block_size, num_layers=1)[0]
    calls = {name: call_of(name, layer) for name in names} | {"cuDNN": cudnn_call(case)}
    is_long = case.context >= _LONG
    num_calls = 8 if case.context < 30_000 else 2
    single = {name: captured(call, 1) for name, call in calls.items()}
    several = {} if is_long else {name: captured(call, num_calls) for name, call in calls.items()}
    work = case.flops() / 1e12
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for names_in_order in ([*calls], [*reversed(calls)]):
        for name in names_in_order:
            repeats = (2, 1) if is_long else (5, 2)
            rates[name].append(work / median_of_runs(single[name].replay, *repeats))
    for names_in_order in ([*several], [*reversed(several)]):
        for name in names_in_order:
            once = work * num_calls / rates[name][0]
            seconds = sustained_seconds(several[name].replay, once)
            rates[name].append(work * num_calls / seconds)
    print(f"\n{case.name}: TFLOP/s of single calls, twice; without pauses, twice")
    for name, found in rates.items():
        print(f"  {name:<36}", *(f"{rate:>6.0f}" for rate in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[" x "], help="parts of names of shapes")
    parser.add_argument("--forms", nargs="+", default=[""], help="parts of names of forms")
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    cases = [case for case in CASES if any(part in case.name for part in options.only)]
    names = [name for name in FORMS if any(part in name for part in options.forms)]
    print(attention.environment())
    compile_all([PRESENT, *names], cases, options.block_size)
    print("values of exp2 that a shift of 1, 2, ... changes:", *inexact_shifts())
    good = good_forms([PRESENT, *names], options.block_size)
    for case in cases:
        measure(case, good, options.block_size)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
