"""Compiles the Gluon product for Hopper, which needs no GPU, and prints what it became (JSON).

A process of its own, started by ``test_matmul_sm90.py``: there, Triton interprets.
"""

from __future__ import annotations

import inspect
import json
import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from pagespec.kernels.linear.matmul_sm90 import (
    norm_constants,
    normed_kernel,
    plan_launch,
    prefetch_matmul_kernel,
)
from pagespec.kernels.linear.tuned_tiles import PrefetchTile

_POINTERS = ("x", "residual", "norm_weight", "hidden", "out")


def ptx_of(
    num_rows: int, num_outs: int, k_size: int, has_gate: bool, tile: PrefetchTile, has_norm: bool
) -> str:
    launch = plan_launch(num_rows, num_outs, k_size, has_gate, tile, overlap=True)
    kernel = normed_kernel if has_norm else prefetch_matmul_kernel
    constants = (
        norm_constants(launch.constants, num_rows, "rounded") if has_norm else launch.constants
    )
    names = kernel.arg_names
    parameters = inspect.signature(kernel.fn).parameters.values()
    constants |= {each.name: each.default for each in parameters if each.default is not each.empty}
    pointers = [name for name in names if name in _POINTERS]
    kinds = dict.fromkeys(constants, "constexpr") | dict.fromkeys(pointers, "*bf16")
    kinds |= {
        "x_desc": f"tensordesc<bf16{launch.x_box},{launch.x_layout!r}>",
        "w_desc": f"tensordesc<bf16{launch.weight_box},{launch.weight_layout!r}>",
        "num_rows": "i32",
        "eps": "fp32",
    }
    source = GluonASTSource(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": launch.num_warps, "launch_pdl": True, "enable_fp_fusion": not has_norm}
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def events(ptx: str) -> str:
    """The order of (d)ependents' start, (t)ensor copies, (l)oads, the (w)ait, (m)atrix products."""
    kinds = {
        "griddepcontrol.launch_dependents": "d",
        "griddepcontrol.wait": "w",
        "cp.async.bulk.tensor": "t",
        "ld.global": "l",
        "wgmma.mma_async": "m",
    }
    found = re.findall("|".join(map(re.escape, kinds)), ptx)
    return "".join(kinds[name] for name in found)


if __name__ == "__main__":
    answer = []
    for has_norm, rows, outs, k_size, has_gate, *tile in json.loads(sys.argv[1]):
        answer.append(events(ptx_of(rows, outs, k_size, has_gate, PrefetchTile(*tile), has_norm)))
    print(json.dumps(answer))
