"""Compile the Hopper latent decode kernel and print properties of the result (JSON).

Needs no GPU. ``test_decode_sm90.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from pagespec.kernels.mla import decode_sm90, prefill_sm90
from tests.kernels.mla.compile_prefill_sm90 import shared_of, tensors
from tests.support.assembled import described


def build(case: dict[str, Any]) -> Any:
    kernel = decode_sm90.latent_decode_sm90_kernel
    names = kernel.arg_names
    query, cache = tensors(case)
    short = "fp16" if case.get("dtype") == "float16" else "bf16"
    shared, _ = shared_of(case, query.dtype)
    batch = {"BY_TOKEN": case["by_token"], "IS_SPLIT": case["is_split"], "PDL": True}
    own = decode_sm90.constants_of(case["rank"])
    constants = shared | {"PAGE": case["page"]} | batch | own
    lines = decode_sm90.LINES.value
    found = zip(("q_desc", "c_desc"), prefill_sm90.descriptors(query, cache, lines), strict=True)
    kinds = {
        **{name: f"tensordesc<{short}{d.block_shape},{d.layout!r}>" for name, d in found},
        **dict(zip(("out", "partial", "stats"), (f"*{short}", "*fp32", "*fp32"), strict=True)),
        **dict.fromkeys(("starts", "contexts", "tables", "table_rows"), "*i32"),
        **dict.fromkeys(constants, "constexpr"),
        "factor": "fp32",
    }
    source = GluonASTSource(
        kernel,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "partial", "stats")},
    )
    options = {"num_warps": 4, "maxnreg": decode_sm90.MEAN_REGISTERS, "launch_pdl": True}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    print(json.dumps([described(build(case)) for case in json.loads(sys.argv[1])]))
