"""Compile one region with Inductor; on a CPU without AOTAutograd's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def is_on_cpu(values: Sequence[object]) -> bool:
    """Whether all tensors among ``values`` are on the CPU."""
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def inductor(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Compile a region with Inductor. Sizes are symbolic where those of the examples are.

    Inductor runs in deterministic mode. Otherwise its choices by timing, such as the order of a
    reduction, could differ between engines.

    On a CPU the result is Inductor's code without AOTAutograd's wrappers, if these only pass
    arguments on: at few rows they cost more than the computation of a region. Inductor's own checks
    of sizes and strides stay. On a GPU a step is replayed without Python, so this would gain
    nothing.

    The CPU code reads torch's number of threads in each call, because it may change between steps.
    By default Inductor would use the number at compilation.
    """
    from torch._functorch import config as aot_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: list[Any] = []
    num_results = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]

    def keep(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        # Determined before Inductor's passes make the graph write in place.
        is_plain = _is_plain(graph, len(examples), num_results)
        compiled = compile_fx_inner(graph, inputs, **options)
        if is_plain:
            inner.append(getattr(compiled, "current_callable", None) or compiled)
        return compiled

    if not is_on_cpu(examples):
        with config.patch(deterministic=True):
            wrapped: Any = compile_fx(gm, list(examples))
        return wrapped  # type: ignore[no-any-return]
    # Results from AOTAutograd's cache are already wrapped; Inductor's cache has the costly part.
    settings = {"deterministic": True, "cpp.dynamic_threads": True}
    with config.patch(settings), aot_config.patch(enable_autograd_cache=False):
        wrapped = compile_fx(gm, list(examples), inner_compile=keep)
    if len(inner) != 1:
        return wrapped  # type: ignore[no-any-return]
    (function,) = inner
    return lambda *inputs: function(list(inputs))  # it empties the list


def _is_plain(gm: GraphModule, num_inputs: int, num_results: int) -> bool:
    """Whether the compiled form of ``gm``, AOTAutograd's graph of a region, can replace the region.

    It can if it takes and returns the same values as the region, writes none of its inputs, and
    returns new memory for each result. Everything else (copying back, creating views again,
    dropping added results) is done by the wrappers.
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
