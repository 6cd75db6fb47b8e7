"""Compiles an all-reduce joined with its norm, and the norm alone, for Hopper, which needs no GPU,
and prints what each became (JSON).

A process of its own, started by ``test_peer_memory.py``: there, Triton interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagespec.kernels.collectives.peer_memory import CHUNK_BYTES, all_reduce_norm_kernel
from pagespec.kernels.fused.rms_norm import _norm_kernel, num_warps

_ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
_ROWS = ("partial", "x", "residual", "weight", "out", "hidden")
_OTHERS = {"boxes": "*i64", "flags": "*i64", "numbers": "*i32", "eps": "fp32"}
_STRIDES = ("row_stride", "x_stride", "residual_stride")


def assembly(kernel: Any, dtype: str, width: int, is_aligned: bool, **constants: object) -> Any:
    block = triton.next_power_of_2(width)
    constants |= {"N": width, "BLOCK": block, "PDL": True, "FORM": "rounded"}
    names = kernel.arg_names
    kinds = dict.fromkeys(constants, "constexpr") | dict.fromkeys(_ROWS, f"*{dtype}") | _OTHERS
    kinds |= dict.fromkeys(_STRIDES, "i32")
    aligned = {*_ROWS, "boxes", "flags", "numbers", *(_STRIDES if is_aligned else ())}
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in aligned},
    )
    options = {"num_warps": num_warps(block), "enable_fp_fusion": False, "launch_pdl": True}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def order_of_additions(asm: Any) -> list[str]:
    """The layout of the row that is added up, then the steps between threads."""
    (kind,) = set(re.findall(r'"tt\.reduce".*?\(tensor<\w+, (#\w+)>\)', asm["ttgir"], re.S))
    (layout,) = re.findall(rf"^{kind} = (.*)$", asm["ttgir"], re.M)
    steps = re.findall(r"shfl\.sync\.bfly\.b32 .*?, (\d+), (\d+), -1", asm["ptx"])
    return [layout, *map(" ".join, steps)]


def events(ptx: str) -> str:
    """The order of (l)oads of rows, (d)ependents' start, the (w)ait, (s)tores of rows, (b)arriers,
    the (f)lag, the first (p)oll."""
    kinds = {
        r"ld\.global(?:\.cg)?\.v\d": "l",
        r"griddepcontrol\.launch_dependents": "d",
        r"griddepcontrol\.wait": "w",
        r"st\.global\.v\d": "s",
        r"bar\.sync": "b",
        r"atom\.global\.sys\.release": "f",
        r"\.global\.sys\.acquire": "p",
    }
    found = re.finditer("|".join(f"({pattern})" for pattern in kinds), ptx)
    return "".join(list(kinds.values())[match.lastindex - 1] for match in found if match.lastindex)


if __name__ == "__main__":
    answer = []
    for dtype, width, is_aligned in json.loads(sys.argv[1]):
        chunk = CHUNK_BYTES // _ITEMSIZES[dtype]
        ranks = {"RANK": 1, "NUM_RANKS": 2, "MAX_CHUNKS": 4096, "CHUNK": chunk}
        shape = dtype, width, is_aligned
        joined = assembly(all_reduce_norm_kernel, *shape, HAS_RESIDUAL=True, **ranks)
        alone = assembly(_norm_kernel, *shape, HAS_RESIDUAL=True)
        both = [order_of_additions(asm) for asm in (joined, alone)]
        answer.append([*both, events(joined["ptx"])])
    print(json.dumps(answer))
