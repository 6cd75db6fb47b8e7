"""Compile decode attention for Hopper and print the facts that its bits depend on (JSON).

Needs no GPU. ``test_decode_prologue.py`` runs this program in a process without Triton's
interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagespec.kernels.attention.decode import decode_kernel
from pagespec.kernels.attention.tiling import choose_tiling
from pagespec.kernels.fused.norm_rope_store import _TOKENS_AT_ONCE, _norm_rope_store_kernel

_BF16 = {"query", "key", "value", "cos", "sin", "q_weight", "k_weight", "k_cache", "v_cache", "out"}
_POINTERS = {
    **dict.fromkeys(_BF16 | {"sinks"}, "*bf16"),
    **dict.fromkeys(("starts", "contexts", "tables", "table_rows", "arrival_counters"), "*i32"),
    **dict.fromkeys(("partial", "stats", "scales"), "*fp32"),
    "slot_mapping": "*i64",
}
_FLOATS = ("eps", "factor", "cap_in", "cap_out")
# The rope kernel's strides of a model's merged projection; those of decode are in units of 16.
_ALIGNED = {*_BF16, "partial", "stats", "scales", "arrival_counters"}
_STRIDES = {f"{x}_{kind}" for x in "qkv" for kind in ("stride", "head_stride")}


def build(
    kernel: Any,
    constants: dict[str, Any],
    *,
    contract: bool,
    num_stages: int = 3,
    num_warps: int = 4,
    cache: str = "*bf16",
    registers: int | None = None,
) -> Any:
    """Compiled for Hopper; ``cache``: what caches point to, ``registers``: of a thread at most."""
    names = kernel.arg_names
    types = _POINTERS | dict.fromkeys(("k_cache", "v_cache"), cache)
    if "scales" in names and "scales" not in constants:
        types |= {"out": "*fp8e4nv"}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name) or ("fp32" if name in _FLOATS else "i32")
        if name in _ALIGNED | _STRIDES:
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": contract,
        "launch_pdl": True,
        **({} if registers is None else {"maxnreg": registers}),
    }
    source = ASTSource(kernel, signature, values, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def decode_constants(case: dict[str, Any], turn: bool) -> dict[str, Any]:
    """The constants of a launch for bfloat16, every split a piece."""
    hq, hkv, dim = case["hq"], case["hkv"], case["dim"]
    t = choose_tiling(torch.bfloat16, dim, dim)
    group = triton.next_power_of_2(hq // hkv)
    constants = {
        "HQ": hq, "HKV": hkv, "DK": dim, "DV": dim, "STEP": 16,
        "BLOCK_N": t.block_n, "NEAR_SPLIT": t.near_split,
        "FAR_SPLIT": t.far_split, "SPLIT_CHANGE": t.split_change, "FIRST_SPLITS": 1,
        "UNSPLIT_BELOW": 0, "LONG_CONTEXT": t.long_context,
        "PAGE": 16,
        "CHUNK": t.combine_chunk_of(group * dim), "BY_TOKEN": True,
        "order": None,
        "TRIGGER": "late" if turn else "early", "sinks": None, "scales": None,
    }  # fmt: skip
    constants |= dict.fromkeys([] if case["window"] else ["window"])
    constants |= dict.fromkeys([] if case["softcap"] else ["cap_in", "cap_out"])
    if turn:
        angles = {"R": dim, "TABLE": dim, "cos_step": None, "sin_step": None}
        return constants | angles | {"FORM": "rounded"}
    unused = (
        "key", "value", "cos", "sin", "q_weight", "k_weight", "slot_mapping", "eps",
        "k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride", "cos_stride",
        "cos_step", "sin_stride", "sin_step", "R", "TABLE", "FORM",
    )  # fmt: skip
    return constants | dict.fromkeys(unused)


def rope_constants(case: dict[str, Any], tokens: int = 1) -> dict[str, Any]:
    hq, hkv, dim = case["hq"], case["hkv"], case["dim"]
    return {
        "HQ": hq, "HKV": hkv, "D": dim, "DV": dim, "R": dim, "TABLE": dim,
        "FORM": "rounded", "PAGE": 16, "PDL": True,
        "TOKENS": tokens,
    }  # fmt: skip


def run_tool(built: Any, name: str, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tool), flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def contracted(built: Any) -> int:
    """The number of fused multiply-adds; those with the addend zero are multiplications."""
    text = run_tool(built, "nvdisasm", "-c")
    return len(re.findall(r"\bFFMA(?:\.\w+)* (?!.*\bRZ\b)", text))


def spilled(built: Any) -> int:
    """Bytes of local memory per thread."""
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", run_tool(built, "cuobjdump", "-res-usage"))
    assert found is not None
    return int(found[1]) + int(found[2])


def order_of_squares(built: Any) -> list[list[int]]:
    """Of each sum of float32: elements along a head that a thread, a warp and the warps have."""
    text = built.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<\{.*?\}>)", text, re.MULTILINE))
    found = set()
    for block in re.finditer(r'"tt\.reduce"\(.*?\}\) : \((tensor<[^)]*)\)', text, re.DOTALL):
        if "arith.addf" in block[0]:
            name = re.search(r"tensor<[\dx]+xf32, (?:#ttg\.slice<.*parent = )?(#\w+)", block[1])
            assert name is not None
            sizes = re.findall(r"= \[\d+, (\d+)\]", layouts[name[1]])
            found.add(tuple(int(size) for size in sizes[:3]))
    return sorted(map(list, found))


if __name__ == "__main__":
    answer = []
    for case in json.loads(sys.argv[1]):
        stages = choose_tiling(torch.bfloat16, case["dim"], case["dim"]).decode_stages
        plain = [
            build(decode_kernel, decode_constants(case, False), contract=x, num_stages=stages)
            for x in (True, False)
        ]
        forms = [decode_constants(case, True)]
        quantizing = decode_constants(case, False)
        if case["dim"] % 128 == 0:
            del quantizing["scales"]
            plain += [
                build(decode_kernel, quantizing, contract=x, num_stages=stages)
                for x in (True, False)
            ]
            forms.append(forms[0].copy())
            del forms[1]["scales"]
        turned = [build(decode_kernel, x, contract=False, num_stages=stages) for x in forms]
        ropes = [
            build(_norm_rope_store_kernel, rope_constants(case, n), contract=False)
            for n in ((1, _TOKENS_AT_ONCE) if case["dim"] >= 64 else (1,))
        ]
        answer.append(
            {
                "contracted": [contracted(built) for built in plain],
                "squares": [order_of_squares(built) for built in (*ropes, *turned)],
                "spilled": [spilled(built) for built in (*plain, *turned)],
            }
        )
    print(json.dumps(answer))
