"""Compile the Gluon matmul for Hopper and print properties of the result (JSON).

Needs no GPU. ``test_matmul_sm90.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import sys

from triton.runtime import driver

from pagespec.kernels.matmul.sm90 import matmul_sm90
from pagespec.kernels.matmul.tuned_tiles import PrefetchTile
from tests.kernels.moe.compile_experts import Hopper, compiled, empty


def ptx_of(
    num_rows: int, num_outs: int, k_size: int, has_gate: bool, tile: PrefetchTile, has_norm: bool
) -> str:
    x, weight = empty(num_rows, k_size), empty(num_outs * (1 + has_gate), k_size)

    def launch() -> None:
        if has_norm:
            matmul_sm90.norm_matmul(
                x, x, x[0], 1e-6, "rounded", weight, tile=tile, has_gate=has_gate
            )
        else:
            matmul_sm90.matmul(x, weight, tile=tile, has_gate=has_gate)

    return str(compiled(matmul_sm90, "skinny_kernel", launch).asm["ptx"])


def events(ptx: str) -> str:
    """The order of (d)ependents' start, (t)ensor copies, (l)oads, the (w)ait, (m)atmuls."""
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
    driver.set_active(Hopper())  # type: ignore[arg-type]
    answer = []
    for has_norm, rows, outs, k_size, has_gate, *tile in json.loads(sys.argv[1]):
        answer.append(events(ptx_of(rows, outs, k_size, has_gate, PrefetchTile(*tile), has_norm)))
    print(json.dumps(answer))
