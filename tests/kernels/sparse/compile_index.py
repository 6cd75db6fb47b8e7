"""Compile the indexer kernels for Hopper and print the assembler's report (JSON).

Needs no GPU. ``test_index_kernels.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagespec.kernels.mla.decode import latent_decode_kernel
from pagespec.kernels.sparse.chosen import chosen_kernel
from pagespec.kernels.sparse.index_kernels import (
    choose_kernel,
    index_scores_kernel,
    store_keys_kernel,
)
from tests.support.assembled import assembled

_POINTERS = {
    **dict.fromkeys(("query", "key", "cache", "k_cache", "v_cache", "out"), "*bf16"),
    **dict.fromkeys(("weights", "partial", "stats"), "*fp32"),
    **dict.fromkeys(("scores", "chosen", "starts", "contexts", "tables", "table_rows"), "*i32"),
    **dict.fromkeys(("scale", "factor"), "fp32"),
    "slot_mapping": "*i64",
}
_UNALIGNED = ("weights", "starts", "contexts", "tables", "table_rows", "slot_mapping")
_LATENT = {
    "H": 128, "R": 512, "P": 64, "PAGE": 64, "LINES": 32, "BLOCK_N": 64, "ONES": 64,
    "NEAR_SPLIT": 256, "FAR_SPLIT": 512, "SPLIT_CHANGE": 2048, "NUM_CHOSEN": 2048,
    "BY_TOKEN": True, "PDL": True,
}  # fmt: skip
# Of DeepSeek-V3.2: kernel, constants, warps, stages.
CASES: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "store": (store_keys_kernel, {"D": 128, "PDL": True}, 1, 1),
    "scores": (
        index_scores_kernel,
        {
            "H": 64, "D": 128, "PAGE": 64, "STEP": 16, "NUM_CHOSEN": 2048, "BLOCK_N": 128,
            "PDL": True,
        },
        4,
        3,
    ),
    "choice": (choose_kernel, {"NUM_CHOSEN": 2048, "TILE": 8192, "PDL": True}, 16, 3),
    "latents": (latent_decode_kernel, {**_LATENT, "IS_SPLIT": False}, 8, 2),
    "latents, all in view": (
        latent_decode_kernel,
        {**_LATENT, "IS_SPLIT": False, "NUM_CHOSEN": 0, "chosen": None},
        8,
        2,
    ),
    "latents, split": (latent_decode_kernel, {**_LATENT, "IS_SPLIT": True}, 8, 2),
    "heads": (
        chosen_kernel,
        {
            "HQ": 128, "HKV": 128, "DK": 192, "DV": 128, "PAGE": 64, "NUM_CHOSEN": 2048,
            "GROUP": 16, "BLOCK_N": 32, "PDL": True, "cap_in": None, "cap_out": None,
            "sinks": None,
        },
        4,
        3,
    ),
}  # fmt: skip


def described(kernel: Any, constants: dict[str, Any], num_warps: int, stages: int) -> Any:
    names = kernel.arg_names
    kinds = {name: _POINTERS.get(name, "i32") for name in names}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = [n for n, kind in kinds.items() if kind.startswith("*") and n not in _UNALIGNED]
    source = ASTSource(
        kernel,
        kinds,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": stages}
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    said = assembled(built.asm["ptx"])
    spilled, registers = (
        re.search(pattern, said) for pattern in (r"(\d+) bytes spill stores", r"(\d+) registers")
    )
    assert spilled is not None
    assert registers is not None
    return {
        "spilled": int(spilled[1]),
        "registers": int(registers[1]),
        "shared": built.metadata.shared,
        "ptx": built.asm["ptx"].count("\n"),
    }


if __name__ == "__main__":
    print(json.dumps({name: described(*case) for name, case in CASES.items()}))
