"""Compiles the Gluon product for Hopper, which needs no GPU, and prints what it became (JSON).

A process of its own, started by ``test_gluon_linear.py``: there, Triton interprets.
"""

from __future__ import annotations

import json
import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from pagespec.kernels.gluon_linear import early_kernel, plan_launch
from pagespec.kernels.linear_tiles import EarlyTile


def ptx_of(num_rows: int, num_outs: int, k_size: int, has_gate: bool, tile: EarlyTile) -> str:
    launch = plan_launch(num_rows, num_outs, k_size, has_gate, tile, overlap=True)
    names = early_kernel.arg_names
    kinds = dict.fromkeys(launch.constants, "constexpr") | {
        "x_desc": f"tensordesc<bf16{launch.x_box},{launch.x_layout!r}>",
        "w_desc": f"tensordesc<bf16{launch.weight_box},{launch.weight_layout!r}>",
        "out": "*bf16",
        "num_rows": "i32",
    }
    source = GluonASTSource(
        early_kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in launch.constants.items()},
        {(names.index("out"),): [["tt.divisibility", 16]]},
    )
    options = {"num_warps": launch.num_warps, "launch_pdl": True}
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def events(ptx: str) -> str:
    """The order of things: (d)ependents may start, (t)ensor copy, (w)ait, (m)atrix product."""
    kinds = {
        "griddepcontrol.launch_dependents": "d",
        "griddepcontrol.wait": "w",
        "cp.async.bulk.tensor": "t",
        "wgmma.mma_async": "m",
    }
    found = re.findall("|".join(map(re.escape, kinds)), ptx)
    return "".join(kinds[name] for name in found)


if __name__ == "__main__":
    answer = []
    for rows, outs, k_size, has_gate, *tile in json.loads(sys.argv[1]):
        answer.append(events(ptx_of(rows, outs, k_size, has_gate, EarlyTile(*tile))))
    print(json.dumps(answer))
