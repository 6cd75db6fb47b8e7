"""Recomputes what Dynamo recorded about each node's result (shape, strides) after rewrites."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, inference_mode, no_grad
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from ..fx.fake_call_cache import Calls
from ..fx.fake_tensors import expressions
from ..fx.nodes import example
from .context import PassContext

logger = logging.getLogger("pagespec")


def propagate(gm: GraphModule, context: PassContext) -> int:
    """Rewrites nothing; returns the number of nodes whose record changed.

    Only what reads a new or changed result is run anew, on fake tensors: to run everything could
    add guards on sizes. Of calls alike, as those of one layer and the next, the first is run. What
    cannot run so keeps what it had.
    """
    changed: set[Node] = set()
    _describe_constants(gm, context)
    calls = Calls()
    # The Python dispatcher has the decompositions that cope with symbolic sizes.
    with inference_mode(False), no_grad(), enable_python_dispatcher():
        for node in gm.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            inputs, recorded = node.all_input_nodes, example(node)
            if recorded is None and not node.users:
                continue  # it only writes
            if recorded is not None and changed.isdisjoint(inputs):
                continue
            if any(example(n) is None for n in inputs):
                continue
            args, kwargs = tree_map_only(Node, example, (node.args, node.kwargs))
            call = calls.like(node.op, node.target, args, kwargs)
            # Many come out as they were: nothing needs to be made for those.
            if recorded is not None and call is not None and call.layout == _layout(recorded):
                continue
            try:
                result = _call(node, args, kwargs) if call is None else call.result()
            except Exception as error:
                logger.debug("%s cannot run on fake tensors: %s", node.format_node(), error)
                continue
            if call is None:
                calls.keep(result, _layout(result))
            if recorded is None or _layout(result) != _layout(recorded):
                node.meta["example_value"] = result
                changed.add(node)
    return len(changed)


def _describe_constants(gm: GraphModule, context: PassContext) -> None:
    """Record what placeholders for constants stand for, where an earlier pass did not."""
    fakes = [example(node) for node in gm.graph.nodes if node.op == "placeholder"]
    # The mode of the trace. Another may be active by now.
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    for node in gm.graph.nodes:
        tensor = context.constant(node)
        if mode is not None and tensor is not None and not isinstance(example(node), FakeTensor):
            with inference_mode(False):
                node.meta["example_value"] = mode.from_tensor(tensor, static_shapes=True)


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        # As expressions: to compare symbolic sizes would add a guard.
        return (expressions(value.shape), expressions(value.stride()), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(_layout(part) for part in value)
    return None


def _call(node: Node, args: Any, kwargs: Any) -> Tensor | Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
