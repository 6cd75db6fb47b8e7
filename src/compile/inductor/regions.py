"""Compile a graph with Inductor region by region, each distinct region once.

Matmuls, attention and pagespec's kernels are opaque calls for Inductor, and Inductor generates no
code for complex numbers. The nodes between two such calls (norms, activations, residual sums,
rotary embedding) form a *region*. The layers of a model are equal, so their regions are, too, up to
the weights that they read. Those are inputs, and a 28-layer model needs about as many compilations
as a 2-layer one. The graph around the regions runs unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..fx.fake_tensors import memory_of
from ..fx.nodes import calls, example, is_in_place, is_ours, only_user, written_nodes
from .compile_region import Compiler, inductor, is_on_cpu

_MATMULS = frozenset(
    {
        torch.nn.functional.linear,
        torch._C._nn.linear,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        operator.matmul,
        "matmul",
        "mm",
        "bmm",
    }
)
_MATMUL_NAMES = ("grouped_mm", "scaled_mm", "_grouped_linear")
# These create no new tensor, and do not justify a compiled region.
_VIEWS = frozenset(
    {
        "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "split", "chunk",
        "expand", "t", "size", "flatten", "unflatten", "unbind", "contiguous",
    }
)  # fmt: skip
_MAYBE_COPIES = ("reshape", "flatten", "contiguous")
# These move elements: one kernel each, compiled or not.
COPIES = frozenset({torch.nn.functional.embedding, operator.getitem, *_MAYBE_COPIES})


@dataclass(slots=True)
class Region:
    """Consecutive nodes to be compiled together, in order.

    Attributes:
        after: views of their results that only nodes outside read.
    """

    nodes: list[Node]
    behind: list[Node] = field(default_factory=list)

    # Determined after the preceding regions are replaced, which changes what this one reads.
    @property
    def inputs(self) -> list[Node]:
        """Nodes outside whose results they read, and the sizes that those do not show."""
        inside = set(self.nodes)
        read = dict.fromkeys(
            n for node in self.nodes for n in node.all_input_nodes if n not in inside
        )
        shown: set[str] = set()
        hidden: set[str] = set()
        for value in map(example, read):
            if isinstance(value, torch.SymInt):
                shown.add(str(value))
            elif isinstance(value, Tensor):
                shown.update(str(size) for size in value.shape)
                for size in (*value.shape, *value.stride()):
                    if isinstance(size, torch.SymInt):
                        hidden.update(str(symbol) for symbol in size.node.expr.free_symbols)
        # Inductor finds s in a size s, but not in 2 * s.
        for node in self.nodes[0].graph.nodes:
            if not hidden - shown or node.op != "placeholder":
                break
            if str(example(node)) in hidden - shown:
                read[node] = None
                shown.add(str(example(node)))
        return list(read)

    @property
    def outputs(self) -> list[Node]:
        """Nodes of the region whose results are read outside."""
        inside = set(self.nodes)
        return [n for n in self.nodes if any(user not in inside for user in n.users)]


def find_regions(graph: Graph) -> list[Region]:
    """The regions of a graph: maximal runs of nodes between opaque ones, without the views at their
    ends. Only regions with enough work count: on a CPU more than one operation, and anywhere more
    than one copy."""
    regions: list[Region] = []
    run: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or is_opaque(node) or _writes_outside(node, run):
            regions.append(Region(run))
            run = []
        else:
            run.append(node)
    regions.append(Region(run))
    found = []
    for region in regions:
        _drop_views_at_ends(region)
        if _is_worth_it(region) and all(is_tensor(node) for node in region.outputs):
            found.append(region)
    return found


def _writes_outside(node: Node, run: list[Node]) -> bool:
    """Whether ``node`` may change a tensor that ``run`` has not created. A view of that tensor
    could be another input of the region, and Inductor assumes that inputs do not share memory."""
    if node.op not in ("call_method", "call_function") or not is_in_place(node):
        return False
    written: Any = node.args[0] if node.args and "out" not in node.kwargs else None
    while written in run and is_view(written):
        written = written.args[0]
    return written not in run


def _is_worth_it(region: Region) -> bool:
    operations = [node for node in region.nodes if not is_view(node)]
    if len(operations) != 1:
        return bool(operations)
    # On a CPU a region's call costs about as much as one small operation.
    return not is_on_cpu([example(n) for n in region.nodes]) and operations[0].target not in COPIES


def _drop_views_at_ends(region: Region) -> None:
    """Exclude views whose results are only read outside, or that only read from outside."""
    inside = set(region.nodes)
    for node in reversed(region.nodes):
        if is_view(node) and not any(user in inside for user in node.users):
            inside.discard(node)
            region.behind.insert(0, node)
    for node in region.nodes:
        # A size, or a part of a split: nodes of the region that read it take it as an input.
        if node in inside and is_view(node) and not any(n in inside for n in node.all_input_nodes):
            inside.discard(node)
    region.nodes = [node for node in region.nodes if node in inside]


def _signature(region: Region) -> tuple[object, ...]:
    """Equal for regions that compute the same function of their inputs."""
    numbers = {node: i for i, node in enumerate([*region.inputs, *region.nodes])}
    outputs = region.outputs
    symbols: dict[str, int] = {}

    def of_size(size: object) -> object:
        if isinstance(size, int):
            return size
        return ("s", symbols.setdefault(str(size), len(symbols)))

    def of_value(value: object) -> object:
        if isinstance(value, Tensor):
            shape = tuple(of_size(s) for s in value.shape)
            stride = tuple(of_size(s) for s in value.stride())
            return (shape, stride, value.dtype, value.device)
        if isinstance(value, (torch.SymInt, int)):
            return of_size(value)
        return repr(value)

    def of_node(node: Node) -> str:
        return f"%{numbers[node]}"

    inputs = tuple(of_value(example(node)) for node in region.inputs)
    body = tuple(
        (node.op, str(node.target), repr(map_arg((node.args, node.kwargs), of_node)))
        for node in region.nodes
    )
    return inputs, body, tuple(numbers[node] for node in outputs)


def _extract(region: Region) -> Graph:
    """The region as a function of its inputs that returns a tuple of its outputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for i, node in enumerate(region.inputs):
        copy = graph.placeholder(f"input_{i}")
        copy.meta = dict(node.meta)
        copies[node] = copy
    for node in region.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in region.outputs))
    return graph


def _under_its_name(value: object) -> object:
    """A size that was found equal to another one, as the symbol that stands for both.

    Sizes of tensors are written with that symbol; Inductor would define only the other one.
    """
    if not isinstance(value, torch.SymInt):
        return value
    node = value.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)


def compile_regions(gm: GraphModule, compiler: Compiler = inductor) -> tuple[int, int]:
    """Replace each region of ``gm`` by one call of its compiled form.

    Returns:
        (number of regions replaced, number of distinct regions compiled).
    """
    compiled: dict[tuple[object, ...], Callable[..., Any]] = {}
    _move_copies_to_their_readers(gm.graph)
    regions = find_regions(gm.graph)
    for region in regions:
        signature = _signature(region)
        function = compiled.get(signature)
        if function is None:
            fakes = [_under_its_name(example(node)) for node in region.inputs]
            function = compiled[signature] = compiler(GraphModule({}, _extract(region)), fakes)
        _replace(gm.graph, region, function, list(compiled).index(signature))
    gm.graph.lint()
    gm.recompile()
    return len(regions), len(compiled)


def _move_copies_to_their_readers(graph: Graph) -> None:
    """Then a region makes the copy while it reads it, if matmuls or kernels were in between. An
    example is the gate of an attention's result."""
    written = written_nodes(graph)
    for node in reversed(list(graph.nodes)):
        reader = only_user(node)
        if reader is None or reader.op == "output" or not is_copy(node) or is_opaque(reader):
            continue
        if written.isdisjoint({node, *node.all_input_nodes}):
            reader.prepend(node)


def _replace(graph: Graph, region: Region, function: Callable[..., Any], number: int) -> None:
    def call(*inputs: Any) -> Any:
        return function(*inputs)

    call.__name__ = call.__qualname__ = f"region_{number}"
    call.region = _extract(region)  # type: ignore[attr-defined]
    inputs, outputs = region.inputs, region.outputs
    last = region.nodes[-1]
    with graph.inserting_after(last):
        result = graph.call_function(call, tuple(inputs))
    after = result
    for place, node in enumerate(outputs):
        with graph.inserting_after(after):
            part = graph.call_function(operator.getitem, (result, place))
        part.meta["example_value"] = example(node)
        after = part
        node.replace_all_uses_with(part)
    for node in region.behind:
        after.append(node)
        after = node
    for node in reversed(region.nodes):
        graph.erase_node(node)


def is_opaque(node: Node) -> bool:
    """Whether ``node`` is a call that Inductor would only pass on: a matmul, a kernel of pagespec,
    or a call that reads or creates complex numbers, for which torch's own kernels run in any
    case."""
    values = map(example, (node, *node.all_input_nodes))
    if any(isinstance(value, Tensor) and value.is_complex() for value in values):
        return True
    if node.op == "call_method":
        return node.target in _MATMULS
    if node.op != "call_function":
        return node.op in ("call_module", "get_attr")
    if node.target in _MATMULS:
        return True
    name = getattr(node.target, "__name__", "")
    if any(part in name for part in _MATMUL_NAMES):
        return True
    return is_ours(node)


def is_view(node: Node) -> bool:
    """Whether ``node`` computes nothing: a view of its argument, a part of it, or a size."""
    if calls(node, *_VIEWS):
        return not is_copy(node)
    if node.target is operator.getitem:
        # Indexing by a tensor creates a new tensor.
        indices: list[Node] = []
        map_arg(node.args[1], indices.append)  # type: ignore[arg-type]
        return not any(map(is_tensor, indices))
    # Arithmetic on sizes.
    return not is_tensor(node) and isinstance(example(node), (int, torch.SymInt))


def is_copy(node: Node) -> bool:
    """Whether ``node``, by name a view, is a copy, because no strides over its argument give its
    result."""
    if not calls(node, *_MAYBE_COPIES):
        return False
    source, result = example(node.args[0]), example(node)  # type: ignore[arg-type]
    if not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return False
    return memory_of(source) != memory_of(result)


def is_tensor(node: Node) -> bool:
    """Whether the result of ``node`` is one tensor."""
    return isinstance(example(node), Tensor)
