"""The rules that a graph must follow, as a table, and a check of a graph against them.

Tests and ``PAGESPEC_CHECK_GRAPH=1`` check after every pass and name the pass that broke a rule. A
start does not check: a graph that was correct once is correct every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from .nodes import (
    PLAIN,
    calls,
    calls_op,
    example,
    is_linear,
    is_ours,
    linear_operands,
)
from .products import constant_nodes, library_matmul

Stage = Literal["common", "cpu", "gpu"]
"""After the passes for all devices, and after those for a CPU or a GPU."""


class SpecError(AssertionError):
    """A node breaks a rule."""


class Bindings(NamedTuple):
    """The values of placeholders, by name.

    Attributes:
        constants: parameters and buffers. sources: values that differ from step to step.
    """

    constants: Mapping[str, Tensor]
    sources: Mapping[str, object]


class Rule(NamedTuple):
    text: str
    stages: tuple[Stage, ...]
    holds: Callable[[Node, Bindings], bool]


def _is_bound(node: Node, bound: Bindings) -> bool:
    places = (bound.constants, bound.sources)
    return node.op != "placeholder" or sum(node.name in place for place in places) == 1


def _describes_its_constant(node: Node, bound: Bindings) -> bool:
    constant, recorded = bound.constants.get(node.name), example(node)
    if node.op != "placeholder" or constant is None:
        return True
    if not isinstance(constant, Tensor):  # a packed weight of FBGEMM
        return True
    if not isinstance(recorded, Tensor) or recorded.dtype != constant.dtype:
        return False
    # A packed copy of a weight has a layout of its library.
    return constant.is_mkldnn or constant.shape == recorded.shape


def _takes_data(node: Node, _: Bindings) -> bool:
    kinds = (*PLAIN, Node, slice, complex, type(...), torch.dtype, torch.device, torch.layout)
    return all(isinstance(leaf, kinds) for leaf in tree_leaves((node.args, node.kwargs)))


def _is_recorded(node: Node, _: Bindings) -> bool:
    """pagespec's kernels need no record. Several results of one call are recorded separately."""

    def needs_none(user: Node) -> bool:
        if is_ours(node) and calls(user, "getitem"):
            return True
        # A view, to which this rule also applies.
        return is_ours(user) or (user.op == "call_method" and example(user) is None)

    return example(node) is not None or all(map(needs_none, node.users))


def _is_no_matmul(node: Node, bound: Bindings) -> bool:
    """No result depends on the number of rows: pagespec's kernels compute each matmul of a step."""
    if is_linear(node):
        return False
    return library_matmul(node, lambda n: n in constant_nodes(node.graph, bound.constants)) is None


def _has_no_constant_weight(node: Node, bound: Bindings) -> bool:
    """No ``linear`` has a constant weight, except one whose layout the kernels do not support, or
    one that is computed from constants."""
    if not is_linear(node):
        return True
    weight = linear_operands(node)[1]
    constant = bound.constants.get(weight.name)
    if constant is None:
        return weight not in constant_nodes(node.graph, bound.constants)
    return constant.dim() != 2 or not constant.is_contiguous()


_ALL: tuple[Stage, ...] = ("common", "cpu", "gpu")
_OPS = ("placeholder", "call_function", "call_method", "output")
RULES = (
    Rule("nothing is read off a module", _ALL, lambda node, _: node.op in _OPS),
    Rule("a placeholder is a constant or a step's input", _ALL, _is_bound),
    Rule("a constant has its own shape and dtype on record", _ALL, _describes_its_constant),
    Rule("arguments are nodes and plain data", _ALL, _takes_data),
    Rule("what a call that is not ours reads is on record", _ALL, _is_recorded),
    Rule(
        "attention, KV store and indexers are lowered",
        ("cpu", "gpu"),
        lambda node, _: (
            not any(calls_op(node, op) for op in ("paged_attention", "kv_store", "index_topk"))
        ),
    ),
    Rule("all matmuls are ours", ("cpu",), _is_no_matmul),
    Rule("all matmuls with constant weights are ours", ("gpu",), _has_no_constant_weight),
)


def verify_graph(gm: GraphModule, stage: Stage, bound: Bindings) -> None:
    """Check every node against the rules of a stage.

    Raises:
        SpecError: names the first node that breaks a rule, and the rule.
    """
    gm.graph.lint()
    for node in gm.graph.nodes:
        for rule in RULES:
            if stage in rule.stages and not rule.holds(node, bound):
                raise SpecError(f"{node.format_node() or node.name}: not so: {rule.text}")
