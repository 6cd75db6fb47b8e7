"""Compile the matmul with 4-bit weights for Hopper and print properties of the result (JSON).

Needs no GPU. ``test_matmul_int4.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagespec.kernels.matmul.quantized.dispatch_int4 import choose_tile
from pagespec.kernels.matmul.quantized.matmul_int4 import int4_kernel
from tests.support.assembled import assembled


def described(
    num_rows: int, num_outs: int, num_inputs: int, group: int, num_bits: int, has_gate: bool
) -> dict[str, Any]:
    tile = choose_tile(num_rows, num_outs, num_inputs, has_gate)
    constants: dict[str, Any] = {
        "bias": None,
        "N": num_outs,
        "K": num_inputs,
        "K_WORDS": -(-num_inputs // 128) * 128 * num_bits // 32,
        "GROUP": group,
        "BITS": num_bits,
        "NUMBERS": "float16",
        "HAS_MINIMA": False,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HAS_GATE": has_gate,
        "PDL": True,
    }
    kinds = dict.fromkeys(constants, "constexpr") | {
        "x": "*bf16",
        "words": "*i32",
        "numbers": "*i32",
        "out": "*bf16",
        "num_rows": "i32",
        "x_stride": "i32",
    }
    names = int4_kernel.arg_names
    whole = [name for name in names if kinds[name].startswith("*") or name == "x_stride"]
    source = ASTSource(
        int4_kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": True}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = str(made.asm["ptx"])
    told = assembled(ptx)
    return {
        "mma": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "row loads": ptx.count("ldmatrix"),
        "stores": len(re.findall(r"st\.shared|stmatrix", ptx)),
        "pairs": ptx.count("sub.rn.bf16x2"),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", told))),
        "shared": made.metadata.shared,
    }


if __name__ == "__main__":
    print(json.dumps([described(*case) for case in json.loads(sys.argv[1])]))
