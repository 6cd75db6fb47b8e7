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
    """The module a graph was captured from, and the tensors bound to its placeholders.

    Attributes:
        module: the model; the parameters of it may move in storage, never change in value.
        constants: placeholder name to the parameter or buffer bound to it. A pass that adds a
            placeholder for a constant enters it here.
        transparent: whether a row's bits must not depend on the rest of the batch.
        packing_bytes: memory that packed copies of weights may take; 0 if weights may change.
        matmul_plan_dir: where plans of matmuls are kept (:mod:`.plan_cache`), on a CPU recipes
            (:mod:`.recipe_cache`).
        threads: thread counts that a CPU may run the graph with, in descending order; none: the
            present count alone.
        attention: the implementation to call in place of the ops; None keeps the ops.
        communicator: the same for collectives.
        quantized: weights to keep quantised, by the ``id`` of the constant that they are the values
            of or stand in for; None for float16.
        is_native: whether to call :mod:`.kernels.native`, which they and the operations between
            them then go to.
        weight_formats: where there are such weights, how many elements each format holds.
        float32_matrices: names of the parameters that then stay float32, on a GPU in the model's
            dtype, but for vectors.
        specs: of the attention calls; a pass that changes what a call caches changes its spec.
        calls: of the placeholder of each cache of keys, the attention call.
        caches_latents: whether latent vectors may be cached in place of keys and values.
        sources: of each placeholder that is no constant, as in :attr:`.Traced.sources`.
        fields: of a step, whose inputs :meth:`step_input` finds.
        weights: where a pass records each weight that it lays elsewhere or makes a copy of.
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
        """The placeholder of a tensor of the step; None if the model reads none of that name and no
        field is declared so. A declared one that the model does not read is added."""
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
        """Its sizes on record are those of an input that the graph has for the same of a step."""
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
        # As traced ones, which are no tensors of inference.
        with torch.inference_mode(False), torch.no_grad():
            node.meta["example_value"] = recorded.new_empty(
                declared.shape(num_entries), dtype=TORCH_DTYPES[declared.dtype]
            )
        self.sources[node.name] = ("input", declared.name)
        return node

    def weight_format(self, tensor: Tensor) -> str | None:
        """What a constant is kept as: "int4", "int8", "fp8", "float16", or None for what it is."""
        if id(tensor) not in self.quantized:
            return None
        weight = self.quantized[id(tensor)]
        has_kernels = self.is_native or tensor.is_cuda or is_stand_in(tensor)
        return weight.format if weight and (has_kernels or fits_int4(weight)) else "float16"

    def input_order(self, tensor: Tensor) -> str | None:
        """A name for the order in which a constant's quantised weight has its inputs; None for
        their own."""
        weight = self.quantized.get(id(tensor))
        if weight is None or weight.order is None:
            return None
        return hashlib.sha256(weight.order.cpu().numpy().tobytes()).hexdigest()
