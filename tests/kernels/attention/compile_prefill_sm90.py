"""Compile the Hopper prefill kernel and print properties of the result (JSON).

Needs no GPU. ``test_prefill_sm90.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from pagespec.kernels import e4m3
from pagespec.kernels.arguments import AttentionParams, PagedKV
from pagespec.kernels.attention import prefill_sm90
from pagespec.kernels.attention.launch import shared_arguments
from pagespec.kernels.attention.tiling import choose_tiling
from tests.support.assembled import described


def tensors(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """A query and caches of a case."""
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    query = torch.empty(4, case["hq"], case["dim"], dtype=dtype)
    sizes = [case["dim"], case.get("v_dim", case["dim"])]
    if case.get("e4m3"):
        dtype, sizes = torch.float8_e4m3fn, [size + e4m3.SCALE_BYTES for size in sizes]
    k_cache, v_cache = (
        torch.empty(3, case["page"], case["hkv"], size, dtype=dtype) for size in sizes
    )
    return query, k_cache, v_cache


def paged(k_cache: Tensor, v_cache: Tensor) -> PagedKV:
    """Caches of one row with one query."""
    return PagedKV(
        k_cache, v_cache, torch.zeros(2), torch.zeros(1), torch.zeros(1, 1), torch.zeros(1)
    )


def fits(case: dict[str, Any]) -> list[bool]:
    """Whether there is a kernel, and whether it was launched, which it never is on a CPU."""
    query, k_cache, v_cache = tensors(case)
    if case.get("transposed"):
        k_cache = k_cache.transpose(0, 2).contiguous().transpose(0, 2)
    tiling = choose_tiling(query.dtype, case["dim"], e4m3.head_dim(v_cache), k_cache.dtype)
    sinks = torch.zeros(case["hq"]) if case.get("sinks") else None
    window, softcap = case.get("window", 0), case.get("softcap", 0.0)
    kv = paged(k_cache, v_cache)
    shared = shared_arguments(query, kv, AttentionParams(0.1, window, softcap, sinks), tiling)
    attend = (query, k_cache, v_cache)
    launched = prefill_sm90.launch(query, kv, torch.empty(0), shared, tiling)
    return [prefill_sm90.fits(*attend, shared, tiling), launched]


def build(case: dict[str, Any]) -> Any:
    kernel = prefill_sm90.prefill_kernel
    names = kernel.arg_names
    query, k_cache, v_cache = tensors(case)
    tiling = choose_tiling(query.dtype, case["dim"], e4m3.head_dim(v_cache), k_cache.dtype)
    shared = shared_arguments(query, paged(k_cache, v_cache), AttentionParams(0.1), tiling)
    constants = {name: value for name, value in shared.items() if name.isupper()}
    constants |= prefill_sm90.constants_of(query, k_cache, shared)
    constants |= case.get("constants", {})
    short = "fp16" if query.dtype == torch.float16 else "bf16"
    rows = min(case["page"], tiling.block_n)
    kinds: dict[str, str] = {}
    for name, cache in (("k_desc", k_cache), ("v_desc", v_cache)):
        if case.get("e4m3"):
            kinds[name] = "*fp8e4nv"
            continue
        descriptor = prefill_sm90._descriptor(cache, rows)
        kinds[name] = f"tensordesc<{short}{descriptor.block_shape},{descriptor.layout!r}>"
    unused = [] if case.get("softcap") else ["cap_in", "cap_out"]
    unused += [name for name in ("window", "sinks", "scales") if not case.get(name)]
    constants |= dict.fromkeys(unused)
    kinds |= {
        **dict.fromkeys(("query", "out", "sinks"), f"*{short}"),
        **({"out": "*fp8e4nv", "scales": "*fp32"} if case.get("scales") else {}),
        **dict.fromkeys(("starts", "contexts", "tables", "table_rows"), "*i32"),
        **dict.fromkeys(("factor", "cap_in", "cap_out"), "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = ("query", "out", *(("k_desc", "v_desc") if case.get("e4m3") else ()))
    source = GluonASTSource(
        kernel,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    answer = {
        "fits": [fits(case) for case in asked["fits"]],
        "built": [described(build(case)) for case in asked["build"]],
    }
    print(json.dumps(answer))
