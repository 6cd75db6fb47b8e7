"""Compile the Hopper latent prefill kernel and print properties of the result (JSON).

Needs no GPU. ``test_prefill_sm90.py`` runs this program in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from pagespec.kernels.mla import prefill_sm90
from pagespec.kernels.mla.launch import choose_tiling
from tests.support.assembled import described


def tensors(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A query and a cache of a case."""
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    width = case["rank"] + case["rope"]
    query = torch.empty(4, case["heads"], width, dtype=dtype)
    return query, torch.empty(3, case["page"], 1, width, dtype=dtype)


def shared_of(case: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Any], int]:
    tiling = choose_tiling(dtype, case["heads"], torch.device("cpu"))
    splits = (tiling.near_split, tiling.far_split, tiling.split_change)
    names = ("NEAR_SPLIT", "FAR_SPLIT", "SPLIT_CHANGE")
    constants = {"H": case["heads"], "R": case["rank"], **dict(zip(names, splits, strict=True))}
    return constants, tiling.block_n


def fits(case: dict[str, Any]) -> list[bool]:
    """Whether there is a kernel, and whether it is used, which it never is on a CPU."""
    query, cache = tensors(case)
    if case.get("transposed"):
        cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
    _, block_n = shared_of(case, query.dtype)
    given = (query, cache, case["rank"], block_n)
    return [prefill_sm90.fits(*given), prefill_sm90.is_served(*given)]


def build(case: dict[str, Any]) -> Any:
    kernel = prefill_sm90.latent_prefill_kernel
    names = kernel.arg_names
    query, cache = tensors(case)
    short = "fp16" if query.dtype == torch.float16 else "bf16"
    shared, _ = shared_of(case, query.dtype)
    singles = {"SINGLES": prefill_sm90.serves_singles(case["heads"])}
    constants = shared | {"PAGE": case["page"]} | singles | prefill_sm90.constants_of(case["rank"])
    found = zip(("q_desc", "c_desc"), prefill_sm90.descriptors(query, cache), strict=True)
    kinds = {
        **{name: f"tensordesc<{short}{d.block_shape},{d.layout!r}>" for name, d in found},
        **dict(zip(("out", "scratch", "factor"), (f"*{short}", "*fp32", "fp32"), strict=True)),
        **dict.fromkeys(("counter", "starts", "contexts", "tables", "table_rows"), "*i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = GluonASTSource(
        kernel,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "scratch", "counter")},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    answer = {
        "fits": [fits(case) for case in asked["fits"]],
        "built": [described(build(case)) for case in asked["build"]],
    }
    print(json.dumps(answer))
