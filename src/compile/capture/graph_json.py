"""Serialises a traced graph as JSON and reads it back, without Dynamo and without pickle.

Kept are the nodes, what Dynamo recorded about each result (shape, strides, dtype, device, which
results share memory), the symbols of the sizes, and where each input comes from. The names of the
model's parameters and buffers stand for them. What does not fit raises :class:`NotSerializable`:
modules and constants inside the graph, sizes that depend on data, values of unknown types.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...kernels import ops  # noqa: F401 - graphs call them by name
from ...kernels.recurrent import ops as recurrent_ops  # noqa: F401 - as these
from ..fx.nodes import PLAIN, example
from .results import NotSerializable, ResultReader
from .traced import Traced

# Modules whose functions a graph may call by name.
_ROOTS = frozenset({"_operator", "math", "operator", "torch", "transformers"})
# What registers operations that are not torch's own. It imports much, but less than the model.
_REGISTERED_BY = {"transformers": "transformers.integrations.moe"}


def encode(traced: Traced, names: dict[int, str]) -> dict[str, Any]:
    """JSON data of ``traced``, before any pass; ``names`` are of the constants, by their id.

    Raises:
        NotSerializable: something in the graph has no form in a file.
    """
    from .meta_json import ResultEncoder

    encoder = ResultEncoder()
    numbers: dict[Node, int] = {}
    nodes = []
    for number, node in enumerate(traced.gm.graph.nodes):
        numbers[node] = number
        entry: list[Any] = [node.op, node.name]
        if node.op == "placeholder":
            if node.name in traced.constants:
                name = names.get(id(traced.constants[node.name]))
                entry += [node.target, ["constant", name]]
                if name is None:
                    raise NotSerializable(f"{node.name} is no parameter or buffer")
                encoder.constant(example(node), name)
            else:
                entry += [node.target, list(traced.sources[node.name])]
        elif node.op in ("call_function", "call_method", "output"):
            entry += [
                _target_name(node.target) if node.op == "call_function" else node.target,
                _argument_data(node.args, numbers),
                _argument_data(node.kwargs, numbers),
            ]
        else:
            raise NotSerializable(f"{node.op} {node.target}")
        has_value = "example_value" in node.meta
        nodes.append([*entry, encoder.value(example(node)) if has_value else None])
    return {"symbols": encoder.symbols(), "nodes": nodes}


def decode(
    data: dict[str, Any], constants: dict[str, Tensor], *, is_symbolic: bool = True
) -> Traced:
    """The inverse, over parameters and buffers given by name.

    Args:
        is_symbolic: record results with torch's symbols for the sizes of a step, which a compiler
            needs; else with numbers (:mod:`.results`).

    The graph module has no code yet: the passes, which end with that, come first.

    Raises:
        Exception: of any kind, if ``data`` is not what :func:`encode` returned.
    """
    nodes: list[Node] = []
    found = Traced(GraphModule({}, Graph()), {}, {})
    graph = found.gm.graph
    # What Dynamo records are normal tensors even when it traces in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        reader = _symbolic_reader() if is_symbolic else ResultReader
        results = reader(data["symbols"], constants)
        for op, name, target, *rest, value in data["nodes"]:
            if op == "placeholder":
                node = graph.create_node(op, target, (), {}, name)
                (source,) = rest
                if source[0] == "constant":
                    found.constants[node.name] = constants[source[1]]
                else:
                    found.sources[node.name] = tuple(source)
            else:
                args, kwargs = (_argument(part, nodes) for part in rest)
                function = _target(target) if op == "call_function" else target
                node = graph.create_node(op, function, args, kwargs, name)
            if value is not None:
                node.meta["example_value"] = results.value(value)
            nodes.append(node)
    graph.lint()
    return found


def _symbolic_reader() -> type[ResultReader]:
    from .meta_json import ResultDecoder

    return ResultDecoder


def _argument_data(value: Any, numbers: dict[Node, int]) -> Any:

    def of(part: Any) -> Any:
        return _argument_data(part, numbers)

    if type(value) in PLAIN:
        return value
    if isinstance(value, Node):
        return ["node", numbers[value]]
    if isinstance(value, tuple):
        return ["tuple", *map(of, value)]
    if isinstance(value, list):
        return ["list", *map(of, value)]
    if isinstance(value, dict):
        return ["dict", *([key, of(part)] for key, part in value.items())]
    if isinstance(value, slice):
        return ["slice", *map(of, (value.start, value.stop, value.step))]
    if value is Ellipsis:
        return ["..."]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return ["torch", str(value).removeprefix("torch.")]
    raise NotSerializable(f"argument {value!r}")


def _argument(value: Any, nodes: Sequence[Node]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "node":
        return nodes[parts[0]]
    if kind == "dict":
        return {key: _argument(part, nodes) for key, part in parts}
    if kind == "...":
        return ...
    if kind == "device":
        return torch.device(parts[0])
    if kind == "torch":
        return getattr(torch, parts[0])
    make: Any = {"tuple": tuple, "list": list, "slice": lambda part: slice(*part)}[kind]
    return make([_argument(part, nodes) for part in parts])


def _target_name(target: Any) -> list[str]:
    """How :func:`_target` finds a function again."""
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
        is_found = _target(name) is target
    except (AttributeError, ImportError, KeyError) as error:
        raise NotSerializable(f"call of {target}") from error
    if not is_found:
        raise NotSerializable(f"call of {target}")
    return name


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
