"""The context of a pass: constants bound to the graph, the attention backend, settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.fx import Node

from ...kernels.attention.backend import AttentionBackend
from ...kernels.collectives.communicator import Communicator


@dataclass(slots=True)
class PassContext:
    """The module a graph was captured from, and the tensors bound to its placeholders.

    Attributes:
        module: the model; the parameters of it may move in storage, never change in value.
        constants: placeholder name to the parameter or buffer bound to it. A pass that adds a
            placeholder for a constant enters it here.
        transparent: whether a row's bits must not depend on the rest of the batch.
        packing_bytes: memory that packed copies of weights may take; 0 if weights may change.
        matmul_plan_dir: where plans of matmuls are kept (:mod:`.plan_cache`).
        attention: the implementation to call in place of the ops; None keeps the ops.
        communicator: the same for collectives.
    """

    module: nn.Module
    constants: dict[str, Tensor]
    transparent: bool = True
    attention: AttentionBackend | None = None
    communicator: Communicator | None = None
    packing_bytes: int = 0
    matmul_plan_dir: Path | None = None

    def constant(self, node: object) -> Tensor | None:
        """The tensor bound to ``node``, if it is a placeholder for a parameter or buffer."""
        if isinstance(node, Node) and node.op == "placeholder":
            return self.constants.get(node.name)
        return None
