"""What the tokens of a pass choose (experts, groups of experts), held fixed in passes that are
compared with it.

A router picks the k largest scores of a token. Of two scores that are equal but for rounding it
picks one in this pass and the other in the next: kernels round otherwise for other numbers of rows,
and a tie goes to whichever comes first in an order of the kernel's own. All that follows is then
that of another expert and differs by far more than rounding, in a model that depends on nothing but
a token's id and position. So a pass takes over the choice that a token made in an earlier one,
where its own scores say that it is as good. Where they do not, the token chooses by them, and what
follows shows that it has become another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Scores are exponentials of what was rounded, and differ by more. What a token chooses goes on with
# scores of this pass, so that it shows where these are others.
_MORE = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """A call of ``topk``.

    Attributes:
        indices: ``[T, n]``, what each token chose.
        num_scores: of so many.
    """

    indices: Tensor
    num_scores: int


def choices_at(choices: Sequence[Choice], rows: Tensor) -> list[Choice]:
    """The choices of these tokens, in this order."""
    return [Choice(choice.indices[rows], choice.num_scores) for choice in choices]


def joined_choices(parts: Sequence[Sequence[Choice]]) -> list[Choice]:
    """Those of passes of other tokens, one behind the other; none if their calls are not alike."""
    forms = [[(c.num_scores, c.indices.shape[1:]) for c in choices] for choices in parts]
    if any(form != forms[0] for form in forms):
        return []
    calls = zip(*parts, strict=True)
    return [Choice(torch.cat([c.indices for c in of]), of[0].num_scores) for of in calls]


class HeldChoices(TorchFunctionMode):
    """In the block, calls of ``topk`` over the last dimension are recorded, and choose what they
    chose ``before`` where that is as good.

    Args:
        num_tokens: of the pass.
        bound: what results may differ by, relative to the largest, where only rounding does.
        before: choices of the first tokens of the pass, or of all, in the order of the calls.
    """

    def __init__(self, num_tokens: int, bound: float, before: Sequence[Choice] = ()) -> None:
        super().__init__()
        self._num_tokens, self._bound, self._before = num_tokens, bound, before
        self.made: list[Choice] = []

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") != "topk" or "out" in kwargs:
            return result
        operands = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
        scores, dim = operands["input"], operands.get("dim", -1)
        values, indices = result
        if dim not in (-1, scores.dim() - 1) or indices.numel() % self._num_tokens:
            return result  # over tokens, or of something else than tokens
        number = len(self.made)
        if number < len(self._before):
            values, indices = self._held(scores, values, indices, self._before[number])
        self.made.append(Choice(indices.reshape(self._num_tokens, -1), scores.shape[-1]))
        return type(result)((values, indices))

    def _held(
        self, scores: Tensor, values: Tensor, indices: Tensor, before: Choice
    ) -> tuple[Tensor, Tensor]:
        wanted = indices.reshape(self._num_tokens, -1).clone()
        num_known, num_chosen = before.indices.shape
        if before.num_scores != scores.shape[-1] or num_chosen != wanted.shape[1]:
            return values, indices
        wanted[:num_known] = before.indices
        wanted = wanted.reshape(indices.shape)
        there = scores.gather(-1, wanted)
        # As sets: the order of what is chosen is no matter here.
        apart = (there.sort(-1).values - values.sort(-1).values).abs().amax(-1, keepdim=True)
        is_as_good = apart <= _MORE * self._bound * values.abs().amax(-1, keepdim=True)
        return torch.where(is_as_good, there, values), torch.where(is_as_good, wanted, indices)
