"""Compile attention over e4m3 caches for Hopper and print properties of the result (JSON).

Needs no GPU. ``test_e4m3_tiles.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from pagespec.kernels.attention.decode import decode_kernel
from pagespec.kernels.attention.prefill import prefill_kernel
from pagespec.kernels.attention.tiling import ALL_SPLITS, Tiling, choose_tiling
from pagespec.kernels.fused.norm_rope_store import _norm_rope_store_kernel

sys.path.insert(0, str(Path(__file__).parent))
from compile_decode_prologue import (
    build,
    contracted,
    decode_constants,
    order_of_squares,
    rope_constants,
    run_tool,
    spilled,
)

_CACHE = "*fp8e4nv"


def prefill_constants(case: dict[str, Any], t: Tiling) -> dict[str, Any]:
    constants = {
        "HQ": case["hq"], "HKV": case["hkv"], "DK": case["dim"], "DV": case["dim"], "STEP": 16,
        "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "NEAR_SPLIT": t.near_split,
        "FAR_SPLIT": t.far_split, "SPLIT_CHANGE": t.split_change, "PAGE": case["page"],
        "PARTS": t.prefill_parts, "ROWS": 256, "sinks": None, "scales": None,
    }  # fmt: skip
    constants |= dict.fromkeys([] if case["window"] else ["window"])
    return constants | dict.fromkeys([] if case["softcap"] else ["cap_in", "cap_out"])


def instructions(built: Any, name: str) -> int:
    return len(re.findall(rf"\b{re.escape(name)}\b", run_tool(built, "nvdisasm", "-c")))


def checked(case: dict[str, Any]) -> dict[str, Any]:
    t = choose_tiling(torch.bfloat16, case["dim"], case["dim"], torch.float8_e4m3fn)
    decode, turned = (decode_constants(case, x) | {"PAGE": case["page"]} for x in (False, True))
    many = {"FIRST_SPLITS": ALL_SPLITS.value, "LONG_CONTEXT": 0}
    how: dict[str, Any] = {"num_stages": t.decode_stages, "cache": _CACHE}
    few = how | {"num_warps": t.decode_warps, "registers": t.decode_registers}
    kernels = [build(decode_kernel, decode, contract=x, **few) for x in (True, False)]
    unsplit = how | {"num_warps": t.many_warps, "registers": t.unsplit_registers}
    kernels.append(build(decode_kernel, decode | many, contract=True, **unsplit))
    fused = [
        build(decode_kernel, turned, contract=False, **few | {"registers": registers})
        for registers in (t.decode_registers, t.many_fused_registers)
    ]
    if case["dim"] % 128 == 0:
        del turned["scales"]
        fused.append(build(decode_kernel, turned, contract=False, **few))
    rope = build(
        _norm_rope_store_kernel, rope_constants(case) | {"PAGE": case["page"]}, contract=False,
        cache=_CACHE,
    )  # fmt: skip
    prefill = [
        build(
            prefill_kernel, prefill_constants(case, t), contract=x, cache=_CACHE,
            num_stages=t.prefill_stages, num_warps=t.prefill_warps,
        )
        for x in (True, False)
    ]  # fmt: skip
    kernels += fused
    return {
        "contracted": [contracted(built) for built in kernels[:2]],
        "contracted_prefill": [contracted(built) for built in prefill],
        "squares": [order_of_squares(built) for built in (rope, *fused)],
        "spilled": [spilled(built) for built in kernels],
        "bytes_alone": [instructions(built, "LDS.U8") for built in kernels],
        "copies": [instructions(built, "LDGSTS") for built in kernels],
        "conversions": [instructions(built, "F2FP.F16.E4M3") for built in kernels],
    }


if __name__ == "__main__":
    print(json.dumps([checked(case) for case in json.loads(sys.argv[1])]))
