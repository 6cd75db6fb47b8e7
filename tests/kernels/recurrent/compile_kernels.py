"""Compile the recurrent kernels for Hopper at the shapes of large models.

Prints registers and spilled bytes (JSON). ``test_kernels.py`` runs this program in a process
without Triton's interpreter.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagespec.kernels.recurrent import chunk_kernels, chunked, short_conv, walked
from pagespec.kernels.recurrent import recurrent_spec as spec

CONV_KERNEL = short_conv._short_conv_kernel
ROWS = dict.fromkeys(("starts", "contexts", "tables", "table_rows"), "*i32")
LINEAR = {
    **dict.fromkeys(("query", "key", "value", "beta", "dt_bias", "skip"), "*bf16"),
    **dict.fromkeys(("rates", "states", "chunks"), "*fp32"),
    **dict.fromkeys(("scale", "dt_min", "dt_max"), "fp32"),
}
TILE = walked.block_v(128, 128)
CHANNELS = {"H": 32, "HK": 32, "K": 128, "V": 128, "BLOCK_V": TILE, "L2NORM": True,
            "LANES": walked.lanes(128, TILE)}  # fmt: skip
# Kernels, their warps, and constants besides.
CHUNK_KERNELS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "in chunks": (chunk_kernels.chunk_prompt_kernel, chunked._NUM_WARPS, {}),
    "in chunks, many rows": (chunk_kernels.chunk_decode_kernel, chunked._NUM_WARPS, {}),
    "in chunks, few rows": (
        chunk_kernels.chunk_decode_kernel,
        chunked._NUM_WARPS,
        {"chunks": None},
    ),
    "in chunks, inner": (chunk_kernels.chunk_inner_kernel, chunked._NUM_WARPS_INNER, {}),
}


def in_chunks(num_heads: int, num_key_heads: int, num_values: int) -> dict[str, Any]:
    """The constants of the kernels of chunks, for keys of 128."""
    sizes = 128, num_values
    block_v = spec.block_v(*sizes)
    layout = spec.record_layout(*sizes, torch.bfloat16, torch.bfloat16)
    return {
        "H": num_heads,
        "HK": num_key_heads,
        "K": 128,
        "V": num_values,
        "BLOCK_V": block_v,
        "TILES": num_values // block_v,
        "K_PAD": 128,
        "CHUNK": spec.CHUNK,
        **{name.upper(): place for name, place in layout._asdict().items()},
        "UNIT": chunked._UNIT,
        "SIZE": spec.PREPARED_SIZE,
        "HEADS": math.gcd(num_heads // num_key_heads, 4),
    }


NO_MAMBA: dict[str, Any] = {"rates": None, "dt_bias": None, "skip": None, "SOFTPLUS": False}
DELTA = in_chunks(32, 16, 128) | NO_MAMBA | {"L2NORM": True}
MAMBA_2 = in_chunks(64, 8, 64) | {"beta": None, "L2NORM": False, "SOFTPLUS": True}
WITH_FUSION = (
    walked._walked_delta_rule_kernel,
    walked._selective_scan_kernel,
)
CONV = {"C": 8192, "K": 4, "CHUNK": 256, "SILU": True}
CONV_TILES = {"": short_conv._TILE, " of decoding": short_conv._TILE_OF_DECODING}
INPUTS = ("x", "dt", "B", "C", "z", "dt_bias", "weight", "bias")
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    **{
        f"delta_rule {kind}": (
            kernel,
            LINEAR | {"decay": "*fp32", "out": "*bf16"},
            DELTA | constants,
            warps,
        )
        for kind, (kernel, warps, constants) in CHUNK_KERNELS.items()
    },
    **{
        f"ssd_scan {kind}": (
            kernel,
            LINEAR | {"decay": "*bf16", "out": "*fp32"},
            MAMBA_2 | constants,
            warps,
        )
        for kind, (kernel, warps, constants) in CHUNK_KERNELS.items()
    },
    "delta_rule of channels": (
        walked._walked_delta_rule_kernel,
        LINEAR | {"decay": "*fp32", "out": "*bf16"},
        CHANNELS,
        1,
    ),
    "selective_scan": (
        walked._selective_scan_kernel,
        dict.fromkeys(INPUTS, "*bf16") | dict.fromkeys(("A", "D", "states", "out"), "*fp32"),
        {"INNER": 8192, "N": 16, "BLOCK_I": walked._BLOCK_I, "SOFTPLUS": True},
        1,
    ),
    **{
        f"short_conv{kind}": (
            CONV_KERNEL,
            dict.fromkeys((*INPUTS, "states", "out"), "*bf16"),
            CONV | {"BLOCK_T": tile[0], "BLOCK_C": tile[1]},
            tile[2],
        )
        for kind, tile in CONV_TILES.items()
    },
}
# Of steps whose rows may have draft tokens.
CASES |= {
    f"{name}, drafts": (kernel, kinds | {"num_drafts": "*i32"}, constants, warps)
    for name, (kernel, kinds, constants, warps) in CASES.items()
    if kernel not in (chunk_kernels.chunk_decode_kernel, chunk_kernels.chunk_inner_kernel)
}


def report(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    names = kernel.arg_names
    kinds = ROWS | kinds
    if "num_drafts" not in kinds:
        constants = constants | {"num_drafts": None}
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = kinds | dict.fromkeys(constants, "constexpr")
    aligned = ["states", "out"]
    if kernel in [one for one, *_ in CHUNK_KERNELS.values()]:
        aligned += ["query", "key", "value", "chunks"]
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in aligned
            if name in names and name not in constants
        },
    )
    options = {"num_warps": warps, "enable_fp_fusion": kernel in WITH_FUSION}
    if kernel is chunk_kernels.chunk_decode_kernel and "chunks" not in constants:
        options["maxnreg"] = chunked.REGISTERS_OF_MANY_ROWS
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(built.asm["ptx"])
        file.flush()
        command = [str(tool), "-v", "--gpu-name=sm_90a", "-o", "/dev/null", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    spilled, used = re.search(r"(\d+) bytes spill", said), re.search(r"Used (\d+) reg", said)
    assert spilled is not None
    assert used is not None
    return {"spilled": int(spilled[1]), "registers": int(used[1])}


if __name__ == "__main__":
    print(json.dumps({name: report(*case) for name, case in CASES.items()}))
