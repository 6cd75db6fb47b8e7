"""Fuses attention with the rounding of its outputs to the rows of an FP8 matmul.

::

    attention [T, Hq, Dv] ──► reshape [1, T, Hq * Dv] ──► dispatch_fp8.linear(·, weight)

It comes after ``lower_gpu``, which makes both calls. Where a head has a multiple of 128 values,
each group of channels that share a scale is of one head, so the kernels of attention can round what
they store. What something else reads, too, stays, and so does what another operation comes between.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from ...kernels.fused.e4m3_groups import GROUP
from ...kernels.quantized import dispatch_fp8
from ..fx.nodes import calls, erase_unused, example, only_user, shape_of
from ..fx.pass_context import PassContext

# None of them changes the order of elements.
_RESHAPES = ("unsqueeze", "squeeze", "reshape", "view", "flatten", "contiguous")


def fuse_attention_quantize(gm: GraphModule, context: PassContext) -> int:
    """Rewrites, and returns the number of attentions that quantise; 0 if what the context chose has
    no such call. Results are unchanged bit for bit."""
    attention = context.attention
    if attention is None or not attention.quantizing:
        return 0
    graph, count = gm.graph, 0
    for node in list(graph.nodes):
        quantizing = attention.quantizing.get(node.target) if node.op == "call_function" else None
        if quantizing is None or node.kwargs:
            continue
        *between, matmul = _matmul_of(node)
        like = example(matmul)
        if matmul.target is not dispatch_fp8.linear or not isinstance(like, Tensor):
            continue
        if not _has_groups_of_a_head(node, matmul):
            continue
        with graph.inserting_before(node):
            rows = graph.call_function(quantizing, node.args)
        with graph.inserting_before(matmul):
            joined = graph.call_function(
                dispatch_fp8.linear_of_rows, (rows, like.dtype, like.dim(), *matmul.args[1:])
            )
        joined.meta["example_value"] = like
        matmul.replace_all_uses_with(joined)
        erase_unused(graph, [*between, matmul])
        count += 1
    return count


def _matmul_of(node: Node) -> list[Node]:
    """The reshapes that lead from ``node``, each the only reader of the one before, and what reads
    the last of them; ``node`` itself if none alone does."""
    chain = [node]
    while (user := only_user(chain[-1])) is not None and user.args[:1] == (chain[-1],):
        chain.append(user)
        if user.op != "call_method" or not calls(user, *_RESHAPES):
            break
    return chain


def _has_groups_of_a_head(node: Node, matmul: Node) -> bool:
    """Whether the rows of ``matmul`` are the tokens of attention, and each 128 channels of a row
    are of one head."""
    outputs, results = shape_of(node), shape_of(matmul)
    rows = example(matmul.args[0]) if isinstance(matmul.args[0], Node) else None
    if outputs is None or results is None or not isinstance(rows, Tensor) or len(results) < 2:
        return False
    num_tokens, *heads = outputs
    if len(heads) != 2 or not all(size.isdigit() for size in heads) or int(heads[1]) % GROUP:
        return False
    is_flat = str(rows.shape[-1]) == str(int(heads[0]) * int(heads[1]))
    return is_flat and results[-2] == num_tokens and set(results[:-2]) <= {"1"}
