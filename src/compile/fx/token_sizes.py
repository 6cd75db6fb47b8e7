"""What a value of a graph has of a step's tokens: the words of :mod:`.row_kinds`, and sizes."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .nodes import example


class Order(enum.Enum):
    """What the rows of a value are, and in which order."""

    ROWS = enum.auto()  # of the tokens, one each, in their order
    FLAT = enum.auto()  # of the tokens, several each, those of a token side by side
    SORTED = enum.auto()  # the same, by expert
    SORT = enum.auto()  # the places in FLAT of what is SORTED
    INVERSE = enum.auto()  # the places in SORTED of what is FLAT
    TOKENS = enum.auto()  # the tokens of what is SORTED
    COUNTS = enum.auto()  # how many rows each expert has
    ENDS = enum.auto()  # where each expert's rows end
    RANGE = enum.auto()  # 0, 1, 2, ... for each of FLAT
    CONSTANT = enum.auto()  # nothing of single tokens


class Kind(NamedTuple):
    """``order`` along ``dim``, with ``per_token`` rows a token."""

    order: Order
    dim: int = 0
    per_token: int = 1


CONSTANT = Kind(Order.CONSTANT)
PER_TOKEN = (Order.ROWS, Order.FLAT, Order.SORTED)
"""Orders of what may be computed row by row."""


class TokenSizes:
    """Which sizes of a graph follow the number of tokens.

    Args:
        num_tokens: size of the tokens' dim, as recorded: a symbol, or a number that no size of the
            model is.
    """

    def __init__(self, num_tokens: object) -> None:
        self._num_tokens = num_tokens
        self._multiple = re.compile(rf"(?:(\d+)\*)?{re.escape(str(num_tokens))}")
        self._mentioned = re.compile(rf"\b{re.escape(str(num_tokens))}\b")

    def multiple(self, size: object) -> int | None:
        """How many times the number of tokens a size is: 0 of those without it, None if that is
        no number."""
        if isinstance(size, int) and isinstance(self._num_tokens, int):
            times, rest = divmod(max(size, 0), self._num_tokens)  # -1 is what is left of a view
            return None if times and rest else times
        text = str(size)
        found = self._multiple.fullmatch(text)
        if found is not None:
            return int(found[1] or 1)
        return None if self._mentioned.search(text) else 0

    @staticmethod
    def is_size(node: Node) -> bool:
        """Is its value a number of the step, the number of tokens say, or a shape?"""
        return isinstance(example(node), (int, torch.SymInt, torch.Size))

    def is_known_size(self, node: Node) -> bool:
        """Is each number of a size a multiple of that of the tokens, or the model's own?"""
        value = example(node)
        sizes = value if isinstance(value, torch.Size) else [value]
        found = [self.multiple(size) for size in sizes]
        return all(
            times or (times == 0 and isinstance(size, int))
            for times, size in zip(found, sizes, strict=True)
        )

    def multiples(self, tensor: Tensor) -> list[int] | None:
        found = [self.multiple(size) for size in tensor.shape]
        return None if None in found else [times for times in found if times is not None]

    def like(self, node: Node, kind: Kind) -> Kind | None:
        """The kind of a result that has the rows of ``kind`` in their order."""
        value = example(node)
        if not isinstance(value, Tensor):  # several, each of which is on record
            return kind
        times = self.multiples(value)
        if times is None or sorted(times)[:-1] != [0] * (len(times) - 1) or not times:
            return None
        dim = times.index(max(times))
        if kind.order is Order.ROWS:
            return Kind(Order.ROWS, dim) if times[dim] == 1 else None
        return kind if dim == 0 and times[0] == kind.per_token else None


def name_of(node: object) -> str:
    """Of what it calls."""
    if not isinstance(node, Node):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
