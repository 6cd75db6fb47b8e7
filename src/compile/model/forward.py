"""Call a model's ``forward`` on packed tokens. It needs to have only a few of the usual arguments.

``forward`` gets the positions. If it counts them itself, the modules that look them up get them
instead. A module that counts tokens from the length of its cache gets a cache of the right length.
The probe checks that positions are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .current_step import Scope, current

CACHE_NAMES = "cache", "past_key_values"
"""Names of arguments for transformers' cache: since 5.24, and before."""


class PackedForward:
    """From ids and positions ``[1, T]``, and the rows to keep ``[S]``, to logits ``[1, S, V]``."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        # Looked up here, outside of any trace.
        parameters = inspect.signature(type(module).forward).parameters
        self._has_positions = "position_ids" in parameters
        self._has_rows = "logits_to_keep" in parameters

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        options = {"logits_to_keep": rows} if self._has_rows else {}
        output = self._output(input_ids, position_ids, use_cache=False, **options)
        logits: Tensor = output.logits
        return logits if self._has_rows else logits[:, rows]

    def num_kept(self, input_ids: Tensor) -> int | None:
        """The attention calls whose keys the model's own cache contains after a pass; None if it
        returns no cache."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        output = self._output(input_ids, positions, use_cache=True)
        caches = (getattr(output, name, None) for name in CACHE_NAMES)
        layers = next((cache.layers for cache in caches if cache is not None), None)
        if layers is None:
            return None
        return sum(getattr(layer, "keys", None) is not None for layer in layers)

    def _output(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> Any:
        if self._has_positions:
            options["position_ids"] = position_ids
        current.position_ids = position_ids
        try:
            return self._module(input_ids=input_ids, **options)
        finally:
            current.position_ids = None


class EagerHead:
    """From hidden states to logits: a module's own ``forward``, without its layers.

    Args:
        module: a causal language model whose ``forward`` calls its ``base_model`` once.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._base: Any = module.base_model
        self._output: Any = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within the context, the base model's output is kept; :attr:`hidden` is that of the last
        call."""

        def keep(_module: object, _arguments: object, output: Any) -> None:
            self._output = output

        with Scope() as scope:
            scope.hook(self._base, after=keep)
            yield

    @property
    def hidden(self) -> Tensor:
        """The hidden states ``[1, T, H]`` of the last step."""
        found: Tensor = self._output.last_hidden_state
        return found

    def __call__(self, rows: Tensor) -> Tensor:
        """Logits ``[R, V]`` of hidden states ``[R, H]``."""
        given = replace(self._output, last_hidden_state=rows.unsqueeze(0))
        with Scope() as scope:
            scope.set(self._base, "forward", lambda *_, **__: given)
            logits: Tensor = self._module(input_ids=rows.new_zeros(1, len(rows)).long()).logits
        return logits[0]


@contextmanager
def positions_inside(module: PreTrainedModel) -> Iterator[None]:
    """Within the context, a model whose ``forward`` takes no positions looks up those passed to
    :class:`PackedForward`, and parts that count tokens count them accordingly."""
    with Scope() as scope:
        for part in module.modules():
            if _counts_tokens(part):
                scope.set(part, "forward", _counting(part))
        if "position_ids" not in inspect.signature(type(module).forward).parameters:
            for part in _lookups(module):
                scope.set(part, "forward", _with_positions(part))
        yield


def cache_parameter(forward: Callable[..., Any]) -> str | None:
    """The name of its argument for transformers' cache, or None."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def _counts_tokens(part: nn.Module) -> bool:
    """Whether its ``forward`` counts the tokens of a pass from the length of its cache. (Llama 4
    scales queries by that.)"""
    if isinstance(part, PreTrainedModel) or "forward" in vars(part):
        return False
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    if code is None or not {"get_seq_length", "arange"} <= set(code.co_names):
        return False
    return cache_parameter(type(part).forward) is not None


def _counting(part: nn.Module) -> Callable[..., Any]:
    forward = part.forward
    name = cache_parameter(forward)
    assert name is not None

    def counting(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, name: _Before()})

    return counting


class _Before:
    """A cache that stores nothing. Its length is that of the text before each token, less the
    tokens before it in the pass. Counting from there gives each token its position."""

    def get_seq_length(self, *_: Any) -> Tensor:
        positions = current.position_ids
        assert positions is not None
        return positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


def _lookups(module: nn.Module) -> list[nn.Module]:
    """The modules without parts whose ``forward`` takes positions, and that do not override their
    class."""
    return [
        part
        for part in module.modules()
        if not any(part.children())
        and "forward" not in vars(part)
        and "position_ids" in inspect.signature(type(part).forward).parameters
    ]


def _with_positions(part: nn.Module) -> Callable[..., Any]:
    """Its ``forward``, with the positions of the pass instead of its own."""
    forward = part.forward
    place = list(inspect.signature(forward).parameters).index("position_ids")

    def with_positions(*args: Any, **kwargs: Any) -> Any:
        own = args[place] if place < len(args) else kwargs.get("position_ids")
        positions = current.position_ids
        assert positions is not None
        # A module that counts itself counts for all texts of a batch at once.
        if own is None or own.dim() == 1:
            positions = positions[0]
        if place < len(args):
            return forward(*args[:place], positions, *args[place + 1 :], **kwargs)
        return forward(*args, **{**kwargs, "position_ids": positions})

    return with_positions
