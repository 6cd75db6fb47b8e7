"""Hidden states between a model's decoder layers, as additional results of its steps.

EAGLE-3 drafters read those of three layers of their target, and apply themselves again to what
leaves their own last layer. Hooks record them, so no model's code is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..step_inputs import HIDDEN_STATES
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
    """Within the context, a pass adds the hidden states of ``loaded.aux_layers`` to
    ``current.aux``.

    Raises:
        UnsupportedModelError: the layers are not found.
    """
    with Scope() as scope:
        layers: Sequence[Any] = [*decoder_layers(loaded)] if loaded.aux_layers else []
        for number in set(loaded.aux_layers):
            if number < len(layers):
                scope.hook(layers[number], before=_keeping_input(number))
            else:
                scope.hook(layers[-1], after=_keeping_output(number))
        yield


def _keeping_input(number: int) -> Callable[..., None]:
    def keep(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if current.aux is not None:
            current.aux[number] = args[0] if args else kwargs["hidden_states"]

    return keep


def _keeping_output(number: int) -> Callable[..., None]:
    def keep(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if current.aux is not None:
            current.aux[number] = output[0] if isinstance(output, tuple) else output

    return keep


def given_hidden(stand_in: Tensor) -> Tensor:
    """The input ``hidden_states`` of the running step, ``[1, T, H]``. Without a step, as in the
    probe, it is ``stand_in``."""
    if current.step is None:
        return stand_in
    return current.step.inputs.more[HIDDEN_STATES].unsqueeze(0)
