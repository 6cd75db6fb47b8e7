"""Chooses tokens. A row's token depends on its logits, parameters, seed and position alone.

Random rows use the Gumbel-max trick: the token with the largest logit + Gumbel noise is a sample
of the softmax. The noise of a token comes from Philox keyed by the request's seed, with the
position and the token id as counter, so neither the batch nor the order of anything matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagespec.kernels.philox import philox4x32

_WORD = 0xFFFFFFFF
_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Parameters of S rows, as tensors ``[S]`` on the device of the logits.

    Attributes:
        temperature: float32, 0 for greedy. top_k: int64, 0 or less for all. top_p, min_p: float32.
        seeds: int64, the bits of a 64-bit seed. positions: int64, absolute position of the token
            to sample.
        any_top: whether any row uses top_k or top_p. any_min_p: whether any row uses min_p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    any_top: bool
    any_min_p: bool

    @classmethod
    def from_lists(
        cls,
        *,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingInputs:
        """Seeds may be given signed or unsigned."""

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        def integers(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        signed = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
        return cls(
            floats(temperature),
            integers([min(k, 1 << 62) for k in top_k]),
            floats(top_p),
            floats(min_p),
            integers(signed),
            integers(positions),
            any_top=any(k > 0 for k in top_k) or any(p < 1 for p in top_p),
            any_min_p=any(p > 0 for p in min_p),
        )


def greedy(logits: Tensor) -> Tensor:
    """Highest logit of each row of ``[S, V]``, ties to the lowest token id; int64 ``[S]``."""
    # argmax does not promise which of equal maxima it returns; the first index of max does so on
    # no backend either. A maximum over ids is exact.
    largest = logits.amax(-1, keepdim=True)
    chosen = logits.argmax(-1)
    num_largest = (logits == largest).sum(-1)
    if bool((num_largest <= 1).all()):
        return chosen
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (
        torch.where(logits == largest, ids, logits.shape[-1])
        .amin(-1)
        .clamp_(max=logits.shape[-1] - 1)
    )


def sample(logits: Tensor, params: SamplingInputs | None) -> Tensor:
    """Choose one token a row.

    In vLLM's order: temperature; min_p drops what is less likely than min_p times the likeliest;
    top_k keeps the k likeliest of the rest (ties to the lowest ids), top_p the smallest set of
    those whose renormalised probability reaches p, at least one token.

    Args:
        logits: ``[S, V]``, any float dtype.
        params: None if all rows are greedy.

    Returns:
        int64 ``[S]``.
    """
    if params is None:
        return greedy(logits)
    random = params.temperature > 0
    rows = random.nonzero().flatten()
    tokens = greedy(logits)
    if len(rows) == 0:
        return tokens
    # Divided by the largest first, so that a tiny temperature cannot overflow to infinity twice.
    scaled = logits[rows].float()
    scaled = scaled - scaled.amax(-1, keepdim=True)
    scaled = scaled / params.temperature[rows].unsqueeze(1)
    if params.any_min_p:
        threshold = params.min_p[rows].log().unsqueeze(1)
        scaled = scaled.masked_fill(scaled < threshold, _NEG_INF)
    if params.any_top:
        scaled = _keep_top(scaled, params.top_k[rows], params.top_p[rows])
    tokens[rows] = _gumbel_argmax(scaled, params.seeds[rows], params.positions[rows])
    return tokens


def _keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``scaled [S, V]`` with -inf where top_k or top_p drops the token."""
    vocab_size = scaled.shape[1]
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=scaled.device)
    limit = torch.where(top_k > 0, top_k, vocab_size).unsqueeze(1)
    values = values.masked_fill(ranks >= limit, _NEG_INF)
    probabilities = values.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Rows with top_p = 1 keep all; others keep a token if those before it do not reach p.
    dropped = (before >= top_p.double().unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    dropped[:, 0] = False
    values = values.masked_fill(dropped, _NEG_INF)
    return torch.empty_like(scaled).scatter_(1, ids, values)


def _gumbel_argmax(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    num_rows, vocab_size = scaled.shape
    kept = scaled > _NEG_INF
    num_kept = int(kept.sum())
    # Four tokens share a Philox call when all are wanted; few tokens are looked up one by one.
    if num_kept * 4 < num_rows * vocab_size:
        row, token = kept.nonzero(as_tuple=True)
        words = torch.stack(_words(seeds[row], positions[row], token // 4))
        noise = _gumbel(words.gather(0, (token % 4).unsqueeze(0))[0])
        scores = torch.full_like(scaled, _NEG_INF, dtype=torch.float64)
        scores[row, token] = scaled[row, token].double() + noise
    else:
        quads = torch.arange((vocab_size + 3) // 4, device=scaled.device)
        words = torch.stack(_words(seeds.unsqueeze(1), positions.unsqueeze(1), quads), dim=-1)
        noise = _gumbel(words.reshape(num_rows, -1)[:, :vocab_size])
        scores = scaled.double() + noise
    return greedy(scores)


def _words(seeds: Tensor, positions: Tensor, quads: Tensor) -> tuple[Tensor, ...]:
    counter = (quads, positions & _WORD, (positions >> 32) & _WORD, quads.new_zeros(()))
    return philox4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD))


def _gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise from 32-bit words; float64, so that no word gives infinity."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_()
