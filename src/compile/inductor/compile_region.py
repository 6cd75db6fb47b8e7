"""Compiles one region with Inductor; on a CPU without AOTAutograd's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def is_on_cpu(values: Sequence[object]) -> bool:
    """Are all tensors among ``values`` on the CPU?"""
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def inductor(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Compile a region with Inductor, sizes symbolic where the examples' are.

    In its deterministic mode: what it would otherwise choose by timing, the order of a reduction
    among it, could differ from one engine to the next.

    On a CPU the result is what Inductor made, without AOTAutograd's wrappers around it wherever
    these would only pass on: at few rows they cost more than a region computes. Its own checks of
    sizes and strides stay. On a GPU a step is replayed without Python, so that it gains nothing.

    The code for a CPU takes torch's number of threads of each call, which may change between steps;
    by default it would keep the number of the compilation.
    """
    from torch._functorch import config as aot_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: list[Any] = []
    num_results = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]

    def keep(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        # Asked for before Inductor's passes make the graph write in place.
        is_plain = _is_plain(graph, len(examples), num_results)
        compiled = compile_fx_inner(graph, inputs, **options)
        if is_plain:
            inner.append(getattr(compiled, "current_callable", None) or compiled)
        return compiled

    if not is_on_cpu(examples):
        with config.patch(deterministic=True):
            wrapped: Any = compile_fx(gm, list(examples))
        return wrapped  # type: ignore[no-any-return]
    # What AOTAutograd's cache returns is wrapped already; Inductor's cache has the costly part.
    settings = {"deterministic": True, "cpp.dynamic_threads": True}
    with config.patch(settings), aot_config.patch(enable_autograd_cache=False):
        wrapped = compile_fx(gm, list(examples), inner_compile=keep)
    if len(inner) != 1:
        return wrapped  # type: ignore[no-any-return]
    (function,) = inner
    return lambda *inputs: function(list(inputs))  # it empties the list


def _is_plain(gm: GraphModule, num_inputs: int, num_results: int) -> bool:
    """May the compiled form of ``gm``, AOTAutograd's graph of a region, stand for the region?

    If it takes and returns what the region does, writes nothing that it was given, and returns
    memory of its own in each result: all else (copying back, making views anew, dropping results
    that it added) the wrappers do.
    """
    inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    returned = gm.graph.output_node().args[0]
    values = [n.meta.get("val") for n in returned if isinstance(n, Node)]  # type: ignore[union-attr]
    results = [value for value in values if isinstance(value, Tensor)]
    if len(inputs) != num_inputs or len(returned) != len(results) or len(results) != num_results:  # type: ignore[arg-type]
        return False
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return False
    taken = {value.untyped_storage()._cdata for value in inputs if isinstance(value, Tensor)}
    made = {result.untyped_storage()._cdata for result in results}
    return len(made) == num_results and not made & taken
