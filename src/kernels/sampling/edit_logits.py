"""Edits of rows of logits: their definition, in torch, one row at a time.

The order is vLLM's: a bitmask keeps ids; bad words are banned; a bias is added, or -inf to ban an
id; then the penalties. A repetition penalty divides positive logits of tokens in the prompt or the
output, and multiplies negative ones. Frequency and presence penalties are subtracted from logits of
tokens in the output. All in float32. :mod:`.edit_kernels` implements the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LogitsProcessor = Callable[[list[int], Tensor], Tensor]

_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of a row; the defaults change nothing."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def any(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


def edited(
    logits: Tensor,
    history: Tensor,
    num_prompt_tokens: int,
    *,
    penalties: Penalties,
    bias_ids: Tensor,
    bias: Tensor,
    bad_words: Iterable[Sequence[int]] = (),
    mask: Tensor | None = None,
) -> Tensor:
    """A row of logits, edited; float32 ``[V]``.

    Args:
        logits: ``[V]``, any float dtype.
        history: int64 ``[n]``, the tokens so far, of which the first ``num_prompt_tokens`` belong
            to the prompt. Empty if neither penalties nor bad words of several tokens need it.
        bias_ids: int64, without duplicates. bias: float32, to add; -inf bans.
        bad_words: token ids. The last id of each is banned if the others are the last tokens of the
            output.
        mask: int32 ``[ceil(V / 32)]``: bit i % 32 of word i // 32 keeps id i.
    """
    row = logits.float().clone()
    vocab_size = len(row)
    if mask is not None:
        ids = torch.arange(vocab_size)
        row[(mask[ids // 32] >> (ids % 32)) & 1 == 0] = _NEG_INF
    output = history[num_prompt_tokens:].tolist()
    for word in bad_words:
        num_before = len(word) - 1
        if num_before <= len(output) and output[len(output) - num_before :] == list(word[:-1]):
            row[word[-1]] = _NEG_INF
    row[bias_ids] += bias
    if not penalties.any:
        return row
    num_generated = torch.bincount(history[num_prompt_tokens:], minlength=vocab_size)
    is_seen = torch.bincount(history, minlength=vocab_size) > 0
    penalty = torch.tensor(penalties.repetition)
    row = torch.where(is_seen, torch.where(row > 0, row / penalty, row * penalty), row)
    row -= torch.tensor(penalties.frequency) * num_generated
    row -= torch.tensor(penalties.presence) * (num_generated > 0)
    return row


def processed(
    row: Tensor, output_token_ids: list[int], processors: Sequence[LogitsProcessor]
) -> Tensor:
    """A row of logits after the logits processors of its request.

    Raises:
        ValueError: a processor returned something other than such a row, or no token is left.
        Exception: raised by a processor.
    """
    for processor in processors:
        # This is the caller's own code: it may keep and change its arguments.
        result = processor(list(output_token_ids), row.clone())
        if not isinstance(result, Tensor) or result.shape != row.shape:
            raise ValueError(f"{processor!r} must return a row of {len(row)} logits")
        row = result.to(row)
    if not (row > _NEG_INF).any():
        raise ValueError("no token is left: all logits are -inf or NaN")
    return row
