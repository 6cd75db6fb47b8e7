"""Print the variants of the decode kernel that batches need, as if on an H100.

Nothing is compiled or launched. ``test_decode_forms.py`` runs this program in a process without
Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from pagespec.kernels.attention import launch
from pagespec.kernels.attention.decode import decode_kernel
from tests.kernels.attention.rope_prologue import Case
from tests.kernels.jit.parallel_build_cases import FakeDriver
from tests.support.paged import Rows, Shape

SHAPE = Shape(hq=16, hkv=8, dk=128, dv=128, dtype=torch.bfloat16)


def main() -> None:
    found: set[str] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if fn.jit_function is decode_kernel:
            found.add(compile["specialization_data"])
        return True  # leaves the launch out

    driver.set_active(FakeDriver())  # type: ignore[arg-type]
    knobs.runtime.jit_cache_hook = note

    def forms(is_turned: bool, num_rows: int, context: int) -> list[str]:
        """The kernel variants of a batch with so many rows of one token each."""
        rows: Rows = [(context, 1)] * num_rows
        case = Case(SHAPE, rows, num_padding=0)
        order = torch.arange(num_rows, dtype=torch.int32)
        found.clear()
        if is_turned:
            case.one(order=order)
        else:
            layout = case.attention_of(case.k_cache, case.v_cache)
            launch.paged_attention(case.inputs.query, *layout, order=order)
        return sorted(found)

    print(json.dumps([forms(*batch) for batch in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
