"""Hidden states between a model's decoder layers, as additional results of its steps.

EAGLE-3 drafters read those of three layers of their target, and apply themselves again to what
leaves their own last layer. Hooks record them, so no model's code is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...errors import UnsupportedModelError
from .current_step import Scope, current
from .loaded import LoadedModel


def decoder_layers(loaded: LoadedModel) -> nn.ModuleList:
    """The list of a model's decoder layers.

    Raises:
        UnsupportedModelError: no list has as many modules as the config has layers.
    """
    num_layers = loaded.config.get_text_config(decoder=True).num_hidden_layers
    for part in loaded.module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_layers:
            return part
    raise UnsupportedModelError(
        f"{loaded.architecture}: its {num_layers} decoder layers are not in one list"
    )


@contextmanager
def aux_states_recorded(loaded: LoadedModel) -> Iterator[None]:
    """Within the context, a pass appends the hidden states of ``loaded.aux_layers`` to
    ``current.aux``, those of the first layer first.

    Raises:
        UnsupportedModelError: the layers are not found.
    """
    with Scope() as scope:
        layers = decoder_layers(loaded) if loaded.aux_layers else ()
        for number in loaded.aux_layers:
            if number < len(layers):
                scope.hook(layers[number], before=_keep_input)
            else:
                scope.hook(layers[-1], after=_keep_output)
        yield


def _keep_input(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _keep(args[0] if args else kwargs["hidden_states"])


def _keep_output(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
    _keep(output[0] if isinstance(output, tuple) else output)


def _keep(hidden: Tensor) -> None:
    if current.aux is not None:
        current.aux.append(hidden)
