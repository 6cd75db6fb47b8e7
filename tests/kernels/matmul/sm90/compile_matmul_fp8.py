"""Compile the FP8 matmuls for Hopper and print properties of the results (JSON).

Needs no GPU. ``test_matmul_fp8_sm90.py`` runs this program in a process without Triton's
interpreter.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import driver

from pagespec.kernels.fused.e4m3_groups import QuantizedRows
from pagespec.kernels.matmul.quantized.matmul_fp8 import fp8_kernel
from pagespec.kernels.matmul.quantized.tiles_fp8 import FewTile, ManyTile
from pagespec.kernels.matmul.sm90 import matmul_fp8_sm90, matmul_fp8_sm90_many
from pagespec.kernels.matmul.sm90.matmul_fp8_sm90 import gated_matmul, matmul
from tests.kernels.moe.compile_experts import Hopper, compiled, empty
from tests.support.assembled import assembled

_POINTERS = ("x_scales", "w_scales", "out", "x", "weight")
_E4M3, _FP32 = torch.float8_e4m3fn, torch.float32


def described(made: Any) -> dict[str, Any]:
    ptx = str(made.asm["ptx"])
    told = assembled(ptx)
    return {
        "wgmma": len(re.findall(r"wgmma\.mma_async.*e4m3\.e4m3", ptx)),
        "mma": ptx.count("mma.sync"),
        "ahead": ptx.split("griddepcontrol.wait")[0].count("cp.async.bulk.tensor"),
        "registers": int(re.findall(r"Used (\d+) registers", told)[0]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", told))),
        "serialised": "serialized" in told,
        "shared": made.metadata.shared,
    }


def rows_of(num_rows: int, k_size: int) -> QuantizedRows:
    values = empty(num_rows, k_size, dtype=_E4M3)
    return QuantizedRows(values, empty(k_size // 128, num_rows, dtype=_FP32))


def in_gluon(
    rows: int, outs: int, k_size: int, has_blocks: bool, name: str, *tile: int
) -> dict[str, Any]:
    x, weight = rows_of(rows, k_size), empty(outs, k_size, dtype=_E4M3)
    shape, shared = ((outs // 128, k_size // 128), 128) if has_blocks else ((outs, 1), 1)
    options = {"shared": shared, "tile": (FewTile if name == "FewTile" else ManyTile)(*tile)}
    scales = empty(*shape, dtype=_FP32)
    launch = lambda: matmul(x, weight, scales, **options)  # type: ignore[arg-type]  # noqa: E731
    if name == "FewTile":
        return described(compiled(matmul_fp8_sm90, "few_rows_kernel", launch))
    return described(compiled(matmul_fp8_sm90_many, "many_rows_kernel", launch))


def with_gate(outs: int, k_size: int, *tile: int) -> dict[str, Any]:
    x, weight = rows_of(777, k_size), empty(2 * outs, k_size, dtype=_E4M3)
    scales = empty(2 * outs // 128, k_size // 128, dtype=_FP32)
    launch = lambda: gated_matmul(x, weight, scales, tile=ManyTile(*tile))  # noqa: E731
    return described(compiled(matmul_fp8_sm90_many, "many_rows_kernel", launch))


def in_triton(m: int, n: int, stages: int, warps: int, swap: bool, has_tma: bool) -> dict[str, Any]:
    kinds = dict.fromkeys(("x", "weight"), "*fp8e4nv") | {
        "x_scales": "*fp32",
        "w_scales": "*fp32",
        "out": "*bf16",
        "num_rows": "i32",
    }
    constants: dict[str, Any] = {
        "N": 6144,
        "K": 4096,
        "W_GROUPS": 32,
        "SHARED": 128,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "SWAP": swap,
        "PDL": True,
        "bias": None,
    }
    if has_tma:
        kinds["x_tiles"] = f"tensordesc<fp8e4nv[{m}, 128]>"
        kinds["weight_tiles"] = f"tensordesc<fp8e4nv[{n}, 128]>"
    else:
        constants |= {"x_tiles": None, "weight_tiles": None}
    names = fp8_kernel.arg_names
    aligned = [name for name in names if name in _POINTERS]
    source = ASTSource(
        fp8_kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    options["enable_fp_fusion"] = False
    return described(compile(source, target=GPUTarget("cuda", 90, 32), options=options))


if __name__ == "__main__":
    driver.set_active(Hopper())  # type: ignore[arg-type]
    given = json.loads(sys.argv[1])
    makers = (in_gluon, with_gate, in_triton)
    print(
        json.dumps([[make(*case) for case in of] for make, of in zip(makers, given, strict=True)])
    )
