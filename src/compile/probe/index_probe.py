"""Finds the indexers of a model: which attention calls each chooses for, and its keys' shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..model.indexers import IndexCall
from ..model.local_calls import no_choice

_ALL = slice(None)
# A mask with a dimension of heads, as an indexer has it: of the only head.
_OF_A_HEAD = (_ALL, 0, _ALL, _ALL)
Refuse = Callable[[str], UnsupportedModelError]


class MaskMarker(Tensor):
    """A mask that a model hands to its attention, known again as a mask of booleans too, and as the
    part of it that an indexer is given."""

    whole: MaskMarker | None = None

    def to(self, *_: Any, **__: Any) -> Tensor:
        return self

    def __getitem__(self, at: Any) -> Tensor:
        part = super().__getitem__(at)
        # A tensor in it is of another type, and cannot be compared.
        has_types = isinstance(at, tuple) and [*map(type, at)] == [slice, int, slice, slice]
        if isinstance(part, MaskMarker) and has_types and at == _OF_A_HEAD:
            part.whole = self
        return part


class IndexRecorder:
    """The indexers of a pass of ``num_tokens`` tokens.

    An indexer chooses for the attention call behind it; later calls may see the same positions.

    Attributes:
        modules: each with the number of its attention call.
    """

    def __init__(self, refuse: Refuse, num_tokens: int) -> None:
        self._refuse, self._num_tokens = refuse, num_tokens
        self._chosen: list[tuple[Tensor, int]] = []
        self._next: IndexCall | None = None
        self._module: nn.Module | None = None
        self.modules: dict[nn.Module, int] = {}

    def choose(self, module: nn.Module, call: IndexCall) -> Tensor:
        """Records the call; a stand-in for its result."""
        if self._next is not None:
            raise self._refuse("two indexers choose for one attention call")
        if module in self.modules:
            raise self._refuse(f"its {type(module).__name__} runs more than once a pass")
        shapes = [tuple(x.shape) for x in (call.query, call.key, call.weights)]
        if any(shape[0] != self._num_tokens for shape in shapes):
            raise self._refuse(
                f"an indexer is handed shapes {shapes} for the {self._num_tokens} tokens of a pass"
            )
        self._next, self._module = call, module
        chosen = no_choice(call)
        self._chosen.append((chosen, call.num_chosen))
        return chosen

    def attend(self, number: int, indices: Tensor | None) -> dict[str, Any]:
        """What an attention call has of indexers, as fields of its spec."""
        call, self._next = self._next, None
        if call is not None and self._module is not None:
            self.modules[self._module] = number
        of_key: dict[str, Any] = {}
        if call is not None:
            of_key["index_dim"] = call.key.shape[1]
            of_key["index_dtype"] = str(call.key.dtype).removeprefix("torch.")
        if indices is None:
            if call is not None:
                raise self._refuse("its attention is not handed what its indexer chose")
            return of_key
        for chosen, num_chosen in self._chosen:
            if chosen is indices:
                return {**of_key, "num_chosen": num_chosen}
        raise self._refuse("its attention takes the tensor 'indices', which is no indexer's choice")

    def mask(self) -> Any:
        """What the indexer of the next attention call adds to its scores, as a whole mask; None if
        it has none."""
        if self._next is None:
            return None
        mask = self._next.mask
        whole = mask.whole if isinstance(mask, MaskMarker) else None
        if whole is None:
            raise self._refuse("its indexer adds a mask of its own")
        return whole
