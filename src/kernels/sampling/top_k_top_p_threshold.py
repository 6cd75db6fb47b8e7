"""Find the score below which top-k, top-p and min-p drop tokens, by bisection of float bits.

A token's *key* is the bits of its distance from the most likely token, (largest logit - logit) /
temperature, a float32 that is never negative. As integers, these bits order tokens from the most
likely down. top_k and top_p keep the tokens up to some key, which is found by narrowing a bracket
of keys: each pass over the row tallies three keys inside the bracket, so the bracket shrinks to a
quarter or less. Tokens at the last key are ordered by id. Passes read fixed tiles in a fixed order,
so the bits of a row do not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draw_functions import allowed

CUT_FIELDS = 3
"""int32 fields that define the kept tokens of a row, each an array ``[S]``: top_k (0 or less: all),
bits of the float32 top_p, bits of the float32 -log(min_p), which is infinite if min_p is 0."""

_LARGEST_KEY = tl.constexpr(0x7F7FFFFF)
_NO_KEY = tl.constexpr(0x7F800000)


@triton.jit
def token_keys(  # type: ignore[no-untyped-def]
    base, words, first, top, temperature, VOCAB: tl.constexpr, SIZE: tl.constexpr
):
    """Keys of the ``SIZE`` tokens from ``first`` on, int32. The key is above every finite key for
    -inf, NaN, tokens outside the mask ``words``, and tokens out of range."""
    ids = first + tl.arange(0, SIZE)
    logit = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    logit = allowed(logit, words, first, VOCAB, SIZE)
    # Rounded as in the reference: a quotient that differs by one bit creates or breaks ties.
    distance = tl.div_rn(top - logit, temperature + tl.zeros_like(logit))
    # If the largest logit is infinite, the difference is undefined.
    distance = tl.where((logit == top) & (logit > float("-inf")), 0.0, distance)
    return tl.where(distance >= 0.0, distance.to(tl.int32, bitcast=True), _NO_KEY)


@triton.jit
def _weight(key):  # type: ignore[no-untyped-def]
    """exp(-distance) for keys, to a few units in the last place, as float64.

    The exponent of 2 is rounded, with an error that grows with it. The lost factor is multiplied
    back in.
    """
    distance = key.to(tl.float32, bitcast=True)
    exponent = distance * 1.4426950216293335
    lost = tl.fma(distance, 1.4426950216293335 + tl.zeros_like(distance), -exponent)
    lost += distance * 1.9259629911266175e-8
    weight = tl.exp2(-exponent) * (1.0 - lost * 0.6931471805599453)
    return tl.where(distance < 80.0, weight, 0.0).to(tl.float64)


@triton.jit
def _tally(  # type: ignore[no-untyped-def]
    base, words, top, temperature, k1, k2, k3,
    VOCAB: tl.constexpr, TILE: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """Number of tokens up to each of three keys, int32, and the sum of their weights, float64."""
    # Three 10-bit counts per word: a thread sees VOCAB / TILE tokens.
    packed = tl.zeros([TILE], tl.int32)
    sum1 = tl.zeros([TILE], tl.float64)
    sum2 = tl.zeros([TILE], tl.float64)
    sum3 = tl.zeros([TILE], tl.float64)
    for first in range(0, VOCAB, TILE):
        key = token_keys(base, words, first, top, temperature, VOCAB, TILE)
        packed += tl.where(key <= k1, 1, 0)
        packed += tl.where(key <= k2, 1 << 10, 0)
        packed += tl.where(key <= k3, 1 << 20, 0)
        if WEIGH:
            weight = _weight(key)
            sum1 += tl.where(key <= k1, weight, 0.0)
            sum2 += tl.where(key <= k2, weight, 0.0)
            sum3 += tl.where(key <= k3, weight, 0.0)
    n1 = tl.sum(packed & 1023, 0)
    n2 = tl.sum((packed >> 10) & 1023, 0)
    n3 = tl.sum((packed >> 20) & 1023, 0)
    return n1, n2, n3, tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    base, words, top, temperature, target, high, num_high, most, key1, key2, key3,
    VOCAB: tl.constexpr, TILE: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """The key up to which the tokens (with WEIGH: their weights) reach ``target``, or ``high``.

    Ends early if the number of tokens up to the key (with WEIGH: in the bracket) is ``most``.

    Returns:
        The key; the number of tokens below the bracket and up to its end; the weight below.
    """
    low = high * 0
    num_low = low
    below = (high * 0).to(tl.float64)
    key1, key2 = tl.minimum(low + key1, high - 1), tl.minimum(low + key2, high - 1)
    key3 = tl.minimum(low + key3, high - 1) if WEIGH else high
    while (low < high) & (num_high - (num_low if WEIGH else 0) > most):
        n1, n2, n3, sum1, sum2, sum3 = _tally(
            base, words, top, temperature, key1, key2, key3, VOCAB, TILE, WEIGH
        )
        reached = (sum1, sum2, sum3) if WEIGH else (n1, n2, n3)
        if reached[0] >= target:
            high = key1
            num_high = n1
        elif reached[1] >= target:
            low = key1 + 1
            num_low = n1
            below = sum1
            high = key2
            num_high = n2
        elif reached[2] >= target:
            low = key2 + 1
            num_low = n2
            below = sum2
            high = key3
            num_high = n3
        else:
            low = key3 + 1
            num_low = n3
            below = sum3
        width = high - low
        key1 = low + width // 4
        key2 = low + width // 2
        key3 = low + width // 2 + width // 4
    return high, num_low, num_high, below


@triton.jit
def _key_of_weight(  # type: ignore[no-untyped-def]
    base, words, top, temperature, target, limit, num_limit,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The key at which the sum of weights reaches ``target``, or ``limit`` if it is smaller.

    Returns:
        The key, how many of the tokens at it to keep (lowest ids first), and whether there may be
        more of them. ``num_limit`` is the number of tokens up to ``limit``.
    """
    # Distances of 1, 4 and 16. Once the bracket contains one token, that token is kept: the rest of
    # the bracket is empty.
    high, num_low, num_high, below = _narrow(
        base, words, top, temperature, target, limit, num_limit, 1,
        0x3F800000, 0x40800000, 0x41800000, VOCAB, TILE, True,
    )  # fmt: skip
    num_at = num_high - num_low
    num_at_threshold = num_at
    if num_at > 1:
        # low == high: these tokens are equal. A token is kept if those before it do not reach
        # target.
        needed = tl.ceil((target - below) / _weight(high))
        num_at_threshold = tl.minimum(tl.maximum(needed, 1.0), num_at.to(tl.float64)).to(tl.int32)
    return high, tl.maximum(num_at_threshold, 1), num_at > num_at_threshold


@triton.jit
def largest_logit(  # type: ignore[no-untyped-def]
    base, words, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    largest = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, VOCAB, TILE):
        ids = first + tl.arange(0, TILE)
        logit = tl.load(base + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, allowed(logit, words, first, VOCAB, TILE))
    return tl.max(largest, 0)


@triton.jit
def find_threshold(  # type: ignore[no-untyped-def]
    base, words, top, temperature, cuts, row, num_rows, most,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tokens that a row keeps: (last key, how many tokens at it, whether there are more at it).

    ``words`` is the row's mask, or None. ``cuts`` has the fields of :data:`CUT_FIELDS` for
    ``num_rows`` rows; a ``row`` below 0 keeps all. ``most`` bounds top_k.
    """
    is_cut = row >= 0
    k = tl.load(cuts + row, mask=is_cut, other=0)
    k = tl.minimum(tl.where(k > 0, k, VOCAB), most)
    top_p = tl.load(cuts + num_rows + row, mask=is_cut, other=0x3F800000)
    top_p = top_p.to(tl.float32, bitcast=True)
    # The last key that min_p keeps. The sign bit is cleared, because -log(1) may be -0.
    min_p_distance = tl.load(cuts + 2 * num_rows + row, mask=is_cut, other=_NO_KEY) & 0x7FFFFFFF
    limit = tl.minimum(min_p_distance, _LARGEST_KEY)
    if k < VOCAB:
        # Distances of 2 and 8: most rows have logits on both sides of them. This also shows whether
        # there are k tokens at all. Ends at a key up to which there are k tokens.
        limit, _, _, _ = _narrow(
            base, words, top, temperature, k, limit, k * 0 + VOCAB, k, 0x40000000, 0x41000000, 0,
            VOCAB, TILE, False,
        )  # fmt: skip
    num_below, num_limit, _, below, _, _ = _tally(
        base, words, top, temperature, limit - 1, limit, limit, VOCAB, TILE, True
    )
    num_at_threshold = tl.minimum(num_limit - num_below, k - num_below)
    is_tied = num_limit - num_below > num_at_threshold
    if top_p < 1.0:
        total = below + num_at_threshold * _weight(limit)
        target = total * top_p.to(tl.float64)
        key, num_at, is_cut = _key_of_weight(
            base, words, top, temperature, target, limit, num_limit, VOCAB, TILE
        )
        if key < limit:
            num_at_threshold = num_at
            is_tied = is_cut
        else:
            num_at_threshold = tl.minimum(num_at_threshold, num_at)
            is_tied = is_tied | is_cut
        limit = key
    return limit, num_at_threshold, is_tied


@triton.jit
def keep_mask(key, limit, num_at_threshold, is_tied, num_seen):  # type: ignore[no-untyped-def]
    """Which tokens of a tile are kept; and ``num_seen``, the number at ``limit``, after the
    tile."""
    is_kept = key <= limit
    if is_tied:
        is_at = (key == limit).to(tl.int32)
        is_kept = (key < limit) | (is_kept & (num_seen + tl.cumsum(is_at, 0) <= num_at_threshold))
        num_seen += tl.sum(is_at, 0)
    return is_kept, num_seen
