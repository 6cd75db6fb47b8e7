"""Captures a Hugging Face module into one graph and runs that graph without guards.

Dynamo traces the untouched ``forward`` once, with every per-step size dynamic. Our backend gets
the graph, runs the passes and keeps it. From then on it is called with one flat list of
arguments: parameters bound once, per-step tensors filled in by name, sizes read off the tensors.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from transformers import PreTrainedModel

from pagespec.compile.attention import (
    ATTENTION_NAME,
    AttentionSpec,
    allocate_kv_caches,
    attention_implementation,
)
from pagespec.compile.load import LoadedModel
from pagespec.compile.passes import (
    COMMON_PASSES,
    CPU_GRAPH_PASSES,
    PassContext,
    gpu_passes,
    run_passes,
)
from pagespec.compile.passes.context import example
from pagespec.compile.regions import compile_regions
from pagespec.compile.step_inputs import (
    EXAMPLE_SIZES,
    INPUT_NAMES,
    BoundGraph,
    KVCaches,
    StepInputs,
    example_inputs,
)
from pagespec.errors import InvalidInputError, UnsupportedModelError
from pagespec.kernels.choice import Choice

CompileMode = Literal["graph", "inductor", "eager"]
COMPILE_MODES = ("graph", "inductor", "eager")


class _Captured(Exception):
    """Ends the capturing call once the backend has what it wants, before anything is computed."""


class CapturedModel:
    """A model and how to run it; independent of the number and size of KV blocks.

    Attributes:
        num_captures: how often a graph was captured: 1, or 0 for "eager".
        num_compiled: distinct regions Inductor compiled. compile_s: seconds it took.
        rewrites: how many rewrites each pass made.
        graph: the graph module after all passes, None for "eager".
    """

    def __init__(
        self,
        loaded: LoadedModel,
        specs: Sequence[AttentionSpec],
        compile: CompileMode,
        transparent: bool = True,
        attention: Choice | None = None,
        packing_bytes: int = 0,
        plan_folder: Path | None = None,
    ) -> None:
        self.loaded = loaded
        self.transparent = transparent
        self.attention = attention
        self._packing_bytes, self._plan_folder = packing_bytes, plan_folder
        self.specs = tuple(specs)
        self.compile = compile
        self.num_captures = 0
        self.num_compiled = 0
        self.compile_s = 0.0
        self.rewrites: dict[str, int] = {}
        self.graph: GraphModule | None = None
        self._function: Callable[..., Any] | None = None
        self._sources: list[tuple[Any, ...]] = []
        if compile != "eager":
            self._capture()

    def bind(self, kv_caches: KVCaches) -> Callable[[StepInputs], Tensor]:
        """A function from a step's inputs to its logits ``[S, V]``, over these caches."""
        if self._function is None:
            return lambda inputs: self._run_eagerly(inputs, kv_caches)
        arguments: list[Any] = []
        input_slots: list[tuple[int, str]] = []
        size_slots: list[tuple[int, str, int]] = []
        for slot, (kind, *where) in enumerate(self._sources):
            arguments.append(None)
            if kind == "constant":
                arguments[slot] = where[0]
            elif kind == "cache":
                arguments[slot] = kv_caches[where[0]][where[1]]
            elif kind == "input":
                input_slots.append((slot, where[0]))
            elif kind == "cache size":
                arguments[slot] = kv_caches[where[0]][where[1]].shape[where[2]]
            else:
                size_slots.append((slot, where[0], where[1]))
        return BoundGraph(self._function, arguments, input_slots, size_slots)

    def _run_eagerly(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        module = self.loaded.module
        with attention_implementation(module, ATTENTION_NAME):
            return _forward(module, self.specs, inputs, kv_caches)[0]

    def _capture(self) -> None:
        module, device = self.loaded.module, self.loaded.device
        sizes = EXAMPLE_SIZES
        kv_caches = allocate_kv_caches(
            self.specs, sizes["num_blocks"], sizes["block_size"], self.loaded.dtype, device
        )
        inputs = example_inputs(device)
        for name in INPUT_NAMES:
            tensor = getattr(inputs, name)
            dims = {"input_ids": (1,), "position_ids": (1,), "block_tables": (0, 1)}
            for dim in dims.get(name, (0,)):
                torch._dynamo.mark_dynamic(tensor, dim)
        for cache in [cache for pair in kv_caches for cache in pair]:
            torch._dynamo.mark_dynamic(cache, 0)
            torch._dynamo.mark_dynamic(cache, 1)
        specs = self.specs

        def step(inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
            return _forward(module, specs, inputs, kv_caches)

        def backend(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
            self.num_captures += 1
            # Dynamo still reads its graph after this returns, so the passes work on a copy.
            copied = GraphModule(gm, copy.deepcopy(gm.graph))
            self._take(copied, examples, inputs, kv_caches)

            def stop(*_: Any) -> None:
                raise _Captured

            return stop

        # Dynamo keeps its cache on the code object, which all captures would share; a copy of it
        # starts empty and goes away with this call.
        fresh = FunctionType(
            step.__code__.replace(), step.__globals__, "step", None, step.__closure__
        )
        try:
            with (
                torch.inference_mode(),
                attention_implementation(module, ATTENTION_NAME),
                # Numbers of the model (epsilon, scale, window) are constants of the graph, whatever
                # Dynamo saw at the same line for another model.
                torch._dynamo.config.patch(
                    specialize_int=True, specialize_float=True, automatic_dynamic_shapes=False
                ),
            ):
                torch.compile(fresh, fullgraph=True, backend=backend)(inputs, kv_caches)
        except _Captured:
            return
        except UnsupportedModelError:
            raise
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch.fx")):
                raise
            reason = str(error).strip().split("\n")[0]
            raise UnsupportedModelError(
                f"{self.loaded.architecture}: its forward pass is not one graph "
                f"({type(error).__name__}: {reason})"
            ) from error
        raise UnsupportedModelError(f"{self.loaded.architecture}: no graph was captured")

    def _take(
        self, gm: GraphModule, examples: list[Any], inputs: StepInputs, kv_caches: KVCaches
    ) -> None:
        """Bind every placeholder, run the passes, keep the graph."""
        module = self.loaded.module
        places: dict[int, tuple[Any, ...]] = {}
        for name in INPUT_NAMES:
            places[id(getattr(inputs, name))] = ("input", name)
        for call, pair in enumerate(kv_caches):
            for which, cache in enumerate(pair):
                places[id(cache)] = ("cache", call, which)
        owned = {id(t) for t in [*module.parameters(), *module.buffers()]}
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        sources: dict[str, tuple[Any, ...]] = {}
        symbols: dict[str, tuple[Any, ...]] = {}
        constants: dict[str, Tensor] = {}
        for node, value in zip(placeholders, examples, strict=True):
            if not isinstance(value, Tensor):
                continue
            if id(value) in places:
                source = places[id(value)]
                kind = "cache size" if source[0] == "cache" else "size"
                for dim, size in enumerate(example(node).shape):  # type: ignore[attr-defined]
                    if isinstance(size, torch.SymInt):
                        symbols.setdefault(str(size), (kind, *source[1:], dim))
                sources[node.name] = source
            elif id(value) in owned:
                constants[node.name] = value
        for node in placeholders:
            if node.name not in sources and node.name not in constants:
                sources[node.name] = self._size_source(node, symbols)

        context = PassContext(
            module,
            constants,
            self.transparent,
            self.attention,
            self._packing_bytes,
            self._plan_folder,
        )
        self.rewrites = run_passes(gm, context, COMMON_PASSES)
        is_cpu = self.loaded.device.type == "cpu"
        device_passes = CPU_GRAPH_PASSES if is_cpu else gpu_passes()
        self.rewrites |= run_passes(gm, context, device_passes)
        if self.compile == "inductor":
            begin = time.perf_counter()
            num_regions, self.num_compiled = compile_regions(gm)
            self.rewrites["regions"] = num_regions
            self.compile_s = time.perf_counter() - begin
        self.graph = gm
        final = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._sources = [
            ("constant", context.constants[node.name])
            if node.name in context.constants
            else sources[node.name]
            for node in final
        ]
        self._function = gm.forward

    def _size_source(self, node: Node, symbols: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
        """Where the value of a SymInt placeholder is read at each step."""
        source = symbols.get(str(example(node)))
        if source is None:
            raise UnsupportedModelError(
                f"{self.loaded.architecture}: the graph has an input of unknown origin, {node.name}"
            )
        return source


def _forward(
    module: PreTrainedModel,
    specs: Sequence[AttentionSpec],
    inputs: StepInputs,
    kv_caches: KVCaches,
) -> Tensor:
    logits: Tensor = module(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        logits_to_keep=inputs.logits_to_keep,
        use_cache=False,
        slot_mapping=inputs.slot_mapping,
        query_starts=inputs.query_starts,
        context_lens=inputs.context_lens,
        block_tables=inputs.block_tables,
        kv_caches=kv_caches,
        attention_specs=specs,
    ).logits
    return logits


def capture_model(
    loaded: LoadedModel,
    specs: Sequence[AttentionSpec],
    *,
    compile: str = "graph",
    transparent: bool = True,
    attention: Choice | None = None,
    packing_bytes: int = 0,
    plan_folder: Path | None = None,
) -> CapturedModel:
    """Capture a probed model.

    Args:
        specs: what :func:`pagespec.compile.probe.probe_model` returned for it.
        compile: "graph" runs the captured graph after our passes; "inductor" compiles what lies
            between its products and kernels (:mod:`pagespec.compile.regions`); "eager" runs the
            module itself with our attention.
        transparent: make a row's bits independent of the rest of the batch.
        attention: the implementation to call; None leaves it to the ops.
        packing_bytes: memory that copies of weights may take, in a layout that few rows are
            multiplied with at half the cost. Later changes of the weights do not reach them.
        plan_folder: where sweeps of products on a GPU are kept; None keeps none.

    Raises:
        InvalidInputError: unknown mode, or "inductor" without a C++ compiler on a CPU.
        UnsupportedModelError: ``forward`` does not trace into one graph.
    """
    if compile not in COMPILE_MODES:
        raise InvalidInputError("compile", compile, f"must be one of {COMPILE_MODES}")
    if (
        compile == "inductor"
        and loaded.device.type == "cpu"
        and not any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    ):
        raise InvalidInputError("compile", compile, "needs a C++ compiler (g++ or clang++)")
    return CapturedModel(
        loaded,
        specs,
        compile,  # type: ignore[arg-type]
        transparent,
        attention,
        packing_bytes,
        plan_folder,
    )
