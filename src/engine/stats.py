"""Statistics of an engine: counters, start-up times, memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters grow, nothing is reset.

    Attributes:
        attention: the attention implementation chosen, and attention_reason why.
        num_captures: graphs traced from the model; 0 if the graph was read from the disk.
        num_compilations: pieces compiled by Inductor, and forms of Triton's and Gluon's kernels,
            in this process; compiled or taken from the disk.
        num_graphs: CUDA graphs captured.
        num_steps: steps dispatched.
        quantization: how weights are held that stay quantised, in words; None if none are.
        weight_formats: then, how many elements of the weights are held in which format ("int4",
            "fp8", or a dtype); else empty. float32_matrices: which stay in float32, on a GPU in
            the model's dtype, by name.
        library_matmuls: of a transparent engine on a GPU, by operation, the number of matmuls with
            weights that cuBLAS computes. A row's bits may then depend on the number of rows
            (docs/transparency.md).
        startup_s: seconds of start-up by part ("load", "probe", "capture", "compile", "kv_cache",
            "graphs").
        memory_bytes: "weights", "kv_cache", "states" (of recurrent layers), "activations",
            "graphs", "peak", "budget", "total"; empty on a CPU.
        host_s: seconds of the engine's thread by part ("schedule", "pack", "masks", "commit",
            "wait"); masks is waiting for masks of constrained rows, wait is for the device.
    """

    attention: str = ""
    attention_reason: str = ""
    num_captures: int = 0
    num_compilations: int = 0
    num_graphs: int = 0
    num_steps: int = 0
    startup_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    quantization: str | None = None
    weight_formats: dict[str, int] = field(default_factory=dict)
    float32_matrices: list[str] = field(default_factory=list)
    library_matmuls: dict[str, int] = field(default_factory=dict)
    host_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part of start-up."""
        begin = time.perf_counter()
        yield
        self.startup_s[part] = self.startup_s.get(part, 0.0) + time.perf_counter() - begin
