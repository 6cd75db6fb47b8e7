"""Merge linear layers that read the same input (q, k, v; gate, up) into one matmul, also through
views that change nothing (a router, and the shared expert next to it).

The weights are concatenated in storage once, and the original parameters become views of it::

    big      [ q rows ....... | k rows .. | v rows .. ]  x in_features
    q.data = big[0:a]   k.data = big[a:b]   v.data = big[b:c]

So there is no second copy, state dicts and in-place weight updates keep working, and the graph gets
one more constant.

Rows of zeros follow if a row of the result would not be whole 16-byte units: with a router, a
shared expert and its gate, 1,281 or 1,537 outputs. TMA cannot store such rows, and kernels would
read parts of them two bytes at a time. The columns of those zeros are never read.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ...kernels.matmul.quantized.quantized_weight import merged as merged_weights
from ..fx.fake_tensors import fake_of, memory_of
from ..fx.nodes import (
    calls,
    dtype_of,
    example,
    is_linear,
    linear_operands,
    only_user,
    shape_of,
    written_nodes,
)
from ..fx.pass_context import PassContext
from ..fx.recorder import Recorder, recording
from ..weights import is_stand_in, stand_in

_UNIT_BYTES = 16
_PADDED_TO = 16
"""Outputs are padded to a multiple of this. 16-byte units would need less, but Triton specialises
strides on multiples of 16. Without it some CPU matmuls (:mod:`...kernels.matmul.cpu.invariant`)
would pad outputs to 16 in every call."""


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def consecutive_views(tensors: Sequence[Tensor], num_padding: int = 0) -> Tensor | None:
    """One tensor that spans ``tensors`` and that many rows after them, if they are back to back in
    one storage that has those rows; else None.

    The contents of the rows after them are not checked: the rows of this pass are zeros, but those
    of a checkpoint's fused tensor may belong to another parameter.
    """
    first = tensors[0]
    offset = first.storage_offset()
    for tensor in tensors:
        if _storage(tensor) != _storage(first) or tensor.storage_offset() != offset:
            return None
        if not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            return None
        offset += tensor.numel()
    num_rows = sum(tensor.shape[0] for tensor in tensors) + num_padding
    end = offset + num_padding * first.shape[1:].numel()
    if end * first.element_size() > first.untyped_storage().nbytes():
        return None
    shape = (num_rows, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def merge_storage(parameters: Sequence[Tensor], num_padding: int = 0) -> Tensor:
    """Store ``parameters`` back to back along dim 0, followed by that many rows of zeros, and make
    each a view; returns the whole.

    Parameters that were merged before (an earlier capture of the same model) stay in place.
    """
    # Normal tensors even if a capture runs in inference mode, because the parameters may be
    # trained.
    with torch.inference_mode(False), torch.no_grad():
        whole = consecutive_views(parameters, num_padding)
        if whole is not None:
            return whole
        parts = [parameter.detach() for parameter in parameters]
        if num_padding:
            parts.append(parts[0].new_zeros(num_padding, *parts[0].shape[1:]))
        whole = torch.cat(parts)
        begin = 0
        for parameter in parameters:
            end = begin + parameter.shape[0]
            parameter.data = whole[begin:end]
            begin = end
        return whole


def _movable(context: PassContext, users: Counter[int]) -> set[str]:
    """Placeholders of parameters that are used once in the graph and share storage with no
    other."""
    owners: Counter[int] = Counter()
    for tensor in {id(t): t for t in context.module.parameters()}.values():
        owners[tensor.data_ptr()] += 1
    return {
        name
        for name, tensor in context.constants.items()
        if isinstance(tensor, nn.Parameter)
        and (tensor.is_contiguous() or is_stand_in(tensor))
        and owners[tensor.data_ptr()] == 1
        and users[id(tensor)] == 1
    }


def merge_linear(gm: GraphModule, context: PassContext) -> int:
    """Rewrite; returns the number of linear calls that were merged away.

    Skips weights that are tied, used elsewhere, or of another dtype, width, quantised format or
    order of inputs; and groups in which only some layers have a bias.
    """
    graph = gm.graph
    users: Counter[int] = Counter()
    for node in graph.nodes:
        if (tensor := context.constant(node)) is not None:
            users[id(tensor)] += len(node.users)
    movable = _movable(context, users)
    written = written_nodes(graph)

    groups: dict[tuple[object, ...], dict[Node, list[Node]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for node in graph.nodes:
        if not is_linear(node):
            continue
        source, weight, bias = linear_operands(node)
        tensor = context.constant(weight)
        if tensor is None or weight.name not in movable:
            continue
        if bias is not None and (context.constant(bias) is None or bias.name not in movable):
            continue
        kind = (tensor.dtype, context.weight_format(tensor), context.input_order(tensor))
        key = (_same_rows(source, written), kind, tensor.shape[1], tensor.device, bias is None)
        groups[key][source].append(node)

    joined = [sorted(nodes) for group in groups.values() for nodes in _joined(group)]
    large = [nodes for nodes in joined if len(nodes) > 1]
    with recording(graph) as results:
        return sum(_merge_group(gm, context, nodes, results) for nodes in large)


def _same_rows(source: Node, written: set[Node]) -> Node:
    """The value of ``source`` before calls that change neither its shape nor its values. A value
    that is written in place may differ then."""
    while calls(source, "view", "reshape", "contiguous"):
        before = source.args[0]
        if shape_of(before) != shape_of(source) or dtype_of(before) != dtype_of(source):
            break
        if not written.isdisjoint({before, source}):
            break
        source = before
    return source


def _joined(by_source: dict[Node, list[Node]]) -> Iterator[list[Node]]:
    """Of linear layers that read the same rows through different views, those to merge.

    Layers of one view that a gated activation may follow are merged separately: the activation is
    fused with its matmul only if that has no other result. Merging more of them saves one launch,
    but costs one.
    """
    others: list[Node] = []
    for nodes in by_source.values():
        if len(by_source) > 1 and _may_have_gate(nodes):
            yield nodes
        else:
            others += nodes
    yield others


def _may_have_gate(nodes: list[Node]) -> bool:
    """Whether they are gate and up, or one layer that is both."""
    if len(nodes) == 1:
        return calls(only_user(nodes[0]), "chunk", "split")
    return len(nodes) == 2 and shape_of(nodes[0]) == shape_of(nodes[1])


def _merge_group(
    gm: GraphModule, context: PassContext, nodes: list[Node], results: Recorder
) -> int:
    graph = gm.graph
    operands = [linear_operands(node) for node in nodes]
    source = operands[0][0]
    weights = [context.constants[w.name] for _, w, _ in operands]
    sizes = [weight.shape[0] for weight in weights]
    num_padding = _num_padding(context, nodes, weights)
    weight = _merged_placeholder(gm, context, [w for _, w, _ in operands], num_padding)
    biases = [b for _, _, b in operands if b is not None]
    bias = _merged_placeholder(gm, context, biases, num_padding) if biases else None
    if num_padding:
        sizes.append(num_padding)
    with graph.inserting_before(nodes[0]):
        merged = graph.call_function(torch.nn.functional.linear, (source, weight, bias))
        parts = graph.call_method("split", (merged, sizes, -1))
        outputs = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(nodes))]
    for new in (merged, parts, *outputs):
        results.record(new)
    for node, output in zip(nodes, outputs, strict=True):
        for user in list(node.users):
            # A slice of the merged result is strided, which view() may refuse.
            if user.op == "call_method" and user.target == "view" and user.args[0] is node:
                user.target = "reshape"
        node.replace_all_uses_with(output)
        results.update_views(output, memory_of(example(node)))  # type: ignore[arg-type]
        graph.erase_node(node)
    for placeholder in [w for _, w, _ in operands] + biases:
        del context.constants[placeholder.name]
        graph.erase_node(placeholder)
    return len(nodes) - 1


def _num_padding(context: PassContext, nodes: list[Node], weights: Sequence[Tensor]) -> int:
    """The number of zero rows to put after ``weights`` of ``nodes``."""
    num_outputs = sum(weight.shape[0] for weight in weights)
    if num_outputs * weights[0].element_size() % _UNIT_BYTES == 0:
        return 0
    # The format determines the layout of quantised weights. Gate and up are identified by the
    # halves of their result, which is not stored if their activation is fused with the matmul.
    if context.weight_format(weights[0]) is not None or _may_have_gate(nodes):
        return 0
    return -num_outputs % _PADDED_TO


def _merged_placeholder(
    gm: GraphModule, context: PassContext, parts: list[Node], num_padding: int
) -> Node:
    """A constant that replaces those of ``parts`` with all their rows, followed by that many rows
    of zeros."""
    tensors = [context.constants[part.name] for part in parts]
    if is_stand_in(tensors[0]):
        num_outputs = sum(tensor.shape[0] for tensor in tensors) + num_padding
        shape = (num_outputs, tensors[0].shape[1])
        whole = stand_in(shape, tensors[0].dtype, tensors[0].device)
    else:
        whole = merge_storage(tensors, num_padding)
    context.weights.merged(tensors, whole)
    if context.weight_format(tensors[0]) is not None:
        held = [context.quantized.pop(id(tensor)) for tensor in tensors]
        context.quantized[id(whole)] = merged_weights(held)
    with gm.graph.inserting_before(parts[0]):
        node = gm.graph.placeholder(f"merged_{parts[0].name}")
    context.constants[node.name] = whole
    fake = example(parts[0])
    assert isinstance(fake, Tensor)  # it stands for a tensor
    # The mode of the trace. Another may be active by now.
    node.meta["example_value"] = fake_of(whole, fake)
    return node
