"""Compiles the FP8 matmuls for Hopper, which needs no GPU, and prints what they became (JSON).

A process of its own, started by ``test_matmul_fp8_sm90.py``: there, Triton interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pagespec.kernels.quantized.matmul_fp8 import fp8_kernel
from pagespec.kernels.quantized.matmul_fp8_sm90 import plan_launch
from pagespec.kernels.quantized.matmul_fp8_sm90_few import few_rows_kernel
from pagespec.kernels.quantized.matmul_fp8_sm90_gated import (
    NUM_WARPS,
    OUT_BOX,
    WEIGHT_BOX,
    X_BOX,
    constants_of,
    gated_rows_kernel,
    layout_of,
)
from pagespec.kernels.quantized.matmul_fp8_sm90_many import many_rows_kernel
from pagespec.kernels.quantized.tiles_fp8 import FewTile, ManyTile
from tests.support.assembled import assembled

_POINTERS = ("x_scales", "w_scales", "out", "out_scales", "x", "weight")


def described(source: ASTSource, num_warps: int, num_stages: int = 3) -> dict[str, Any]:
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "launch_pdl": True,
        "enable_fp_fusion": False,
    }
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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


def source_of(make: Any, kernel: Any, kinds: dict[str, str], constants: dict[str, Any]) -> Any:
    names = kernel.arg_names
    aligned = [name for name in names if name in _POINTERS]
    return make(
        kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )


TILES = {
    "FewTile": (FewTile, few_rows_kernel),
    "ManyTile": (ManyTile, many_rows_kernel),
}


def in_gluon(
    rows: int, outs: int, k_size: int, has_blocks: bool, name: str, *tile: int
) -> dict[str, Any]:
    kind, kernel = TILES[name]
    num_groups, shared = (k_size // 128, 128) if has_blocks else (1, 1)
    launch = plan_launch(
        rows, outs, k_size, num_groups, shared, kind(*tile), overlap=True, num_sms=132
    )
    layouts = [
        f"tensordesc<fp8e4nv{box},{gl.NVMMASharedLayout(128, 8, len(box))!r}>"
        for box in (launch.x_box, launch.weight_box)
    ]
    kinds = {
        "x_desc": layouts[0],
        "w_desc": layouts[1],
        "x_scales": "*fp32",
        "w_scales": "*fp32",
        "out": "*bf16",
        "num_rows": "i32",
    }
    source = source_of(GluonASTSource, kernel, kinds, launch.constants)
    return described(source, launch.num_warps)


def with_gate(outs: int, k_size: int, *tile: int) -> dict[str, Any]:
    kinds = {"x_scales": "*fp32", "w_scales": "*fp32", "out_scales": "*fp32", "num_rows": "i32"}
    for name, box in (("x_desc", X_BOX), ("w_desc", WEIGHT_BOX), ("out_desc", OUT_BOX)):
        kinds[name] = f"tensordesc<fp8e4nv{box},{layout_of(box)!r}>"
    constants = constants_of(outs, k_size, ManyTile(*tile), overlap=True)
    return described(source_of(GluonASTSource, gated_rows_kernel, kinds, constants), NUM_WARPS)


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
    return described(source_of(ASTSource, fp8_kernel, kinds, constants), warps, stages)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    makers = (in_gluon, with_gate, in_triton)
    print(
        json.dumps([[make(*case) for case in of] for make, of in zip(makers, given, strict=True)])
    )
