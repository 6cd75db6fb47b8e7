"""The head of a module that runs as it is: its own ``forward``, with the layers' part left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


class EagerHead:
    """From hidden states to logits, for a module with a ``base_model``.

    Args:
        module: a causal language model whose ``forward`` calls its ``base_model`` once.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._base: Any = module.base_model
        self._output: Any = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, the base model's output is kept; :attr:`hidden` is of the last."""

        def keep(_module: object, _arguments: object, output: Any) -> None:
            self._output = output

        hook = self._base.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    @property
    def hidden(self) -> Tensor:
        """The hidden states ``[1, T, H]`` of the last step."""
        found: Tensor = self._output.last_hidden_state
        return found

    def __call__(self, rows: Tensor) -> Tensor:
        """Logits ``[R, V]`` of hidden states ``[R, H]``."""
        given = replace(self._output, last_hidden_state=rows.unsqueeze(0))
        own = vars(self._base).get("forward")
        self._base.forward = lambda *_, **__: given
        try:
            logits: Tensor = self._module(input_ids=rows.new_zeros(1, len(rows)).long()).logits
        finally:
            if own is None:
                del self._base.forward
            else:
                self._base.forward = own
        return logits[0]
