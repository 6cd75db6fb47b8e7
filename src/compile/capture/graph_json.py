"""``Traced``, the result of a trace, and its JSON form, without Dynamo and without pickle.

The JSON has the nodes, Dynamo's record of each result (shape, strides, dtype, device, which results
share memory), the symbols of the sizes, and the source of each input. The model's parameters and
buffers are stored by name. Anything else raises :class:`NotSerializable`: modules and constants
inside the graph, sizes that depend on data, values of unknown types.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...kernels import ops  # noqa: F401 - graphs call them by name
from ...kernels.recurrent import ops as recurrent_ops  # noqa: F401 - as these
from ..fx.nodes import PLAIN, example
from .results import NotSerializable, ResultReader

Source = tuple[Any, ...]


@dataclass(slots=True)
class Traced:
    """A graph as Dynamo returned it.

    Attributes:
        gm: ``meta["example_value"]`` of its nodes are fake tensors of one mode, or sizes.
        constants: placeholder name to the model's parameter or buffer.
        sources: name of every other placeholder to where each step finds its value: ``("input",
            field)``, ``("cache", call, which)``, ``("state", call)``, ``("size", field, dim)`` or
            ``("interval",)``.
    """

    gm: GraphModule
    constants: dict[str, Tensor]
    sources: dict[str, Source]

    def arguments(self) -> list[Source]:
        """The source of the value of each placeholder, in order, or ``("constant", tensor)``."""
        names = [node.name for node in self.gm.graph.nodes if node.op == "placeholder"]
        return [
            ("constant", self.constants[name]) if name in self.constants else self.sources[name]
            for name in names
        ]


# Modules whose functions a graph may call by name.
_ROOTS = frozenset({"_operator", "math", "operator", "torch", "transformers"})
# Modules that register operations outside torch. The import loads much, but less than the model.
_REGISTERED_BY = {"transformers": "transformers.integrations.moe"}


def encode(traced: Traced, constants: dict[str, Tensor]) -> dict[str, Any]:
    """JSON data of ``traced``, before any pass, with the model's parameters and buffers by name.

    Raises:
        NotSerializable: something in the graph has no JSON form.
    """
    from .meta_json import ResultEncoder

    # Of the names of a tied tensor, the first.
    names = {id(tensor): name for name, tensor in reversed(constants.items())}
    results = ResultEncoder()
    numbers: dict[Node, int] = {}

    def of_node(value: Any) -> Any:
        return ["node", numbers[value]] if isinstance(value, Node) else None

    nodes = []
    for number, node in enumerate(traced.gm.graph.nodes):
        numbers[node] = number
        target = _target_name(node.target) if node.op == "call_function" else node.target
        if node.name in traced.constants:
            name = names.get(id(traced.constants[node.name]))
            if name is None:
                raise NotSerializable(f"{node.name} is no parameter or buffer")
            results.constants[id(example(node))] = name
            rest: list[Any] = ["constant", name]
        elif node.op == "placeholder":
            rest = list(traced.sources[node.name])
        elif node.op in ("call_function", "call_method", "output"):
            rest = [_data(part, of_node) for part in (node.args, node.kwargs)]
        else:
            raise NotSerializable(f"{node.op} {node.target}")
        has_value = "example_value" in node.meta
        value = [_data(example(node), results.data)] if has_value else []
        nodes.append([node.op, node.name, target, rest, value])
    return {"symbols": results.symbols(), "nodes": nodes}


def decode(
    data: dict[str, Any], constants: dict[str, Tensor], *, is_symbolic: bool = True
) -> Traced:
    """The inverse, with parameters and buffers given by name.

    Args:
        is_symbolic: whether to record results with torch's symbols for the sizes of a step, which a
            compiler needs; else with integers (:mod:`.results`).

    The graph module has no code yet: the passes run first, and generate it at their end.

    Raises:
        Exception: of any type, if ``data`` is not a result of :func:`encode`.
    """
    reader = ResultReader
    if is_symbolic:
        from .meta_json import ResultDecoder as reader  # type: ignore[assignment]
    nodes: list[Node] = []
    found = Traced(GraphModule({}, Graph()), {}, {})
    graph = found.gm.graph
    # Dynamo records normal tensors even when it traces in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        results = reader(data["symbols"], constants)
        for op, name, target, rest, value in data["nodes"]:
            if op == "placeholder":
                node = graph.create_node(op, target, (), {}, name)
                if rest[0] == "constant":
                    found.constants[node.name] = constants[rest[1]]
                else:
                    found.sources[node.name] = tuple(rest)
            else:
                args, kwargs = (_value(part, lambda _, number: nodes[number]) for part in rest)
                function = _target(target) if op == "call_function" else target
                node = graph.create_node(op, function, args, kwargs, name)
            for part in value:
                node.meta["example_value"] = _value(part, results.value)
            nodes.append(node)
    graph.lint()
    return found


def _data(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """JSON data of a value; ``leaf`` returns that of nodes or of results, else None."""
    found = leaf(value)
    if found is not None:
        return found
    if type(value) in PLAIN:
        return value

    def of(*parts: Any) -> list[Any]:
        return [_data(part, leaf) for part in parts]

    if isinstance(value, (tuple, list)):
        # A graph reads a named tuple (of topk, sort) by index.
        return ["tuple" if isinstance(value, tuple) else "list", *of(*value)]
    if isinstance(value, dict):
        return ["dict", *([key, *of(part)] for key, part in value.items())]
    if isinstance(value, slice):
        return ["slice", *of(value.start, value.stop, value.step)]
    if value is Ellipsis:
        return ["..."]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return ["torch", str(value).removeprefix("torch.")]
    raise NotSerializable(f"value {value!r}")


def _value(data: Any, leaf: Callable[..., Any]) -> Any:
    """The inverse; ``leaf`` decodes other kinds from the kind and its parts."""
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind in ("tuple", "list", "slice"):
        values = [_value(part, leaf) for part in parts]
        return values if kind == "list" else tuple(values) if kind == "tuple" else slice(*values)
    if kind == "dict":
        return {key: _value(part, leaf) for key, part in parts}
    if kind == "...":
        return ...
    if kind == "device":
        return torch.device(parts[0])
    if kind == "torch":
        return getattr(torch, parts[0])
    return leaf(kind, *parts)


def _target_name(target: Any) -> list[str]:
    """The name by which :func:`_target` finds a function again."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = ["op", *target._qualified_op_name.split("::")]
    elif isinstance(target, torch._ops.OpOverload):
        name = ["op", *target._schema.name.split("::"), target._overloadname]
    else:
        try:
            name = ["name", torch.fx.node._get_qualified_name(target)]
        except RuntimeError as error:
            raise NotSerializable(f"call of {target}") from error
    try:
        if _target(name) is target:
            return name
    except (AttributeError, ImportError, KeyError):
        pass
    raise NotSerializable(f"call of {target}")


def _target(name: list[str]) -> Callable[..., Any]:
    kind, *parts = name
    if kind == "op":
        if parts[0] in _REGISTERED_BY and not hasattr(getattr(torch.ops, parts[0]), parts[1]):
            importlib.import_module(_REGISTERED_BY[parts[0]])
        return operator.attrgetter(".".join(parts))(torch.ops)  # type: ignore[no-any-return]
    module, *rest = parts[0].split(".")
    if module not in _ROOTS or not rest:
        raise KeyError(parts[0])
    found: Any = importlib.import_module(module)
    for place, attribute in enumerate(rest):
        if not hasattr(found, attribute) and hasattr(found, "__path__"):
            importlib.import_module(".".join([module, *rest[: place + 1]]))
        found = getattr(found, attribute)
    return found  # type: ignore[no-any-return]
