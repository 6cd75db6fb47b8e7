"""``Traced``: a graph as Dynamo gave it, and where each of its inputs comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

Source = tuple[Any, ...]
# Applied while tracing. Numbers of the model (epsilon, scale, window) are constants of the graph,
# whatever Dynamo saw at the same line for another model.
DYNAMO_SETTINGS = {
    "specialize_int": True,
    "specialize_float": True,
    "automatic_dynamic_shapes": False,
}


@dataclass(slots=True)
class Traced:
    """A graph as Dynamo gave it.

    Attributes:
        gm: its nodes' ``meta["example_value"]`` are fake tensors of one mode, or sizes.
        constants: placeholder name to the parameter or buffer of the model it stands for.
        sources: name of every other placeholder to where its value is found at each step:
            ``("input", field)``, ``("cache", call, which)`` or ``("size", field, dim)``.
    """

    gm: GraphModule
    constants: dict[str, Tensor]
    sources: dict[str, Source]

    def arguments(self) -> list[Source]:
        """Where the value of each placeholder comes from, in order: its source, or ``("constant",
        tensor)``."""
        names = [node.name for node in self.gm.graph.nodes if node.op == "placeholder"]
        return [
            ("constant", self.constants[name]) if name in self.constants else self.sources[name]
            for name in names
        ]
