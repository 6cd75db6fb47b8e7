"""The sampler. A row's token depends only on its logits, parameters, seed and position.

Random rows draw twice: first a group of :data:`GROUP` consecutive ids by the sum of its
probabilities, then a token of the group by its own probability. Together this is a sample of the
softmax. Both draws use the Gumbel-max trick: the largest log-probability + Gumbel noise wins.
Random numbers and their logarithms cost more than reading the logits, so they are computed for few
tokens instead of the whole vocabulary. Noise comes from Philox keyed by the request's seed. The
position and the id of the group or token are the counter, so neither the batch nor any order
affects it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..collectives.communicator import Communicator

GROUP = 256
"""Tokens per group, a power of two. It determines which tokens a seed gives."""

_NEG_INF = float("-inf")
_OF_TOKEN, _OF_GROUP = 0, 1
"""Last words of the counter, which separate the noise of tokens from that of groups."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of a vocabulary whose logits are on a rank.

    Attributes:
        sizes: tokens of each rank, in order; whole groups, except for the last.
        communicator: of this rank.
    """

    sizes: tuple[int, ...]
    communicator: Communicator

    @property
    def first_id(self) -> int:
        return sum(self.sizes[: self.communicator.rank])

    @property
    def last_id(self) -> int:
        """The last id of the whole vocabulary."""
        return sum(self.sizes) - 1


OF_REQUEST = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
}
"""Sampling parameters that select a token, and their dtypes in a sampler."""

PER_ROW = {**OF_REQUEST, "seeds": torch.int64, "positions": torch.int64}
_MAX_INT64 = (1 << 63) - 1


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
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
        **others: Sequence[float],
    ) -> SamplingInputs:
        """
        Args:
            seeds: signed or unsigned.
            others: values of all other rows of ``PER_ROW``.
        """
        lists: dict[str, Sequence[float]] = dict(others)
        lists["seeds"] = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
        tensors = []
        for name, dtype in PER_ROW.items():
            values = lists.pop(name)
            if dtype == torch.int64:
                values = [min(value, _MAX_INT64) for value in values]
            tensors.append(torch.tensor(values, dtype=dtype, device=device))
        if lists:
            raise TypeError(f"no parameters of a row: {', '.join(lists)}")
        return cls.from_tensors(*tensors)

    @classmethod
    def from_tensors(cls, *tensors: Tensor) -> SamplingInputs:
        """From tensors in the order of ``PER_ROW``. On a GPU the call waits for them."""
        rows = dict(zip(PER_ROW, tensors, strict=True))
        any_top = bool(((rows["top_k"] > 0) | (rows["top_p"] < 1)).any())
        return cls(**rows, any_top=any_top, any_min_p=bool((rows["min_p"] > 0).any()))

    def tensors(self) -> tuple[Tensor, ...]:
        """The arguments of :meth:`from_tensors`."""
        return tuple(getattr(self, name) for name in PER_ROW)


def greedy(logits: Tensor) -> Tensor:
    """Highest logit of each row of ``[S, V]``, ties to the lowest token id; int64 ``[S]``."""
    # argmax does not guarantee which of equal maxima it returns, and neither does max, on any
    # backend. A maximum over ids is exact.
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
    """Choose one token per row.

    The order is vLLM's. The temperature applies first. min_p drops tokens less likely than min_p
    times the most likely one. top_k keeps the k most likely of the rest (ties to the lowest ids).
    top_p keeps the smallest set of these whose renormalised probability reaches p, at least one
    token. In a random row NaN counts as -inf. Several infinite logits are equally likely, and a row
    without a finite logit gives token 0.

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
    scores = _processed(logits, params, rows)
    tokens[rows] = _draw(scores, params.seeds[rows], params.positions[rows])
    return tokens


def processed_scores(logits: Tensor, params: SamplingInputs | None, places: Tensor) -> Tensor:
    """The distributions that some rows are sampled from: float32 ``[n, V]``, log-probabilities up
    to a constant per row. For greedy rows, their logits."""
    scores = logits[places].float()
    if params is not None:
        is_random = params.temperature[places] > 0
        scores[is_random] = _processed(logits, params, places[is_random])
    return scores


def _processed(logits: Tensor, params: SamplingInputs, rows: Tensor) -> Tensor:
    """(logit - largest) / temperature of random rows, -inf where the token is dropped."""
    # The largest logit is subtracted before the division, so that a tiny temperature cannot give
    # several infinities.
    scaled = logits[rows].float().nan_to_num_(_NEG_INF, math.inf, _NEG_INF)
    largest = scaled.amax(-1, keepdim=True)
    is_largest = (scaled == largest) & (largest > _NEG_INF)
    scaled = (scaled - largest).masked_fill_(is_largest, 0.0).nan_to_num_(_NEG_INF, 0.0, _NEG_INF)
    scaled = scaled / params.temperature[rows].unsqueeze(1)
    if params.any_min_p:
        threshold = params.min_p[rows].log().unsqueeze(1)
        scaled = scaled.masked_fill(scaled < threshold, _NEG_INF)
    if params.any_top:
        scaled = _keep_top(scaled, params.top_k[rows], params.top_p[rows])
    return scaled


def _keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``scaled [S, V]`` with -inf where top_k or top_p drops the token."""
    vocab_size = scaled.shape[1]
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=scaled.device)
    limit = torch.where(top_k > 0, top_k, vocab_size).unsqueeze(1)
    values = values.masked_fill(ranks >= limit, _NEG_INF)
    probabilities = values.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Rows with top_p = 1 keep all tokens. Others keep a token if those before it do not reach p.
    dropped = (before >= top_p.double().unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    dropped[:, 0] = False
    values = values.masked_fill(dropped, _NEG_INF)
    return torch.empty_like(scaled).scatter_(1, ids, values)


def _draw(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row of log-probabilities ``[S, V]``, up to a constant; int64 ``[S]``."""
    num_rows, vocab_size = scaled.shape
    num_groups = -(-vocab_size // GROUP)
    padded = F.pad(scaled, (0, num_groups * GROUP - vocab_size), value=_NEG_INF).double()
    grouped = padded.view(num_rows, num_groups, GROUP)
    rows = torch.arange(num_rows, device=scaled.device)

    group_noise = _noise(seeds, positions, torch.zeros_like(seeds), num_groups, _OF_GROUP)
    chosen = greedy(grouped.logsumexp(-1) + group_noise)
    first_ids = chosen * GROUP
    token_noise = _noise(seeds, positions, first_ids, GROUP, _OF_TOKEN)
    return first_ids + greedy(grouped[rows, chosen] + token_noise)


def _noise(seeds: Tensor, positions: Tensor, first_ids: Tensor, num_ids: int, kind: int) -> Tensor:
    """Noise for ``num_ids`` consecutive ids of each row: float64 ``[S, num_ids]``. Four ids share
    a counter of Philox.

    Args:
        seeds, positions, first_ids: int64 ``[S]``; the first ids are multiples of 4.
    """
    keys, places, begins = (
        tensor.cpu().numpy().view(np.uint64)[:, None] for tensor in (seeds, positions, first_ids)
    )
    num_counters = -(-num_ids // 4)
    counters = begins // 4 + np.arange(num_counters, dtype=np.uint64)
    words = philox4x32((counters, places, places >> 32, np.uint64(kind)), (keys, keys >> 32))
    numbers = np.stack(words, -1).reshape(len(seeds), 4 * num_counters)[:, :num_ids]
    return _gumbel(torch.from_numpy(numbers.astype(np.float64)).to(seeds.device))


_FACTORS = np.array([0xCD9E8D57, 0xD2511F53], np.uint64)
_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
_NUM_ROUNDS = 10


def philox4x32(
    counter: Sequence[np.ndarray | np.uint64], key: Sequence[np.ndarray | np.uint64]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Four random 32-bit words per counter: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel
    random numbers: as easy as 1, 2, 3", SC 2011), in integer arithmetic. The words do not depend on
    device, batch or order.

    Args:
        counter: four uint64 arrays, key: two, that broadcast. Their lower 32 bits count.

    Returns:
        Four uint32 arrays of at least one dimension.
    """
    # In NumPy, whose operations on few elements take half of the time of torch's. A round has two
    # lanes in one array [2, ...]: words 0 and 1 of key word 0, words 2 and 3 of key word 1.
    words = np.broadcast_arrays(*(np.atleast_1d(x).astype(np.uint32) for x in (*counter, *key)))
    c0, c1, c2, c3, k0, k1 = words
    multiplied, others, keys = np.stack([c0, c2]), np.stack([c1, c3]), np.stack([k0, k1])
    lanes = (2,) + (1,) * c0.ndim
    factors, steps = _FACTORS.reshape(lanes), _STEPS.reshape(lanes)
    for _ in range(_NUM_ROUNDS):
        # Each lane multiplies the word of the other.
        product = np.multiply(multiplied[::-1], factors, dtype=np.uint64)
        multiplied = (product >> 32).astype(np.uint32)
        multiplied ^= others
        multiplied ^= keys
        others = product.astype(np.uint32)
        keys += steps
    return multiplied[0], others[0], multiplied[1], others[1]


def _gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise from 32-bit words, both float64, so that no word gives infinity."""
    uniform = (words + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_()
