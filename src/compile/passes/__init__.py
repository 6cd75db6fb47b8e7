"""FX passes over the Dynamo graph. Each is a function ``(gm, context) -> number of rewrites``.

Read in this order: this file (which passes run, and in which order), ``fx.pass_context``,
``cleanup``, ``write_as_real``, ``write_as_linear``, ``cache_latents``, ``share_heads``,
``merge_linear``, ``bind_collectives``; then the rooms ``fusions`` and ``lowering``;
``replay_native`` for native kernels of a CPU; after all passes ``split_head``.

Imports ``compile.fusions``, ``compile.lowering``, ``compile.fx`` and ``kernels``. Imported by
``compile.captured_model``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from ..fx.pass_context import PassContext
from ..lowering.lower_cpu import lower_cpu
from .bind_collectives import bind_collectives
from .cache_latents import cache_latents
from .cleanup import cleanup
from .merge_linear import merge_linear
from .share_heads import share_heads
from .write_as_linear import write_as_linear
from .write_as_real import write_as_real

GraphPass = Callable[[GraphModule, PassContext], int]

# Valid for every way to run the graph.
COMMON_PASSES: dict[str, GraphPass] = {
    "cleanup": cleanup,
    "write_as_real": write_as_real,
    "write_as_linear": write_as_linear,
    "cache_latents": cache_latents,
    "share_heads": share_heads,
    "merge_linear": merge_linear,
    "bind_collectives": bind_collectives,
}

__all__ = [
    "COMMON_PASSES",
    "GraphPass",
    "PassContext",
    "cpu_passes",
    "gpu_passes",
    "run_passes",
]


def cpu_passes(is_native: bool) -> dict[str, GraphPass]:
    """For a graph run on a CPU. What the native kernels take is fused before; without them a fused
    call would only run the operations it replaces."""
    lowering: dict[str, GraphPass] = {"lower_cpu": lower_cpu}
    if not is_native:
        return lowering
    from ..fusions.fuse_activation import fuse_activation
    from ..fusions.fuse_norm import fuse_norm
    from ..fusions.fuse_rope_cos_sin import fuse_rope_cos_sin
    from ..fusions.fuse_rope_store import fuse_rope_store
    from .replay_native import replay_native

    return {
        "fuse_rope_store": fuse_rope_store,
        "fuse_norm": fuse_norm,
        "fuse_activation": fuse_activation,
        "fuse_rope_cos_sin": fuse_rope_cos_sin,
        **lowering,
        "replay_native": replay_native,
    }


def gpu_passes() -> dict[str, GraphPass]:
    """For a graph run on a GPU: our fused kernels, then the matmuls and attention.

    In this order: the rotary passes take the norms of queries, keys and latents, and the first and
    the one that joins attention match the ops; masks that go with the experts' sort lie between a
    matmul and its activation; a router is known by what it makes of its logits, whoever computes
    those; the sum over experts and its inverse are known by that sort; a norm that its matmul or a
    collective may take is theirs before it is that sum's.
    """
    # Triton, which they need, is only there on machines with a GPU.
    from ..fusions.combine_experts import combine_experts
    from ..fusions.fuse_activation import fuse_activation
    from ..fusions.fuse_all_reduce_norm import fuse_all_reduce_norm
    from ..fusions.fuse_attention_quantize import fuse_attention_quantize
    from ..fusions.fuse_combine_norm import fuse_combine_norm
    from ..fusions.fuse_expert_sort import fuse_expert_sort
    from ..fusions.fuse_gated_norm import fuse_gated_norm
    from ..fusions.fuse_norm import fuse_norm
    from ..fusions.fuse_norm_linear import fuse_norm_linear
    from ..fusions.fuse_quantize import fuse_quantize
    from ..fusions.fuse_rope_attention import fuse_rope_attention
    from ..fusions.fuse_rope_cos_sin import fuse_rope_cos_sin
    from ..fusions.fuse_rope_latent import fuse_rope_latent
    from ..fusions.fuse_rope_store import fuse_rope_store
    from ..fusions.fuse_route_rows import fuse_route_rows
    from ..fusions.fuse_router import fuse_router
    from ..fusions.fuse_row_parallel import fuse_row_parallel
    from ..fusions.fuse_wide_linear import fuse_wide_linear
    from ..fusions.sort_rows import sort_rows
    from ..lowering.lower_gpu import lower_gpu

    return {
        "fuse_rope_store": fuse_rope_store,
        "fuse_rope_attention": fuse_rope_attention,
        "fuse_rope_latent": fuse_rope_latent,
        "fuse_norm": fuse_norm,
        "fuse_gated_norm": fuse_gated_norm,
        "fuse_router": fuse_router,
        "fuse_expert_sort": fuse_expert_sort,
        "combine_experts": combine_experts,
        "fuse_route_rows": fuse_route_rows,
        "fuse_activation": fuse_activation,
        "fuse_rope_cos_sin": fuse_rope_cos_sin,
        "fuse_wide_linear": fuse_wide_linear,
        "lower_gpu": lower_gpu,
        "fuse_norm_linear": fuse_norm_linear,
        "fuse_quantize": fuse_quantize,
        "fuse_attention_quantize": fuse_attention_quantize,
        "sort_rows": sort_rows,
        "fuse_all_reduce_norm": fuse_all_reduce_norm,
        "fuse_row_parallel": fuse_row_parallel,
        "fuse_combine_norm": fuse_combine_norm,
    }


def run_passes(
    gm: GraphModule, context: PassContext, passes: dict[str, GraphPass]
) -> dict[str, int]:
    """Run ``passes`` in order, then recompile ``gm``; returns how many rewrites each made."""
    counts = {name: graph_pass(gm, context) for name, graph_pass in passes.items()}
    gm.graph.lint()
    gm.recompile()
    return counts
