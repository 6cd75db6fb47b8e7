"""Compile the kernels around experts of few tokens for Hopper, at the shape of Qwen3-30B-A3B.

Prints properties of the results (JSON). ``test_experts_sm90.py`` runs this program in a process
without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from pagespec.kernels.fused import rms_norm
from pagespec.kernels.moe import expert_rows, grouped_mm, route_rows

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
EVENTS = {
    "griddepcontrol.launch_dependents": "d",
    "griddepcontrol.wait": "w",
    "cp.async.bulk.prefetch.L2": "p",
    "cp.async.bulk.tensor": "t",
    "ld.global": "l",
    "st.global": "s",
    "wgmma.mma_async": "m",
}


class Hopper:
    """A driver of which only the target is used."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


def compiled(module: Any, name: str, call: Callable[[], object]) -> Any:
    """The kernel ``name`` of a module as ``call`` launches it on a Hopper GPU."""
    kernel, found = getattr(module, name), []

    class Compiling:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: found.append(kernel.warmup(*args, grid=grid, **options))

    setattr(module, name, Compiling())
    module.overlap_options = lambda _: {"PDL": True, "launch_pdl": True}
    call()
    setattr(module, name, kernel)
    return found[0]


def events(kernel: Any) -> str:
    """The order of (d)ependents' start, the (w)ait, (p)refetches, (t)ensor copies, (l)oads,
    (s)tores and (m)atmuls."""
    found = re.findall("|".join(map(re.escape, EVENTS)), kernel.asm["ptx"])
    return "".join(EVENTS[name] for name in found)


def sum_layout(kernel: Any) -> str:
    """The layout over threads of the row whose float32 elements are summed."""
    text = kernel.asm["ttgir"]
    (name,) = re.findall(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", text)
    return str(re.findall(f"^{name} = (.*)$", text, re.MULTILINE)[0])


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def grouped(num_tokens: int, has_gate: bool) -> str:
    outs, k_size = (2 * INNER, HIDDEN) if has_gate else (HIDDEN, INNER)
    weight = empty(NUM_EXPERTS, outs, k_size).transpose(1, 2)
    x, offs = empty(num_tokens * TOP_K, k_size), empty(NUM_EXPERTS, dtype=torch.int32)
    options = {"has_gate": has_gate, "has_old_offs": not has_gate}
    call = lambda: grouped_mm.grouped_mm(x, weight, offs, **options)  # noqa: E731
    return events(compiled(grouped_mm, "_grouped_kernel", call))


def routed(num_tokens: int, normalisation: str) -> str:
    logits, tokens = empty(num_tokens, NUM_EXPERTS), empty(num_tokens, HIDDEN)
    starts = empty(3, dtype=torch.int32)
    options = (TOP_K, normalisation, torch.bfloat16, starts)
    call = lambda: route_rows.route_rows(logits, tokens, *options)  # noqa: E731
    return events(compiled(route_rows, "_route_rows_kernel", call))


def summed(hidden: int, dtype: torch.dtype) -> list[str]:
    """Of the joined kernel, also with a shared expert and with its gate, then of the norm alone."""
    residual, weight = empty(1, 2, hidden, dtype=dtype), empty(hidden, dtype=dtype)
    rows, weights = empty(2 * TOP_K, hidden, dtype=dtype), empty(2 * TOP_K, dtype=dtype)
    inverse = empty(2 * TOP_K, dtype=torch.int64)
    gate = empty(2, 7, dtype=dtype)[:, 3:4]

    def joined(*shared: Tensor) -> str:
        call = lambda: expert_rows.combine_add_rms_norm(  # noqa: E731
            rows, weights, inverse, TOP_K, residual, weight, 1e-6, "rounded", *shared
        )
        return sum_layout(compiled(expert_rows, "_combine_norm_kernel", call))

    call = lambda: rms_norm.add_rms_norm(residual, residual, weight, 1e-6, "rounded")  # noqa: E731
    alone = sum_layout(compiled(rms_norm, "_norm_kernel", call))
    return [joined(), joined(residual), joined(residual, gate), alone]


if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    print(
        json.dumps(
            {
                "routed": {n: routed(n, "renormalised") for n in (2, 16)},
                "routed by logits": {n: routed(n, "chosen") for n in (2, 16)},
                "gated": {n: grouped(n, True) for n in (2, 16)},
                "down": {n: grouped(n, False) for n in (2, 16)},
                "layouts": [
                    summed(hidden, dtype)
                    for dtype in (torch.bfloat16, torch.float32)
                    for hidden in (768, HIDDEN, 2880, 7168)
                ],
            }
        )
    )
