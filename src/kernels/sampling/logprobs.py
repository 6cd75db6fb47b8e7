"""Log-probabilities as two kernels, without a second copy of the logits and without a
synchronisation.

:mod:`.logprob_rows` has the formula. The first kernel reads a row once. For every group of ids it
stores the largest logit, the sum of exp(logit - largest), and how many of its tokens come before
the given one. The second, one program per row, joins the groups. The k most likely tokens are in
the k groups whose largest logits come first in the same order. So k groups are chosen, then k
tokens among their 256 k logits. All steps have a fixed order, so the bits of a row depend neither
on the batch nor on where the row is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_functions import load_logits
from .logprob_rows import MAX_TOP, ROW_WORDS
from .sampler import GROUP

_STRETCH = 4096
_NOWHERE = tl.constexpr(1 << 22)
"""Index of a group beyond all vocabularies, whose ids are still int32."""
# Fields begin at any word of the staged step, and rows of a chunk follow any number of others.
_ANYWHERE = ["places", "tokens", "num_top", "rows"]


@triton.jit
def _token_of(row, places, tokens, sampled):  # type: ignore[no-untyped-def]
    """(place, token) of a row; the token sampled there if none is given."""
    place = tl.load(places + row)
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.load(sampled + place).to(tl.int32)
    return place, token


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=_ANYWHERE[:2])
def _group_kernel(  # type: ignore[no-untyped-def]
    logits, places, tokens, sampled, weights, counts, logits_stride, num_groups,
    VOCAB: tl.constexpr, STRETCH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Per group: (largest logit, sum of exp) in ``weights [n, num_groups, 2]``, and the number of
    tokens before the given one in ``counts [n, num_groups]``. Grid: ``(stretches, n)``."""
    stretch = tl.program_id(0)
    row = tl.program_id(1)
    place, token = _token_of(row, places, tokens, sampled)
    base = logits + place.to(tl.int64) * logits_stride
    group = stretch * (STRETCH // GROUP) + tl.arange(0, STRETCH // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = load_logits(base, ids, VOCAB)
    own = tl.maximum(tl.load(base + token).to(tl.float32), float("-inf"))
    top = tl.max(logit, 1)
    distance = tl.where(logit > float("-inf"), logit - top[:, None], float("-inf"))
    is_before = (logit > own) | ((logit == own) & (ids < token))
    at = row * num_groups + group
    tl.store(weights + 2 * at, top, mask=group < num_groups)
    tl.store(weights + 2 * at + 1, tl.sum(tl.exp(distance), 1), mask=group < num_groups)
    tl.store(counts + at, tl.sum(is_before.to(tl.int32), 1), mask=group < num_groups)


@triton.jit
def _next_in_order(values, ids, is_valid, value, last):  # type: ignore[no-untyped-def]
    """The next (value, id) after (``value``, ``last``), in descending order of values, then
    ascending order of ids. The id is ``0x7FFFFFFF`` if there is none."""
    is_left = is_valid & ((values < value) | ((values == value) & (ids > last)))
    best = tl.max(tl.where(is_left, values, float("-inf")))
    return best, tl.min(tl.where(is_left & (values == best), ids, 0x7FFFFFFF))


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=_ANYWHERE)
def _join_kernel(  # type: ignore[no-untyped-def]
    logits, places, tokens, num_top, sampled, weights, counts, rows, logits_stride, num_groups,
    VOCAB: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    MAX_TOP: tl.constexpr, ROW_WORDS: tl.constexpr,
):  # fmt: skip
    """A row of ``rows [n, ROW_WORDS]`` from its groups. Grid: ``(n,)``."""
    row = tl.program_id(0)
    place, token = _token_of(row, places, tokens, sampled)
    base = logits + place.to(tl.int64) * logits_stride
    groups = tl.arange(0, PADDED)
    is_group = groups < num_groups
    at = row * num_groups + groups
    tops = tl.load(weights + 2 * at, mask=is_group, other=float("-inf"))
    sums = tl.load(weights + 2 * at + 1, mask=is_group, other=0.0)
    largest = tl.max(tops, 0)
    scales = tl.where(tops > float("-inf"), tl.exp(tops - largest), 0.0)
    log_sum = tl.log(tl.sum(sums * scales, 0))
    own = tl.maximum(tl.load(base + token).to(tl.float32), float("-inf"))
    num_before = tl.sum(tl.load(counts + at, mask=is_group, other=0), 0)
    out = rows + row * ROW_WORDS
    tl.store(out, ((own - largest) - log_sum).to(tl.int32, bitcast=True))
    tl.store(out + 1, 1 + num_before)

    k = tl.minimum(tl.load(num_top + row), MAX_TOP)
    slots = tl.arange(0, CHOSEN)
    chosen = slots * 0 + _NOWHERE
    value = tl.full([], float("inf"), tl.float32)
    last = tl.full([], -1, tl.int32)
    for place_of_group in range(k):
        value, last = _next_in_order(tops, groups, is_group, value, last)
        chosen = tl.where(slots == place_of_group, tl.minimum(last, _NOWHERE), chosen)
    ids = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = load_logits(base, ids, VOCAB)
    value = tl.full([], float("inf"), tl.float32)
    last = tl.full([], -1, tl.int32)
    for place_of_token in range(k):
        value, last = _next_in_order(logit, ids, ids < VOCAB, value, last)
        word = out + 2 + place_of_token
        tl.store(word, tl.where(last < VOCAB, last, -1))
        tl.store(word + MAX_TOP, ((value - largest) - log_sum).to(tl.int32, bitcast=True))


def write_logprobs(logits: Tensor, fields: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """Write one result row for each of some rows of logits.

    Args:
        logits: ``[N, V]``, any float dtype, rows contiguous.
        fields: int32 ``[LOGPROB_FIELDS, n]``, n at most 65,535; each of the three contiguous.
        sampled: int64 ``[>= N]``.
        rows: int32 ``[n, ROW_WORDS]``, written up to the requested number of most likely tokens.
    """
    places, tokens, num_top = fields
    num_rows, vocab_size = len(rows), logits.shape[1]
    num_groups = triton.cdiv(vocab_size, GROUP)
    padded = triton.next_power_of_2(num_groups)
    weights = torch.empty(num_rows, num_groups, 2, dtype=torch.float32, device=logits.device)
    counts = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
    _group_kernel[(triton.cdiv(vocab_size, _STRETCH), num_rows)](
        logits, places, tokens, sampled, weights, counts, logits.stride(0), num_groups,
        VOCAB=vocab_size,
        STRETCH=_STRETCH,
        GROUP=GROUP,
        num_warps=4,
    )  # fmt: skip
    _join_kernel[(num_rows,)](
        logits, places, tokens, num_top, sampled, weights, counts, rows, logits.stride(0),
        num_groups,
        VOCAB=vocab_size,
        GROUP=GROUP,
        PADDED=padded,
        CHOSEN=min(triton.next_power_of_2(MAX_TOP), padded),
        MAX_TOP=MAX_TOP,
        ROW_WORDS=ROW_WORDS,
        num_warps=8,
    )  # fmt: skip
