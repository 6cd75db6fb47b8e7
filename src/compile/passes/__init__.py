"""FX passes over the Dynamo graph. Each is a function ``(gm, context) -> number of rewrites``.

Read in this order: this file (which passes run, and in which order), ``context``, ``cleanup``,
``write_as_real``, ``write_as_linear``, ``latent_pattern`` and ``cache_latents``, ``share_heads``,
``merge_linear``, ``bind_collectives``; on a CPU ``lower_cpu``, ``invariant_calls``,
``quantize_linear`` and, for native kernels, some of the ``fuse_*`` passes and ``replay_native``; on
a GPU ``rms_norm`` (recognised, not rewritten), the ``fuse_*`` passes and ``lower_gpu``; after all
passes ``split_head``. Weights that stay quantised are the work of ``quantize_linear`` on both; a
GPU's kernels for them are the table in ``gpu_quantized``.

Imports ``compile.fx`` and ``kernels``. Imported by ``compile.captured_model``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from .bind_collectives import bind_collectives
from .cache_latents import cache_latents
from .cleanup import cleanup
from .context import PassContext
from .lower_cpu import lower_cpu
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
    from .fuse_activation import fuse_activation
    from .fuse_norm import fuse_norm
    from .fuse_rope_cos_sin import fuse_rope_cos_sin
    from .fuse_rope_store import fuse_rope_store
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
    from .combine_experts import combine_experts
    from .fuse_activation import fuse_activation
    from .fuse_all_reduce_norm import fuse_all_reduce_norm
    from .fuse_attention_quantize import fuse_attention_quantize
    from .fuse_combine_norm import fuse_combine_norm
    from .fuse_expert_sort import fuse_expert_sort
    from .fuse_gated_norm import fuse_gated_norm
    from .fuse_norm import fuse_norm
    from .fuse_norm_linear import fuse_norm_linear
    from .fuse_quantize import fuse_quantize
    from .fuse_rope_attention import fuse_rope_attention
    from .fuse_rope_cos_sin import fuse_rope_cos_sin
    from .fuse_rope_latent import fuse_rope_latent
    from .fuse_rope_store import fuse_rope_store
    from .fuse_route_rows import fuse_route_rows
    from .fuse_router import fuse_router
    from .fuse_row_parallel import fuse_row_parallel
    from .fuse_wide_linear import fuse_wide_linear
    from .lower_gpu import lower_gpu
    from .sort_rows import sort_rows

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
