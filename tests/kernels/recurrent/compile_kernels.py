"""Compiles the recurrent kernels at the shapes of large models, for Hopper; prints registers and
spilled bytes (JSON).

A process of its own, started by ``test_kernels.py``: there, Triton interprets.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagespec.kernels.recurrent import linear_state, selective_scan, short_conv

CONV_KERNEL = short_conv._short_conv_kernel
ROWS = dict.fromkeys(("starts", "contexts", "tables"), "*i32")
LINEAR = {
    **dict.fromkeys(("query", "key", "value", "beta", "dt_bias", "skip"), "*bf16"),
    **dict.fromkeys(("rates", "states"), "*fp32"),
    **dict.fromkeys(("scale", "dt_min", "dt_max"), "fp32"),
}
NO_MAMBA: dict[str, Any] = {"rates": None, "dt_bias": None, "skip": None, "SOFTPLUS": False}
TILES = [linear_state.block_v(128, num_values) for num_values in (128, 64)]
LANES = [linear_state.lanes(128, tile) for tile in TILES]
DELTA = {"H": 32, "K": 128, "V": 128, "BLOCK_V": TILES[0], "LANES": LANES[0], "L2NORM": True}
MAMBA_2 = {"H": 64, "HK": 8, "K": 128, "V": 64, "BLOCK_V": TILES[1], "LANES": LANES[1]}
CONV = {"C": 8192, "K": 4, "CHUNK": 256, "SILU": True}
CONV_TILES = {"": short_conv._TILE, " of decoding": short_conv._TILE_OF_DECODING}
INPUTS = ("x", "dt", "B", "C", "z", "dt_bias", "weight", "bias")
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "delta_rule": (
        linear_state._linear_state_kernel,
        LINEAR | {"decay": "*fp32", "out": "*bf16"},
        DELTA | NO_MAMBA | {"HK": 16, "CHANNELS": False},
        1,
    ),
    "delta_rule of channels": (
        linear_state._linear_state_kernel,
        LINEAR | {"decay": "*fp32", "out": "*bf16"},
        DELTA | NO_MAMBA | {"HK": 32, "CHANNELS": True},
        1,
    ),
    "ssd_scan": (
        linear_state._linear_state_kernel,
        LINEAR | {"decay": "*bf16", "out": "*fp32"},
        MAMBA_2 | {"beta": None, "L2NORM": False, "CHANNELS": False, "SOFTPLUS": True},
        1,
    ),
    "selective_scan": (
        selective_scan._selective_scan_kernel,
        dict.fromkeys(INPUTS, "*bf16") | dict.fromkeys(("A", "D", "states", "out"), "*fp32"),
        {"INNER": 8192, "N": 16, "BLOCK_I": selective_scan._BLOCK_I, "SOFTPLUS": True},
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


def report(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    names = kernel.arg_names
    kinds = kinds | ROWS | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("states", "out")},
    )
    options = {"num_warps": warps, "enable_fp_fusion": kernel is not CONV_KERNEL}
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
