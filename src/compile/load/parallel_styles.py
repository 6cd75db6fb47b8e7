"""The styles of transformers' tensor-parallel plans: how parameters are sliced, what forwards do.

A class of a style is put in front of a module's own class: its forward ends in a collective, and
there is no code of any model in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...kernels import ops


@dataclass(frozen=True, slots=True)
class Slices:
    """Where a parameter is cut: along ``dim``, in each of ``num_groups`` equal stretches of it."""

    dim: int
    num_groups: int = 1


Cut = Callable[[str, Tensor], Slices | None]


def _columns(_: str, parameter: Tensor) -> Slices:
    return Slices(max(parameter.dim() - 2, 0))


def _rows(name: str, parameter: Tensor) -> Slices | None:
    # A bias is added once, behind the sum.
    return None if name == "bias" else Slices(parameter.dim() - 1)


def _packed_columns(_: str, parameter: Tensor) -> Slices:
    return Slices(max(parameter.dim() - 2, 0), 2)


def _packed_rows(name: str, parameter: Tensor) -> Slices | None:
    return None if name == "bias" else Slices(parameter.dim() - 1, 2)


def _whole(_: str, __: Tensor) -> None:
    return None


# What a style does to a module's forward, by the class that is put in front of the module's own.


class Reduced:
    """A module whose result is a part of a sum."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return ops.all_reduce(super().forward(*args, **kwargs))  # type: ignore[misc]


class RowParallel:
    """A linear layer over this rank's slice of the inputs."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        total = ops.all_reduce(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class RowParallelSplit(RowParallel):
    """The same, given all inputs."""

    pagespec_begin: int

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.narrow(-1, self.pagespec_begin, self.weight.shape[1]))


class ColumnParallelGathered:
    """A linear layer that computes its slice of the outputs and gives all of them."""

    pagespec_sizes: list[int]

    def forward(self, x: Tensor) -> Tensor:
        return ops.all_gather(super().forward(x), self.pagespec_sizes)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Style:
    cut: Cut = _whole
    forward: type | None = None


GATHERED = Style(_columns, ColumnParallelGathered)
SPLIT = Style(_rows, RowParallelSplit)
REPLICATED = Style()
STYLES = {
    "colwise": Style(_columns),
    "rowwise": Style(_rows, RowParallel),
    "packed_colwise": Style(_packed_columns),
    "packed_rowwise": Style(_packed_rows, RowParallel),
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise_split_input": SPLIT,
    "rowwise_rep": SPLIT,
    "moe_tp_experts": Style(forward=Reduced),
    "all_reduce": Style(forward=Reduced),
    # Whole on every rank. In training these reduce gradients; a lookup is no work worth sharing.
    "replicated_with_grad_allreduce": REPLICATED,
    "mla_kv_a_proj": REPLICATED,
    "embedding_rowwise": REPLICATED,
    "embedding_colwise": REPLICATED,
    "replicate": REPLICATED,
    "local_params": REPLICATED,
}
