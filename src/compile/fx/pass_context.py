"""The context of a pass: constants bound to the graph, the attention backend, settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from ...kernels.attention.attention_spec import AttentionSpec
from ...kernels.attention.backend import AttentionBackend
from ...kernels.collectives.communicator import Communicator
from ...kernels.matmul.cpu.quantized import fits_int4
from ...kernels.matmul.quantized.quantized_weight import QuantizedWeight
from ..step_fields import FIELDS, TORCH_DTYPES, Field, graph_inputs
from ..weights import WeightRecord, is_stand_in
from .nodes import example


@dataclass(slots=True)
class PassContext:
    """The module from which a graph was captured, and the tensors bound to its placeholders.

    Attributes:
        module: the model. Its parameters may move in storage, but never change in value.
        constants: placeholder name to the parameter or buffer bound to it. A pass that adds a
            placeholder for a constant adds it here.
        transparent: whether a row's bits must not depend on the rest of the batch.
        packing_bytes: memory for packed copies of weights; 0 if weights may change.
        matmul_plan_dir: folder for matmul plans (:mod:`...kernels.matmul.plan_cache`), on a CPU for
            recipes (:mod:`...kernels.matmul.cpu.recipe_cache`).
        threads: thread counts with which a CPU may run the graph, in descending order; empty: only
            the present count.
        attention: the implementation to call instead of the ops; None keeps the ops.
        communicator: the same for collectives.
        quantized: weights to keep quantised, by the ``id`` of the constant whose values they have,
            or which stands in for them; None for float16.
        is_native: whether to call :mod:`...kernels.native` for these weights and the operations
            between them.
        weight_formats: if there are such weights, the number of elements per format.
        float32_matrices: names of the other parameters, except vectors. These stay float32, on a
            GPU in the model's dtype.
        specs: of the attention calls. A pass that changes what a call caches changes its spec.
        calls: the attention call, by the placeholder of each cache of keys.
        caches_latents: whether latent vectors may be cached instead of keys and values.
        sources: of each placeholder that is not a constant, see :attr:`.Traced.sources`.
        fields: of a step; :meth:`step_input` finds the inputs among them.
        weights: where a pass records each weight that it moves or copies.
    """

    module: nn.Module
    constants: dict[str, Tensor]
    transparent: bool = True
    attention: AttentionBackend | None = None
    communicator: Communicator | None = None
    packing_bytes: int = 0
    matmul_plan_dir: Path | None = None
    threads: tuple[int, ...] = ()
    quantized: dict[int, QuantizedWeight | None] = field(default_factory=dict)
    is_native: bool = False
    weight_formats: dict[str, int] = field(default_factory=dict)
    float32_matrices: list[str] = field(default_factory=list)
    specs: list[AttentionSpec] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    caches_latents: bool = False
    sources: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    fields: Sequence[Field] = FIELDS
    weights: WeightRecord = field(default_factory=WeightRecord)

    def constant(self, node: object) -> Tensor | None:
        """The tensor bound to ``node``, if it is a placeholder for a parameter or buffer."""
        if isinstance(node, Node) and node.op == "placeholder":
            return self.constants.get(node.name)
        return None

    def step_input(self, graph: Graph, name: str) -> Node | None:
        """The placeholder of a tensor of the step. None if the model reads no tensor of that name
        and no field with that name is declared. A declared field that the model does not read is
        added."""
        found = self._placeholder(graph, name)
        declared = {field.name: field for field in graph_inputs(self.fields)}
        if found is None and name in declared:
            found = self._new_input(graph, declared[name])
        return found

    def _placeholder(self, graph: Graph, name: str) -> Node | None:
        placeholders = (node for node in graph.nodes if node.op == "placeholder")
        wanted = ("input", name)
        return next((node for node in placeholders if self.sources.get(node.name) == wanted), None)

    def _new_input(self, graph: Graph, declared: Field) -> Node | None:
        """Its recorded sizes are those of an existing input with the same dimensions of a step."""
        alike = (f for f in graph_inputs(self.fields) if f.per == declared.per)
        like = next((p for f in alike if (p := self._placeholder(graph, f.name))), None)
        if declared.per == "step":
            like = self._placeholder(graph, "input_ids")
        if like is None:
            return None
        recorded: Any = example(like)
        num_entries = 1 if declared.per == "step" else recorded.shape[-1]
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            node = graph.placeholder(declared.name)
        # Like traced tensors, which are not inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            node.meta["example_value"] = recorded.new_empty(
                declared.shape(num_entries), dtype=TORCH_DTYPES[declared.dtype]
            )
        self.sources[node.name] = ("input", declared.name)
        return node

    def weight_format(self, tensor: Tensor) -> str | None:
        """The format in which a constant is kept: "int4", "int8", "fp8", "float16", or None for its
        own dtype."""
        if id(tensor) not in self.quantized:
            return None
        weight = self.quantized[id(tensor)]
        has_kernels = self.is_native or tensor.is_cuda or is_stand_in(tensor)
        return weight.format if weight and (has_kernels or fits_int4(weight)) else "float16"

    def input_order(self, tensor: Tensor) -> str | None:
        """A name for the order of inputs of a constant's quantised weight; None for their own
        order."""
        weight = self.quantized.get(id(tensor))
        if weight is None or weight.order is None:
            return None
        return hashlib.sha256(weight.order.cpu().numpy().tobytes()).hexdigest()
