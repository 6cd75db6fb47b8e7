"""Fuses a matmul, the all-reduce of its results and the norm behind that into one call.

::

    linear(x, weight) ─► all_reduce_norm(·, residual, ·) ──┬─► normed
                                                           └─► the sum, for the next residual

Of a few rows the matmul then pushes to the other ranks itself. It comes after
``fuse_all_reduce_norm``.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ...kernels.linear import dispatch as gpu_linear
from ...kernels.linear.dispatch import RowParallel
from ..fx.nodes import calls_function, only_user
from ..fx.pass_context import PassContext


def fuse_row_parallel(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of matmuls joined. Bits are unchanged, as
    :meth:`.dispatch.RowParallel.linear_norm` promises."""
    communicator, count = context.communicator, 0
    if communicator is None:
        return 0
    layers = RowParallel(communicator)
    for node in list(gm.graph.nodes):
        if not calls_function(node, communicator.all_reduce_norm):
            continue
        matmul, *norm = node.args
        if not calls_function(matmul, gpu_linear.linear) or not only_user(matmul):
            continue
        x, weight, bias, max_custom_rows = matmul.args
        if bias is not None or context.constant(weight) is None:
            continue
        node.target, node.args = layers.linear_norm, (x, weight, max_custom_rows, *norm)
        gm.graph.erase_node(matmul)
        count += 1
    return count
