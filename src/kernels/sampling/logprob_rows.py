"""The format of log-probabilities: per row of logits one token's log-probability, its rank, and the
most likely tokens.

The log-probability of a token is ``(logit - largest) - log(sum)``, all in float32. ``sum`` is that
of exp(logit - largest) over the vocabulary: first within each group of ``GROUP`` ids, relative to
the largest logit of the group, then over groups. All code uses this one formula in one order, so
equal logits have equal log-probabilities: those of a sampled token, of a prompt token, and of a
most likely token are the same float.

A token's rank is 1 plus the number of tokens before it, in descending order of logits and then
ascending order of ids. NaN counts as -inf. Without a finite largest logit there is no distribution,
and all results are NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampler import GROUP

MAX_TOP = 20
"""Largest number of most likely tokens per row; :func:`likeliest` has more."""
ROW_WORDS = 2 + 2 * MAX_TOP
"""int32 words of a row: bits of the token's float32 log-probability, its rank, then the ids of the
most likely tokens (-1: none), and the bits of their log-probabilities."""

LOGPROB_FIELDS = 3
"""int32 fields of a requested row, each an array ``[n]``: place, token (-1: the token sampled
there), number of most likely tokens."""

_NEG_INF = float("-inf")


def logprob_rows(logits: Tensor, tokens: Tensor, num_top: Tensor) -> Tensor:
    """One result row per row of logits, in torch, on a CPU. Each row is computed separately,
    because torch's reductions could depend on the number of rows.

    Args:
        logits: ``[N, V]``. tokens: ``[N]``, integers. num_top: ``[N]``; at most
            ``MAX_TOP`` are written.

    Returns:
        int32 ``[N, ROW_WORDS]``.
    """
    rows = torch.zeros(len(logits), ROW_WORDS, dtype=torch.int32)
    rows[:, 2 : 2 + MAX_TOP] = -1
    values = rows.view(torch.float32)
    wanted = zip(logits, tokens.tolist(), num_top.tolist(), strict=True)
    for place, (row, token, count) in enumerate(wanted):
        padded = _padded(row)
        largest, log_sum = _normaliser(padded)
        own = padded[token]
        is_before = int((padded > own).sum()) + int((padded[:token] == own).sum())
        values[place, 0] = (own - largest) - log_sum
        rows[place, 1] = 1 + is_before
        ids = _likeliest(padded, min(count, MAX_TOP, len(row)))
        rows[place, 2 : 2 + len(ids)] = ids.int()
        first = 2 + MAX_TOP
        values[place, first : first + len(ids)] = (padded[ids] - largest) - log_sum
    return rows


def likeliest(logits: Tensor, words: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """More than ``MAX_TOP`` most likely tokens of a row, on any device: ids, int32 ``[count]``, in
    the order of ranks, and their log-probabilities, float32 ``[count]``, with the bits of the one
    formula.

    Args:
        logits: ``[V]``. words: its result row, int32 ``[ROW_WORDS]``, with a most likely token.
        count: more than V gives V.
    """
    row = logits.float()
    row = row.masked_fill(row.isnan(), _NEG_INF)
    ordered, ids = row.sort(descending=True, stable=True)  # equal logits: ascending ids
    # The first token's log-probability is (largest - largest) - log(sum).
    minus_log_sum = words.view(torch.float32)[2 + MAX_TOP]
    distances = ordered[:count] - ordered[0]
    return ids[:count].int(), distances + minus_log_sum


def _padded(row: Tensor) -> Tensor:
    """As float32, padded to whole groups, aligned, without NaN."""
    num_groups = -(-len(row) // GROUP)
    padded = torch.full((num_groups * GROUP,), _NEG_INF)
    padded[: len(row)] = row
    return padded.masked_fill_(padded.isnan(), _NEG_INF)


def _normaliser(padded: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit, and the logarithm of the sum of exp(logit - largest)."""
    groups = padded.view(-1, GROUP)
    tops = groups.amax(1)
    weights = torch.where(groups > _NEG_INF, groups - tops.unsqueeze(1), _NEG_INF).exp_()
    largest = tops.amax()
    return largest, (weights.sum(1) * (tops - largest).exp_()).sum().log()


def _likeliest(padded: Tensor, count: int) -> Tensor:
    """The first ``count`` ids in descending order of logits, then ascending order of ids."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    # torch.topk does not define which of equal logits it returns, but the last value is defined.
    last = padded.topk(count).values[-1]
    ids = (padded >= last).nonzero().flatten()
    return ids[padded[ids].sort(descending=True, stable=True).indices[:count]]
