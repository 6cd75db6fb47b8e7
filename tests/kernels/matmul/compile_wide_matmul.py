"""Compile the float32 matmul of 16-bit rows and weight for Hopper, per tile and dtype.

Prints properties of the results (JSON). ``test_wide_matmul.py`` runs this program in a process
without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton

from pagespec.kernels.matmul import wide_matmul
from pagespec.kernels.matmul.matmul import Tile
from tests.kernels.moe.compile_experts import Hopper, compiled, empty

EVENTS = {
    "griddepcontrol.launch_dependents": "d",
    "griddepcontrol.wait": "w",
    "prefetch.global.L2": "p",
    "cp.async.cg": "a",
    "ld.global": "l",
    "st.global": "s",
    "mma.sync": "m",
    "wgmma.mma_async": "m",
}


def what_became(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    x, weight = empty(300, 2048, dtype=dtype), empty(64, 2048, dtype=dtype)
    call = lambda: wide_matmul.wide_matmul(x, weight, tile)  # noqa: E731
    ptx = compiled(wide_matmul, "_wide_kernel", call).asm["ptx"]
    known: dict[str, bool] = {}  # of each register, whether it holds 0
    products, from_zero, sums = 0, 0, set()
    for line in ptx.splitlines():
        if found := re.search(r"mov\.b32\s+(%r\d+), (\S+);", line):
            name, value = found.groups()
            known[name] = known.get(value, False) or value in ("0", "0f00000000")
        elif "mma.sync" in line or "wgmma.mma_async" in line:
            products += 1
            lists = [re.findall(r"%r\d+", part) for part in re.findall(r"\{([^}]*)\}", line)]
            # wgmma says itself whether it reads the sums; mma.sync names them, last.
            skips_sums = re.search(r"%rd\d+, %rd\d+, 0,", line) is not None
            if skips_sums if "wgmma" in line else all(known.get(n, False) for n in lists[-1]):
                from_zero += 1
                sums.update(lists[0])
            known.update(dict.fromkeys(lists[0], False))
    added = re.findall(r"add(?:\.rn)?\.f32\s+%r\d+, (%r\d+), (%r\d+);", ptx)
    events = re.findall("|".join(map(re.escape, EVENTS)), ptx)
    return {
        "rows": tile.block_m,
        "products": products,
        "from zero": from_zero,
        "sums": len(sums),
        "additions": len([pair for pair in added if sums & set(pair)]),
        "other additions": len([pair for pair in added if not sums & set(pair)]),
        "events": "".join(EVENTS[name] for name in events),
    }


if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    print(
        json.dumps(
            [
                what_became(tile, dtype)
                for dtype in (torch.bfloat16, torch.float16)
                for tile in wide_matmul.TILES
            ]
        )
    )
