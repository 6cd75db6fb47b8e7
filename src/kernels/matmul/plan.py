"""Chooses, per weight shape, the largest row count at which our matmul kernels replace cuBLAS.

The choice compares bits on the GPU available: see :func:`sweep`. Two orders of summation differ in
the last places of a float32 sum, and once that is rounded to 16 bits, in one result of thousands or
fewer. So some hundred thousand results are compared for each number of rows above 16, up to which
ours computes in any case. A weight of few outputs, for which that would take long and cuBLAS gains
little, is ours for all row counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UnsupportedModelError
from ..device import Gpu
from ..fused import dispatch as fused
from .dispatch import ALL_ROWS, _ours, many_rows_kernel
from .tiles import fastest_custom_rows, has_one_tile

SWEEP_ROWS = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024)
REFERENCE_ROWS = 512
MANY_ROWS = 1023  # no whole tile at the end
LEAST_OUTPUTS = 64  # of a weight that cuBLAS may multiply with
_LEAST_RESULTS = 1 << 20  # of a sweep's draws of 512 rows
_MAX_DRAWS = 16
_MAX_SLICES = 4  # of a draw that a number of rows is tried with
_MAX_UNSAFE_ROWS = 64  # cuBLAS that differs above this and our rows is not used at all


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Row counts whose bits differ from those of :data:`REFERENCE_ROWS` rows through cuBLAS.

    Attributes:
        counts: the row counts tried, ascending.
        cublas_differs: those at which some row of cuBLAS's result differs.
        ours_differs: the same for our kernel, as far as it was tried.
        many_differs: the same for that for many rows, where it may serve.
    """

    counts: tuple[int, ...]
    cublas_differs: tuple[int, ...]
    ours_differs: tuple[int, ...]
    many_differs: tuple[int, ...] = ()


def sweep(
    weight: Tensor,
    bias: Tensor | None = None,
    counts: Sequence[int] = SWEEP_ROWS,
    ours_up_to: int = ALL_ROWS,
    has_gate: bool = False,
) -> SweepReport:
    """Compare every row of matmuls with ``counts`` rows with cuBLAS's for 512, bit by bit.

    Args:
        weight: ``[N, K]`` on a GPU. bias: ``[N]`` or None.
        counts: row counts. The inputs of rows beyond 512 repeat the first. All are tried with
            several draws of 512 rows, and a few of several parts of a draw.
        ours_up_to: the highest at which to try our kernel; each of its tiles is compiled once.
        has_gate: whether the weight is one of gate and up, which our kernel for many rows then
            joins here, too.

    Returns:
        The report. It holds for this card, these libraries, and the settings in force
        (:func:`.cublas.without_split_k`).
    """
    counts = sorted(set(counts))
    tried = [c for c in counts if c <= ours_up_to]

    def library(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias)

    return SweepReport(
        tuple(counts),
        differing_counts(library, library, weight, counts),
        differing_counts(lambda rows: _ours(rows, weight, bias), library, weight, tried),
        many_differs(weight, bias, has_gate),
    )


def differing_counts(
    matmul: Callable[[Tensor], Tensor],
    reference: Callable[[Tensor], Tensor],
    weight: Tensor,
    counts: Sequence[int],
) -> tuple[int, ...]:
    """The row counts, of ascending ``counts``, at which a row of ``matmul`` has other bits than
    ``reference`` gives it among 512; both multiply with ``weight``. Several draws of 512 rows are
    tried, the more the fewer outputs there are."""
    found: set[int] = set()
    num_draws = min(-(-_LEAST_RESULTS // (REFERENCE_ROWS * len(weight))), _MAX_DRAWS)
    for draw in range(num_draws if counts else 0):
        x = _rows_to_try(weight, counts[-1], draw)
        found.update(_differing(matmul, x, counts, reference(x[:REFERENCE_ROWS])))
    return tuple(sorted(found))


def many_differs(weight: Tensor, bias: Tensor | None, has_gate: bool) -> tuple[int, ...]:
    """Row counts at which our kernel for many rows differs in bits from cuBLAS's 512 rows and the
    activation after it; none where that kernel never serves."""
    by_arch = many_rows_kernel(weight, bias, has_gate)
    if by_arch is None:
        return ()
    matmul = by_arch.function("matmul")
    x = _rows_to_try(weight, MANY_ROWS)
    expected = F.linear(x[:REFERENCE_ROWS], weight)
    if has_gate:
        gate, up = expected.chunk(2, dim=-1)
        expected = fused.act_mul(gate, up, "silu")
    return _differing(lambda rows: matmul(rows, weight, has_gate), x, (MANY_ROWS,), expected)


def _rows_to_try(weight: Tensor, num_rows: int, draw: int = 0) -> Tensor:
    """At least ``num_rows`` and 512 random rows for ``weight``; those beyond 512 repeat them."""
    generator = torch.Generator(weight.device).manual_seed(draw)
    shape = (REFERENCE_ROWS, weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device, dtype=torch.float32)
    return x.to(weight.dtype).repeat(-(-num_rows // REFERENCE_ROWS), 1)


def _differing(
    matmul: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int], expected: Tensor
) -> tuple[int, ...]:
    """The counts c at which some row of a matmul with c rows of ``x`` has other bits than it has in
    ``expected``, that with the first 512. Of those below, up to four times c rows are tried."""
    bits = _bits(expected)

    def differs(count: int) -> Tensor:
        found = []
        for first in range(0, max(REFERENCE_ROWS - count, 0) + 1, count)[:_MAX_SLICES]:
            out = _bits(matmul(x[first : first + count]))
            for part in out.split(REFERENCE_ROWS):
                found.append((part != bits[first : first + len(part)]).any())
        return torch.stack(found).any()

    # One look at the device for all of them.
    found = torch.stack([differs(count) for count in counts]).tolist()
    return tuple(c for c, is_other in zip(counts, found, strict=True) if is_other)


def _bits(values: Tensor) -> Tensor:
    """As integers, so that NaN equals itself and 0 is not -0."""
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


def choose_plan(weight: Tensor, bias: Tensor | None = None, has_gate: bool = False) -> int:
    """The plan for weights of this shape, dtype and device, by :func:`sweep`: ``max_custom_rows``
    of :func:`.dispatch.linear`, :data:`ALL_ROWS` for our kernel alone.

    Tens of milliseconds and the compilation of the tiles that will be used; to be kept. Our kernel
    alone, without a look at cuBLAS, where it has one tile, that is one class of bits for all rows,
    and where the weight has few outputs. ``has_gate``: whether the weight is one of gate and up.

    Raises:
        UnsupportedModelError: our kernel would have to compute all rows, but its tiles differ.
    """
    num_outs, k_size = weight.shape
    if has_one_tile(k_size, weight.itemsize):
        return ALL_ROWS
    if num_outs < LEAST_OUTPUTS:
        _check_ours(weight, bias)
        return ALL_ROWS
    worth_it = max_custom_rows = rows_worth_it(weight, has_gate)
    while True:
        report = sweep(weight, bias, ours_up_to=max_custom_rows, has_gate=has_gate)
        found = plan_from(report, worth_it)
        if found == ALL_ROWS:
            _check_ours(weight, bias)
        if found in (max_custom_rows, ALL_ROWS):
            return found
        max_custom_rows = found  # so our kernel is to be tried further


def rows_worth_it(weight: Tensor, has_gate: bool) -> int:
    """:func:`.tiles.fastest_custom_rows` for ``weight [N, K]``, or ``[2 N, K]`` with a gate."""
    num_outs, k_size = weight.shape
    num_outs //= 2 if has_gate else 1
    return fastest_custom_rows(num_outs, k_size, has_gate, Gpu.of(weight.device))


def _check_ours(weight: Tensor, bias: Tensor | None) -> None:
    """Raise UnsupportedModelError unless our kernel's tiles agree among themselves."""

    def ours(rows: Tensor) -> Tensor:
        return _ours(rows, weight, bias)

    changed = differing_counts(ours, ours, weight, SWEEP_ROWS)
    if changed:
        raise UnsupportedModelError(
            f"matmuls with a weight of {list(weight.shape)}, {weight.dtype}: on this GPU neither "
            f"cuBLAS nor our kernel keeps a row's bits for all numbers of rows (ours differs from "
            f"its {REFERENCE_ROWS} rows at {list(changed)}); transparent=False does without"
        )


def plan_from(report: SweepReport, worth_it: int) -> int:
    """``max_custom_rows``, above which cuBLAS is of one class of bits, that of our kernel.

    ``worth_it``: the largest row count at which our kernel is faster.

    Row counts between two that were tried count as the lower one. If the last that differs is above
    64 and ``worth_it``, or our kernel differs wherever it would be used, it computes all rows; as
    well if that for many rows differs, which then serves none.
    """
    last_bad = max(report.cublas_differs, default=0)
    first_good = next((c for c in report.counts if c > last_bad), ALL_ROWS)
    max_custom_rows = max(worth_it, first_good - 1)
    has_two_classes = any(c <= max_custom_rows for c in report.ours_differs)
    if last_bad > max(worth_it, _MAX_UNSAFE_ROWS) or has_two_classes or report.many_differs:
        return ALL_ROWS
    return max_custom_rows
