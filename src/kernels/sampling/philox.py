"""Philox4x32-10, a counter-based random number generator, in torch integer arithmetic.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The same
(counter, key) gives the same four words anywhere, in any batch, in any order.
"""

from __future__ import annotations

from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for each counter.

    Args:
        counter, key: int64 tensors that hold 32-bit words, 0 to 2^32 - 1, and broadcast.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The 64-bit product of two words wraps in int64, yet both of its halves are right.
        product0, product1 = c0 * _M0, c2 * _M1
        high0, high1 = (product0 >> 32) & _WORD, (product1 >> 32) & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3
