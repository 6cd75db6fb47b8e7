"""FX passes over the Dynamo graph. Each is a function ``(gm, context) -> number of rewrites``.

Modules, in reading order: this file (which passes run, and their order), ``fx.pass_context``,
``cleanup``, ``write_as_real``, ``write_as_linear``, ``cache_latents``, ``share_heads``,
``merge_linear``, ``bind_collectives``; then the packages ``fusions`` and ``lowering``;
``replay_native`` for native kernels of a CPU; after all passes ``split_head``, and after the
compilation of regions ``hoist_keep_rows``.

Imports ``compile.fusions``, ``compile.lowering``, ``compile.fx`` and ``kernels``.
``compile.captured_model`` imports this package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Literal, NamedTuple

from torch.fx import GraphModule

from ..fx.check_graph import Bindings, SpecError, Stage, verify_graph
from ..fx.pass_context import PassContext

GraphPass = Callable[[GraphModule, PassContext], int]

__all__ = [
    "COMMON_PASSES",
    "GraphPass",
    "PassContext",
    "cpu_passes",
    "gpu_passes",
    "run_passes",
]

_Run = Literal["common", "cpu", "native", "gpu"]


class _Entry(NamedTuple):
    """The module of a pass, the kinds of graphs that run it, and the passes that it must follow."""

    module: str
    runs: tuple[_Run, ...]
    after: tuple[str, ...] = ()


_FUSED: tuple[_Run, ...] = ("native", "gpu")
_GPU: tuple[_Run, ...] = ("gpu",)
_JOINED = "..fusions.joined_norms"
_QUANTIZED = "..fusions.quantized_rows"
# Without native kernels, a fused call on a CPU would only run the operations that it replaces.
_PASSES: dict[str, _Entry] = {
    "cleanup": _Entry(".cleanup", ("common",)),
    "write_as_real": _Entry(".write_as_real", ("common",), ("cleanup",)),
    "write_as_linear": _Entry(".write_as_linear", ("common",), ("cleanup",)),
    "cache_latents": _Entry(".cache_latents", ("common",), ("write_as_linear",)),
    "share_heads": _Entry(".share_heads", ("common",)),
    "merge_linear": _Entry(".merge_linear", ("common",), ("write_as_linear", "cache_latents")),
    "bind_collectives": _Entry(".bind_collectives", ("common",)),
    "fuse_rope_store": _Entry("..fusions.fuse_rope_store", _FUSED),
    "fuse_rope_attention": _Entry("..fusions.fuse_rope_store", _GPU, ("fuse_rope_store",)),
    "fuse_rope_latent": _Entry("..fusions.fuse_rope_latent", _GPU),
    # The rotary passes match the norms of queries, keys and latents.
    "fuse_norm": _Entry("..fusions.fuse_norm", _FUSED, ("fuse_rope_store", "fuse_rope_latent")),
    "fuse_gated_norm": _Entry("..fusions.fuse_gated_norm", _GPU, ("fuse_norm",)),
    "fuse_router": _Entry("..fusions.fuse_router", _GPU),
    "fuse_expert_sort": _Entry("..fusions.fuse_expert_sort", _GPU),
    "combine_experts": _Entry("..fusions.combine_experts", _GPU, ("fuse_expert_sort",)),
    "fuse_route_rows": _Entry(
        "..fusions.fuse_route_rows", _GPU, ("fuse_router", "combine_experts")
    ),
    # Masks that the sort of experts removes are between a matmul and its activation.
    "fuse_activation": _Entry(
        "..fusions.fuse_activation", _FUSED, ("fuse_gated_norm", "fuse_expert_sort")
    ),
    "fuse_rope_cos_sin": _Entry("..fusions.fuse_rope_cos_sin", _FUSED),
    "fuse_wide_linear": _Entry("..fusions.fuse_router", _GPU, ("fuse_router",)),
    # The rotary passes match operators that lowering replaces.
    "lower_gpu": _Entry(
        "..lowering.lower_gpu",
        _GPU,
        ("fuse_rope_attention", "fuse_rope_latent", "fuse_activation", "fuse_wide_linear"),
    ),
    "lower_cpu": _Entry(
        "..lowering.lower_cpu",
        ("cpu", "native"),
        ("fuse_rope_store", "fuse_norm", "fuse_activation", "fuse_rope_cos_sin"),
    ),
    "replay_native": _Entry(".replay_native", ("native",), ("lower_cpu",)),
    "fuse_norm_linear": _Entry(_JOINED, _GPU, ("fuse_norm", "lower_gpu")),
    "fuse_quantize": _Entry(_QUANTIZED, _GPU, ("fuse_norm", "lower_gpu")),
    "fuse_attention_quantize": _Entry(_QUANTIZED, _GPU, ("lower_gpu",)),
    "sort_rows": _Entry("..fusions.sort_rows", _GPU, ("fuse_attention_quantize",)),
    # A norm is fused with its matmul rather than with a collective, and with either rather than
    # with a sum over experts.
    "fuse_all_reduce_norm": _Entry(
        _JOINED, _GPU, ("bind_collectives", "fuse_norm_linear", "fuse_quantize")
    ),
    "fuse_row_parallel": _Entry(_JOINED, _GPU, ("fuse_all_reduce_norm",)),
    "fuse_combine_norm": _Entry(_JOINED, _GPU, ("combine_experts", "fuse_all_reduce_norm")),
}


def in_order(after: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Names sorted so that each comes after all in its ``after``; otherwise in the given order.

    Raises:
        ValueError: the constraints form a cycle.
    """
    left, order = dict(after), list[str]()
    while left:
        name = next((n for n, earlier in left.items() if left.keys().isdisjoint(earlier)), None)
        if name is None:
            raise ValueError(f"no order of {', '.join(left)}")
        order.append(name)
        del left[name]
    return order


def _passes_of(run: _Run) -> dict[str, GraphPass]:
    chosen = {name: entry for name, entry in _PASSES.items() if run in entry.runs}
    return {
        name: getattr(import_module(chosen[name].module, __package__), name)
        for name in in_order({name: entry.after for name, entry in chosen.items()})
    }


COMMON_PASSES = _passes_of("common")
"""Valid for every way to run the graph."""


def cpu_passes(is_native: bool) -> dict[str, GraphPass]:
    """For a graph that runs on a CPU, with or without native kernels."""
    return _passes_of("native" if is_native else "cpu")


def gpu_passes() -> dict[str, GraphPass]:
    """For a graph that runs on a GPU. These passes import Triton, which only machines with a GPU
    have."""
    return _passes_of("gpu")


def run_passes(
    gm: GraphModule, context: PassContext, passes: dict[str, GraphPass]
) -> dict[str, int]:
    """Run ``passes`` in order, then recompile ``gm``; returns the number of rewrites of each.

    Raises:
        SpecError: with ``PAGESPEC_CHECK_GRAPH=1``, a pass left a node that breaks a rule.
    """
    is_checked = os.environ.get("PAGESPEC_CHECK_GRAPH") == "1"
    counts: dict[str, int] = {}
    for name, graph_pass in passes.items():
        counts[name] = graph_pass(gm, context)
        if is_checked:
            try:
                verify_graph(
                    gm, _stage(counts, context), Bindings(context.constants, context.sources)
                )
            except SpecError as error:
                raise SpecError(f"after {name}: {error}") from None
    gm.graph.lint()
    gm.recompile()
    return counts


def _stage(done: Mapping[str, int], context: PassContext) -> Stage:
    """A transparent engine replaces all matmuls. Attention is replaced if a backend was
    selected."""
    if "lower_cpu" in done and context.transparent:
        return "cpu"
    return "gpu" if "lower_gpu" in done and context.attention is not None else "common"
