"""FX passes over the Dynamo graph. Each is a function ``(gm, context) -> number of rewrites``."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from pagespec.compile.passes.cleanup import cleanup
from pagespec.compile.passes.context import PassContext
from pagespec.compile.passes.cpu_kernels import call_cpu_kernels
from pagespec.compile.passes.merge_linear import merge_linear

GraphPass = Callable[[GraphModule, PassContext], int]

# Valid for whoever executes the graph.
COMMON_PASSES: dict[str, GraphPass] = {"cleanup": cleanup, "merge_linear": merge_linear}
# For the graph that is run as it is, on a CPU: calls that a compiler could not look into.
CPU_GRAPH_PASSES: dict[str, GraphPass] = {"cpu_kernels": call_cpu_kernels}

__all__ = ["COMMON_PASSES", "CPU_GRAPH_PASSES", "GraphPass", "PassContext", "run_passes"]


def run_passes(
    gm: GraphModule, context: PassContext, passes: dict[str, GraphPass]
) -> dict[str, int]:
    """Run ``passes`` in order, then recompile ``gm``; returns how many rewrites each made."""
    counts = {name: graph_pass(gm, context) for name, graph_pass in passes.items()}
    gm.graph.lint()
    gm.recompile()
    return counts
