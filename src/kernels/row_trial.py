"""Code shared by the trials of CPU matmuls: groups of rows to compare, the numbers of threads to
compare them with, rows that reveal another order of summation, and the error if nothing passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from .device import MKL_ROW_UNIT

MANY_ELEMENTS = 1 << 22
"""A weight with this many elements does not stay in the processor's cache, and oneDNN reads it
best."""

# A weight with this many elements is multiplied in microseconds.
_FEW_ELEMENTS = 1 << 14
_MOST_PLACES = 3
_MOST_EXPONENT = 8
# A sum of few inputs has few partial sums: one draw, with one order of its cancelling pairs, can
# hide another order of summation.
_FEW_INPUTS = 64
_NUM_DRAWS = 6
# Numbers of rows. Padded to multiples of 4, as in most recipes: 4, 8, 12, 20, 36, 64 and 100.
_OTHER_THREADS_COUNTS = (1, 5, 12, 17, 33, 64, 100)


def no_recipe(operand: str) -> UnsupportedModelError:
    """The error for an ``operand`` for which no recipe passes the trial."""
    return UnsupportedModelError(
        f"no matmul of this CPU gives a row the same bits in every batch with {operand}; "
        "transparent=False does not require this"
    )


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """torch's number of threads in the calling thread, restored at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def holds_with_all(threads: Sequence[int], is_equal: Callable[[bool], bool]) -> bool:
    """Whether ``is_equal`` holds with each number of threads that a recipe may be used with.

    Args:
        threads: these numbers of threads; empty: only the present number.
        is_equal: its argument is whether the number is the first.
    """
    numbers = tuple(threads) or (torch.get_num_threads(),)
    for number in numbers:
        with num_threads(number):
            if not is_equal(number == numbers[0]):
                return False
    return True


def is_row_invariant(
    multiply: Callable[[Tensor], Tensor],
    rows: Tensor,
    counts: Sequence[int],
    num_elements: int,
    threads: Sequence[int] = (),
) -> bool:
    """Whether ``multiply`` gives ``rows [M, ..]`` the same bits in groups of many sizes, with every
    number of threads.

    With the first number of threads, all counts are tried. Each other number gets a few groups, at
    one place each: a library distributes rows or outputs over threads, and these counts give a
    thread none, few or many. So a second number costs about a fifth of the first.

    Args:
        counts, num_elements: as in :func:`groups_of`.
        threads: as in :func:`holds_with_all`.
    """
    expected: list[Tensor] = []

    def is_equal(is_first: bool) -> bool:
        whole = multiply(rows)
        if is_first:
            expected.append(whole)
            groups = groups_of(len(rows), counts, num_elements)
        else:
            groups = groups_of(len(rows), _OTHER_THREADS_COUNTS, MANY_ELEMENTS)
        return torch.equal(whole, expected[0]) and all(
            torch.equal(multiply(rows[group]), expected[0][group]) for group in groups
        )

    return holds_with_all(threads, is_equal)


def keeps_batched_bits(
    num_rows: int, num_inputs: int, num_outputs: int, batches: Sequence[int], threads: Sequence[int]
) -> bool:
    """Whether batches of ``[num_rows, num_inputs] @ [num_inputs, num_outputs]`` in float32 give the
    same bits in every batch size, with every number of threads. For CPU operations whose matmuls
    have no recipe.

    Args:
        batches: number of matmuls per call.
        threads: as in :func:`holds_with_all`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left = torch.randn(max(batches), num_rows, num_inputs)
        right = torch.randn(max(batches), num_inputs, num_outputs)
    expected: list[Tensor] = []

    def is_equal(is_first: bool) -> bool:
        if is_first:
            expected.append(torch.bmm(left, right))
        return all(
            torch.equal(torch.bmm(left[:count], right[:count]), expected[0][:count])
            for count in batches
        )

    return holds_with_all(threads, is_equal)


def groups_of(num_rows: int, counts: Sequence[int], num_elements: int) -> Iterator[slice]:
    """Groups of consecutive rows: ``counts`` rows each, at different places.

    Args:
        num_elements: size of the weight. With a small weight few elements reveal a difference, and
            a call is cheap: then each row is tested alone and in each of the smallest groups.
    """
    for i, count in enumerate(counts):
        if count > num_rows:
            continue
        last = num_rows - count
        places = {(5 * i) % (last + 1)}
        if count <= MKL_ROW_UNIT and num_elements < MANY_ELEMENTS:
            step = count if num_elements <= _FEW_ELEMENTS else max(1, last // _MOST_PLACES)
            places |= set(range(0, last + 1, step))
        for first in sorted(places):
            yield slice(first, first + count)


def num_draws(num_inputs: int, dtype: torch.dtype) -> int:
    """How many random operands a trial of a matmul over ``num_inputs`` takes."""
    return _NUM_DRAWS if dtype != torch.float32 and num_inputs <= _FEW_INPUTS else 1


def make_cancel(rows: Tensor, weight: Tensor) -> None:
    """Change random 16-bit ``rows [.., K]`` and ``weight [.., K]`` so that every sum consists only
    of the rounding errors of its float32 partial sums, well above the smallest float16. Otherwise
    the rounding of a sum to 16 bits would hide another order in all but one of some hundred
    sums."""
    for part in (rows, weight):
        # Without different exponents, sums of a few 16-bit multiplications would be exact.
        part *= 2.0 ** torch.randint(0, _MOST_EXPONENT, part.shape)
    num_inputs = rows.shape[-1]
    first, second, rest = torch.randperm(num_inputs).split(
        [num_inputs // 2, num_inputs // 2, num_inputs % 2]
    )
    rows[..., rest] = 0
    rows[..., second] = rows[..., first]
    weight[..., second] = -weight[..., first]
