"""Compiles the matmul of many rows for Hopper, without a GPU, and prints what it became (JSON).

A process of its own, started by ``test_matmul_sm90_many.py``: there, Triton interprets.
"""

from __future__ import annotations

import json
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from pagespec.kernels.linear.matmul_sm90_many import (
    NUM_WARPS,
    many_rows_kernel,
    plan_many_launch,
)
from tests.support.assembled import assembled


def described(num_outs: int, k_size: int, has_gate: bool) -> dict[str, object]:
    launch = plan_many_launch(num_outs, k_size, has_gate, overlap=True)
    rows = f"tensordesc<bf16{launch.x_box},{launch.x_layout!r}>"
    names = many_rows_kernel.arg_names
    kinds = dict.fromkeys(names, "constexpr") | {
        "x_desc": rows,
        "w_desc": f"tensordesc<bf16{launch.weight_box},{launch.weight_layout!r}>",
        "out_desc": rows,
        "num_rows": "i32",
    }
    source = GluonASTSource(
        many_rows_kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in launch.constants.items()},
    )
    options = {"num_warps": NUM_WARPS, "launch_pdl": True}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = str(made.asm["ptx"])
    told = assembled(ptx)
    ahead, behind = ptx.split("griddepcontrol.wait")
    return {
        "wgmma": behind.count("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"),
        "ahead": sum(ahead.count(name) for name in ("cp.async.bulk", "ld.global", "st.global")),
        "divisions": ptx.count("div."),
        "exponentials": ptx.count("ex2.approx.ftz.f32"),
        "told": told,
        "shared": made.metadata.shared,
    }


if __name__ == "__main__":
    print(json.dumps([described(*case) for case in json.loads(sys.argv[1])]))
