"""Batch-invariant calls on a CPU. They replace matmuls, and activations whose bits depend on the
place of an element.

``linear`` and experts become calls of :mod:`...kernels.matmul.cpu.invariant`. Any other matmul with
a constant (``x @ weight``, ``weight @ x``, ``bmm``, ``einsum``, ``addmm``) becomes a call of
:mod:`...kernels.matmul.cpu.products`. Weights are packed once, as far as the context has memory for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...kernels import e4m3
from ...kernels.attention import cpu_trial
from ...kernels.attention.cpu_invariant import AttentionRecipe
from ...kernels.fused import cpu_activation
from ...kernels.matmul.cpu import invariant, products
from ...kernels.matmul.cpu.invariant import MatmulRecipe
from ...kernels.matmul.cpu.recipe_cache import Recipes
from ...kernels.mla import dispatch as mla
from ...kernels.mla import head_matmul
from ...kernels.mla.head_matmul import HeadMatmulRecipe
from ..fx.nodes import (
    erase_unused,
    example,
    grouped_operands,
    is_linear,
    linear_operands,
    tensor_of,
)
from ..fx.pass_context import PassContext
from ..fx.products import Product, computation_of, constant_nodes, product_of, value_of
from ..weights import is_stand_in

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class InvariantCalls:
    """Calls that compute the same bits for a row in any batch. One recipe is chosen for all weights
    of a shape."""

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self._graph = graph
        self._context = context
        self._constants = constant_nodes(graph, context.constants)
        self._room = context.packing_bytes
        self._packed: dict[Node, tuple[Node, ...]] = {}
        self._recipes = Recipes(context.matmul_plan_dir, context.threads)

    def __call__(self, node: Node) -> _Call | None:
        """The call that replaces ``node``; None if it stays."""
        if is_linear(node):
            return self._linear(*linear_operands(node))
        grouped = grouped_operands(node)
        if grouped is not None:
            weight: Any = example(grouped[1])
            recipe = self._recipe(weight.transpose(1, 2)[0])
            return invariant.grouped_mm, (*grouped, recipe), {}
        found = product_of(node, self._constants.__contains__)
        if found is not None:
            return self._product(node, found)
        if node.target in (mla.latent_query, mla.head_values):
            rows, latent = node.args
            value: Any = example(latent)  # type: ignore[arg-type]
            heads = self.head_recipe(value)
            return node.target, (rows, latent, heads), {}  # type: ignore[return-value]
        # A value that is the same in each step needs no replacement.
        return None if node in self._constants else _activation(node)

    def attention_recipe(
        self, query: object, keys: object, values: object, v_dim: int
    ) -> AttentionRecipe:
        """The recipe for the heads of an attention call.

        Args:
            keys, values: the caches; None if values are part of the keys.
            v_dim: elements of such a value.
        """
        q, k, v = tensor_of(query), tensor_of(keys), tensor_of(values)
        assert q is not None
        assert k is not None
        num_q_heads, k_dim = map(int, q.shape[-2:])
        v_dim = v_dim if v is None else e4m3.head_dim(v)
        sizes = num_q_heads, int(k.shape[2]), k_dim, v_dim, v is None
        choose = partial(cpu_trial.choose_recipe, *sizes, self._context.threads)
        return self._recipes.find(AttentionRecipe(), f"attention {sizes}", choose)

    def head_recipe(self, weight: Tensor) -> HeadMatmulRecipe:
        """The recipe for weights ``[H, I, O]`` of this shape and layout."""
        num_heads, num_inputs, num_outputs = map(int, weight.shape)
        sizes = num_heads, num_inputs, num_outputs, weight.dtype, weight.stride(1) == 1
        choose = partial(head_matmul.choose_recipe, *sizes, self._context.threads)
        return self._recipes.find(HeadMatmulRecipe(1), f"heads {sizes}", choose)

    def erase_unused(self) -> None:
        """Erase views and copies of weights that no node reads any more, because their packed
        copies are read."""
        erase_unused(self._graph, [n for n in self._constants if n.op != "placeholder"])

    def _linear(self, x: Node, matrix: Node, bias: Node | None) -> _Call:
        value = self._value(matrix)
        recipe = self._recipe(
            example(matrix) if value is None else value,  # type: ignore[arg-type]
            may_pack=value is not None and self._has_room(matrix, value),
        )
        if recipe.is_packed and value is not None:
            (matrix,) = self._packed_weights(matrix, lambda whole: [whole.contiguous()])
        return invariant.linear, (x, matrix, bias, recipe), {}

    def _product(self, node: Node, found: Product) -> _Call | None:
        x, weight, addend, form = found
        value = self._value(weight)
        if value is None or is_stand_in(value):
            return None
        sizes = products.own_sizes(value, form)
        matrices = products.matrices_of(value, form)
        recipe = self._recipe(matrices[0], may_pack=self._has_room(weight, value))
        given: Any = weight
        if recipe.is_packed:
            given = self._packed_weights(
                weight, lambda whole: [m.contiguous() for m in products.matrices_of(whole, form)]
            )
        # The result is contiguous, while torch's may not be.
        for user in node.users:
            if user.op == "call_method" and user.target == "view":
                user.target = "reshape"
        return products.product, (x, given, addend, recipe, form, sizes), {}

    def _value(self, weight: Node) -> Tensor | None:
        """The value of a node that is the same in each step."""
        return value_of(weight, self._context.constants) if weight in self._constants else None

    def _has_room(self, weight: Node, value: Tensor) -> bool:
        return weight in self._packed or value.nbytes <= self._room

    def _packed_weights(
        self, weight: Node, split: Callable[[Tensor], Sequence[Tensor]]
    ) -> tuple[Node, ...]:
        """Placeholders for packed copies of the matrices ``[N, K]`` that a weight is split into."""
        if weight in self._packed:
            return self._packed[weight]
        value, sources = computation_of(weight, self._context.constants)

        def pack() -> list[Tensor]:
            return [invariant.pack(matrix) for matrix in split(value())]

        copies = pack()
        self._room -= sum(copy.numel() * copy.element_size() for copy in copies)
        source = weight
        while source.op != "placeholder":
            source = source.all_input_nodes[0]
        like = example(source)
        assert isinstance(like, Tensor)  # it stands for a constant
        nodes = []
        for i, copy in enumerate(copies):
            name = f"packed_{weight.name}" if len(copies) == 1 else f"packed_{i}_{weight.name}"
            with self._graph.inserting_before(source):
                packed = self._graph.placeholder(name)
            packed.meta["example_value"] = like.new_empty(copy.shape, dtype=copy.dtype)
            self._context.constants[packed.name] = copy
            nodes.append(packed)
        self._context.weights.copied(copies, sources, pack, "packed by oneDNN")
        self._packed[weight] = tuple(nodes)
        return self._packed[weight]

    def _recipe(self, matrix: Tensor, *, may_pack: bool = False) -> MatmulRecipe:
        """The recipe for weights ``[N, K]`` of this shape and layout."""
        num_outputs, num_inputs = map(int, matrix.shape)
        layouts = [matrix.stride(1) == 1]
        if may_pack:
            layouts.insert(0, True)  # a packed weight is a copy
        for is_contiguous in layouts:
            recipe = self._recipes.choose(
                num_outputs,
                num_inputs,
                matrix.dtype,
                is_contiguous=is_contiguous,
                may_pack=may_pack and is_contiguous,
            )
            if recipe.is_packed:
                break
        return recipe


def _activation(node: Node) -> _Call | None:
    name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    # In float32 rsqrt has the same bits everywhere, and its input has one element per row.
    is_float32 = getattr(example(node), "dtype", None) == torch.float32
    is_in_place = bool(node.kwargs.get("inplace"))
    is_even = name == "rsqrt" and is_float32
    if name not in cpu_activation.ELEMENTWISE or is_in_place or is_even:
        return None
    kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    return cpu_activation.elementwise, (name, *node.args), kwargs
