"""Capture a Hugging Face module into one graph, and run that graph without guards.

The graph comes from Dynamo (:mod:`.capture.dynamo`), or from disk if it was traced before. Then the
passes run. From then on it is called with one flat list of arguments: parameters are bound once,
per-step tensors are filled in by name, and sizes are read from the tensors.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..errors import InvalidInputError
from ..kernels.attention.attention_spec import AttentionSpec
from ..kernels.attention.backend import AttentionBackend
from ..kernels.collectives.communicator import Communicator, LoneRank, communicator_scope
from ..kernels.native.library import library
from ..kernels.sampling.sampler import VocabShard
from .capture.graph_json import Source, Traced
from .fx.products import library_matmuls
from .inductor.regions import compile_regions
from .model.loaded import LoadedModel
from .passes import COMMON_PASSES, PassContext, cpu_passes, gpu_passes, run_passes
from .passes.hoist_keep_rows import hoist_keep_rows
from .passes.split_head import expose_hidden, extract_head, without_head
from .step_fields import FIELDS, Field
from .step_inputs import BoundGraph, KVCaches, RecurrentStates, StepInputs, StepOutputs
from .weights import ModuleNames, WeightMap, WeightRecord

logger = logging.getLogger("pagespec")

# Modules that Dynamo or transformers' modeling code import are imported at first use: a start that
# restores a model needs neither.
if TYPE_CHECKING:
    from .capture.graph_cache import GraphCache

COMPILE_MODES = ("graph", "inductor", "eager")


@dataclass(slots=True, eq=False)
class CapturedModel:
    """A model and how to run it. Independent of the number and size of KV blocks.

    Attributes:
        specs: of the attention calls, after the passes.
        graph: the graph module after all passes, None for "eager".
        sources: the source of each argument of the graph, see :meth:`.Traced.arguments`.
        num_captures: how often Dynamo traced the model: 1, or 0 for "eager" and for a graph from
            the cache.
        num_compiled: distinct regions that Inductor compiled. compile_s: seconds of compilation.
        rewrites: number of rewrites per pass.
        weight_formats, float32_matrices: see :class:`.passes.context.PassContext`.
        library_matmuls: in a transparent model on a GPU, the matmuls with weights that use the
            library instead of the project's kernels, by operation. Their order of summation is the
            library's.
        communicator: executes the collectives of a sharded model.
        head: maps hidden states ``[R, H]``, R at least ``MIN_SIZE``, to this rank's logits, with
            the same calls as a step; None if the graph could not be cut there.
        fields: fields of the steps that it takes.
        weights: the places of the checkpoint's tensors.
    """

    loaded: LoadedModel
    specs: tuple[AttentionSpec, ...]
    compile: str
    attention: AttentionBackend | None
    graph: GraphModule | None = None
    sources: Sequence[Source] = ()
    num_captures: int = 0
    num_compiled: int = 0
    compile_s: float = 0.0
    rewrites: dict[str, int] = field(default_factory=dict)
    weight_formats: dict[str, int] = field(default_factory=dict)
    float32_matrices: list[str] = field(default_factory=list)
    library_matmuls: dict[str, int] = field(default_factory=dict)
    communicator: Communicator = field(default_factory=lambda: LoneRank(0, 1))
    head: Callable[[Tensor], Tensor] | None = None
    fields: Sequence[Field] = FIELDS
    weights: WeightMap = field(init=False)
    _long: list[Callable[..., Any] | None] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.weights = _weight_map(self.loaded, WeightRecord())

    def bind(
        self, kv_caches: KVCaches, states: RecurrentStates
    ) -> Callable[[StepInputs], StepOutputs]:
        """A function from a step's inputs to its results, bound to these caches and states."""
        if self.graph is None:
            return lambda inputs: self._run_eagerly(inputs, kv_caches, states)
        has_aux = bool(self.loaded.aux_layers)
        return BoundGraph(self.graph.forward, self.sources, kv_caches, states, has_aux=has_aux)

    def bind_without_head(
        self, kv_caches: KVCaches, states: RecurrentStates
    ) -> Callable[[StepInputs], object]:
        """Like :meth:`bind`, for steps of which only KV and states are wanted: no logits are
        computed, if the graph could be cut. The result is not defined."""
        if self.graph is None or self.head is None:
            return self.bind(kv_caches, states)
        function, has_aux = without_head(self.graph), bool(self.loaded.aux_layers)
        return BoundGraph(function, self.sources, kv_caches, states, has_aux=has_aux)

    def bind_long(
        self, kv_caches: KVCaches, states: RecurrentStates
    ) -> Callable[[StepInputs], StepOutputs] | None:
        """Like :meth:`bind`, with the same bits, without hidden states: the last layer computes
        only the tokens in ``logits_to_keep``, which ascend. None without
        :meth:`long_function`."""
        function, has_aux = self.long_function(), bool(self.loaded.aux_layers)
        if function is None:
            return None
        return BoundGraph(function, self.sources, kv_caches, states, has_aux=has_aux)

    def long_function(self) -> Callable[..., Any] | None:
        """The form of the graph for long steps, made once
        (:func:`.passes.hoist_keep_rows.hoist_keep_rows`); None if there is none."""
        if not self._long:
            found = None
            if self.graph is not None and self.head is not None:
                found = hoist_keep_rows(self.graph, self.sources, self.attention)
            self._long.append(found)
        return self._long[0]

    def _run_eagerly(
        self, inputs: StepInputs, kv_caches: KVCaches, states: RecurrentStates
    ) -> StepOutputs:
        from .capture.dynamo import forward
        from .model.attention import attention_implementation
        from .model.aux_states import aux_states_recorded
        from .model.current_step import ModelStep
        from .model.forward import EagerHead, PackedForward

        module, head = self.loaded.module, self.head
        with (
            attention_implementation(module),
            aux_states_recorded(self.loaded),
            communicator_scope(self.communicator),
            head.recorded() if isinstance(head, EagerHead) else nullcontext(),
        ):
            step = ModelStep(inputs, kv_caches, states, self.specs, {})
            logits, *aux = forward(PackedForward(module), step, self.loaded.aux_layers)
        hidden = head.hidden[0] if isinstance(head, EagerHead) else None
        return StepOutputs(logits[0], hidden, aux[0][0] if aux else None)

    @property
    def vocab_shard(self) -> VocabShard | None:
        """The tokens whose logits this rank's head computes; None for all."""
        sizes = self.loaded.vocab_sizes
        return None if sizes is None else VocabShard(tuple(sizes), self.communicator)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits ``[S, V]`` from the result of this rank's head."""
        sizes = self.loaded.vocab_sizes
        return logits if sizes is None else self.communicator.all_gather(logits, sizes)


def _weight_map(loaded: LoadedModel, record: WeightRecord) -> WeightMap:
    names = loaded.names or partial(ModuleNames, loaded.module)
    return WeightMap(loaded.module, record, loaded.cuts, names)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How a graph is captured.

    Attributes:
        compile: "graph" runs the captured graph after the passes. "inductor" also compiles the
            regions between its matmuls and kernels (:mod:`.inductor.regions`). "eager" runs the
            module itself with the project's attention.
        transparent: whether a row's bits are independent of the rest of the batch.
        attention: the implementation to call; None keeps the ops.
        packing_bytes: memory for copies of weights in a layout with which a matmul of few rows
            takes half the time. Later changes of the weights do not reach the copies.
        matmul_plan_dir: folder for the results of matmul sweeps on a GPU, and of trials on a CPU;
            None keeps none.
        threads: see :class:`.passes.PassContext`. The number in use does not change a row's bits.
        is_native: whether a quantised model may call :mod:`..kernels.native`, which reads float32
            caches and rounds rows to 8 bits.
        mla_latent_cache: whether to cache latent vectors instead of keys and values, if the graph
            has multi-head latent attention (:mod:`.passes.cache_latents`).
        fields: fields of a step. The graph is traced with those that are inputs, and passes can
            read them.
    """

    compile: str = "graph"
    transparent: bool = True
    attention: AttentionBackend | None = None
    packing_bytes: int = 0
    matmul_plan_dir: Path | None = None
    threads: tuple[int, ...] = ()
    is_native: bool = False
    mla_latent_cache: bool = True
    fields: Sequence[Field] = FIELDS


def capture_model(
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    options: CaptureOptions = CaptureOptions(),
    *,
    graph_cache: GraphCache | None = None,
    traced: Traced | None = None,
    communicator: Communicator | None = None,
) -> CapturedModel:
    """Capture a probed model.

    Args:
        specs: from :func:`.probe.probe_model` for this model.
        graph_cache: folder of traced graphs; None traces again. Not for a module that other code
            uses, which may have been changed in ways that no key covers.
        traced: the graph, for a restored model.
        communicator: of this rank, for a sharded model.

    Raises:
        InvalidInputError: unknown mode, or "inductor" without a C++ compiler on a CPU.
        UnsupportedModelError: ``forward`` does not trace into one graph.
    """
    compile, attention, fields = options.compile, options.attention, options.fields
    is_on_cpu = loaded.device.type == "cpu"
    if compile not in COMPILE_MODES:
        raise InvalidInputError("compile", compile, f"must be one of {COMPILE_MODES}")
    if (
        compile == "inductor"
        and is_on_cpu
        and not any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    ):
        raise InvalidInputError("compile", compile, "needs a C++ compiler (g++ or clang++)")
    if compile == "eager" and loaded.quantization is not None:
        limit = f"needs float weights; the model's are {loaded.quantization}"
        raise InvalidInputError("compile", compile, limit)
    captured = CapturedModel(loaded, tuple(specs), compile, attention, fields=fields)
    captured.communicator = communicator or captured.communicator
    if compile == "eager":
        from .model.forward import EagerHead

        if loaded.module.base_model is not loaded.module:
            captured.head = EagerHead(loaded.module)
        return captured
    is_new = False
    if traced is None and graph_cache is not None:
        traced, is_new = graph_cache.get(loaded, specs, fields)
    elif traced is None:
        from .capture.dynamo import trace

        traced, is_new = trace(loaded, specs, fields), True
    captured.num_captures = int(is_new)
    captured.graph = gm = traced.gm
    context = PassContext(
        loaded.module,
        traced.constants,
        options.transparent,
        attention,
        communicator,
        options.packing_bytes,
        options.matmul_plan_dir,
        options.threads,
        loaded.quantized_by_id(),
        is_native=options.is_native and bool(loaded.quantized) and library() is not None,
        specs=list(specs),
        calls={name: s[1] for name, s in traced.sources.items() if s[::2] == ("cache", 0)},
        # Attention over latent vectors: on a GPU, only Triton supports it.
        caches_latents=options.mla_latent_cache
        and (is_on_cpu or (attention is not None and attention.name == "triton")),
        sources=traced.sources,
        fields=fields,
    )
    loaded.quantized.clear()  # the passes release what they have packed
    with torch.inference_mode():
        device_passes = cpu_passes(context.is_native) if is_on_cpu else gpu_passes()
        captured.rewrites = run_passes(gm, context, COMMON_PASSES | device_passes)
        if options.transparent and not is_on_cpu:
            captured.library_matmuls = library_matmuls(gm.graph, traced.constants)
        has_head = expose_hidden(gm, traced.sources)
        if compile == "inductor":
            logger.info("compiling it ...")
            begin = time.perf_counter()
            captured.rewrites["regions"], captured.num_compiled = compile_regions(gm)
            captured.compile_s = time.perf_counter() - begin
    captured.weights = _weight_map(loaded, context.weights)
    captured.specs = tuple(context.specs)
    captured.weight_formats = context.weight_formats
    captured.float32_matrices = context.float32_matrices
    captured.sources = traced.arguments()
    if has_head:
        captured.head = extract_head(gm, captured.sources)
    return captured
