"""Record the results of new calls of a graph as fake tensors, as Dynamo did for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from .fake_tensors import Layout, layout_key, memory_of
from .nodes import example, is_linear, is_ours


@contextmanager
def recording(graph: Graph) -> Iterator[Recorder]:
    """A recorder for new calls of ``graph``."""
    # Dynamo recorded normal tensors. The Python dispatcher has decompositions that support symbolic
    # sizes, and imports sympy.
    is_symbolic = any(isinstance(example(node), FakeTensor) for node in graph.nodes)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if is_symbolic:
            stack.enter_context(enable_python_dispatcher())
        yield Recorder()


class Recorder:
    """Records the results of linear calls and of views as fake tensors.

    A call with symbolic sizes takes a millisecond. Layers are equal, so the call is made for the
    first one, and the others get the layout of its result.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[Any, bool]] = {}

    def record(self, node: Node) -> None:
        """Record the result of ``node``: new tensors, or views of its first argument."""
        args, kwargs = tree_map_only(Node, example, (node.args, node.kwargs))
        leaves, structure = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (node.target, structure, *map(_leaf_key, leaves))
        if key not in self._known:
            if is_linear(node) and not isinstance(given[0], FakeTensor):
                # Without new_empty, torch would check with sympy that the shapes match.
                result = given[0].new_empty((*given[0].shape[:-1], given[1].shape[0]))
            elif node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)  # type: ignore[operator]
            first = next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            is_view = memory_of(first) == memory_of(given[0])
            self._known[key] = tree_map_only(Tensor, Layout.of, result), is_view
        layouts, is_view = self._known[key]
        node.meta["example_value"] = tree_map_only(
            Layout, lambda layout: layout.within(given[0]) if is_view else layout.new(), layouts
        )

    def update_users(self, source: Node) -> None:
        """Record the users of ``source`` again, as far as its layout has changed.

        pagespec's kernels determine the layout of their results themselves.
        """
        for user in source.users:
            if user.op == "output" or is_ours(user):
                continue
            before = _layouts(user)
            self.record(user)
            if _layouts(user) != before:
                self.update_users(user)

    def update_views(self, source: Node, memory: int) -> None:
        """Record all views of ``source`` again, as part of ``memory``.

        Other users compute their own tensors, whose strides do not change.
        """
        for user in source.users:
            recorded = tree_leaves(example(user))
            if any(isinstance(part, Tensor) and memory_of(part) == memory for part in recorded):
                self.record(user)
                self.update_views(user, memory)


def _layouts(node: Node) -> list[object]:
    return [_leaf_key(leaf) for leaf in tree_leaves(example(node))]


def _leaf_key(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return layout_key(leaf)
    return leaf.node.expr if isinstance(leaf, torch.SymInt) else repr(leaf)
