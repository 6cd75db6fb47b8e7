"""Compile the Hopper matmul for many rows and print properties of the result (JSON).

Needs no GPU. ``test_matmul_sm90_many.py`` runs this program in a process without Triton's
interpreter.
"""

from __future__ import annotations

import json
import sys

from triton.runtime import driver

from pagespec.kernels.matmul.sm90 import matmul_sm90_many
from tests.kernels.moe.compile_experts import Hopper, compiled, empty
from tests.support.assembled import assembled


def described(num_outs: int, k_size: int, has_gate: bool) -> dict[str, object]:
    x, weight = empty(700, k_size), empty(num_outs * (1 + has_gate), k_size)
    launch = lambda: matmul_sm90_many.matmul_many(x, weight, has_gate)  # noqa: E731
    made = compiled(matmul_sm90_many, "many_rows_kernel", launch)
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
    driver.set_active(Hopper())  # type: ignore[arg-type]
    print(json.dumps([described(*case) for case in json.loads(sys.argv[1])]))
