"""Calls a model's ``forward`` on packed tokens, with as little asked of its arguments as possible.

Positions are handed to ``forward``, or, where it counts them itself, to the modules inside that
look them up. The probe finds out whether they are followed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class _Current(threading.local):
    """The positions ``[1, T]`` of the pass that a thread is in."""

    position_ids: Tensor | None = None


_current = _Current()


class PackedForward:
    """From ids and positions ``[1, T]``, and the rows wanted ``[S]``, to logits ``[1, S, V]``."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        # Looked up here, where nothing is traced.
        parameters = inspect.signature(type(module).forward).parameters
        self._has_positions = "position_ids" in parameters
        self._has_rows = "logits_to_keep" in parameters

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        options: dict[str, Any] = {}
        if self._has_positions:
            options["position_ids"] = position_ids
        if self._has_rows:
            options["logits_to_keep"] = rows
        _current.position_ids = position_ids
        try:
            logits: Tensor = self._module(input_ids=input_ids, use_cache=False, **options).logits
        finally:
            _current.position_ids = None
        return logits if self._has_rows else logits[:, rows]


def takes_positions(module: PreTrainedModel) -> bool:
    """Whether its ``forward``, or anything in it, can be told positions."""
    parameters = inspect.signature(type(module).forward).parameters
    return "position_ids" in parameters or bool(_lookups(module))


@contextmanager
def positions_inside(module: PreTrainedModel) -> Iterator[None]:
    """In the block, a model whose ``forward`` takes no positions has them looked up as
    :class:`PackedForward` is told."""
    with ExitStack() as stack:
        if "position_ids" not in inspect.signature(type(module).forward).parameters:
            for part in _lookups(module):
                part.forward = _told(part)  # type: ignore[method-assign]
                stack.callback(vars(part).pop, "forward")
        yield


def _lookups(module: nn.Module) -> list[nn.Module]:
    """The modules without parts whose ``forward`` takes positions, and that are as their class."""
    return [
        part
        for part in module.modules()
        if not any(part.children())
        and "forward" not in vars(part)
        and "position_ids" in inspect.signature(type(part).forward).parameters
    ]


def _told(part: nn.Module) -> Callable[..., Any]:
    """Its ``forward``, with the positions of the pass in place of its own."""
    forward = part.forward
    place = list(inspect.signature(forward).parameters).index("position_ids")

    def told(*args: Any, **kwargs: Any) -> Any:
        own = args[place] if place < len(args) else kwargs.get("position_ids")
        positions = _current.position_ids
        assert positions is not None
        # What counts for itself counts for all texts of a batch at once.
        if own is None or own.dim() == 1:
            positions = positions[0]
        if place < len(args):
            return forward(*args[:place], positions, *args[place + 1 :], **kwargs)
        return forward(*args, **{**kwargs, "position_ids": positions})

    return told
