"""Choose, per weight shape, the largest row count at which the own matmul kernels replace cuBLAS.

The choice compares bits on this GPU: see :func:`sweep`. Two orders of summation differ in the last
bits of a float32 sum. After rounding to 16 bits, one result in thousands or fewer differs. So some
hundred thousand results are compared for each number of rows above 16; up to 16 rows the own
kernels compute in any case. A weight of few outputs, for which the comparison would take long and
cuBLAS gains little, uses the own kernels for all row counts.
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
MANY_ROWS = 1023  # the last tile is not full
LEAST_OUTPUTS = 64  # of a weight that cuBLAS may multiply with
_LEAST_RESULTS = 1 << 20  # of a sweep's draws of 512 rows
_MAX_DRAWS = 16
_MAX_SLICES = 4  # of a draw that a number of rows is tested with
_MAX_UNSAFE_ROWS = 64  # if cuBLAS still differs above this, it is not used


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Row counts whose bits differ from those of cuBLAS with :data:`REFERENCE_ROWS` rows.

    Attributes:
        counts: the row counts tested, ascending.
        cublas_differs: counts at which some row of cuBLAS's result differs.
        ours_differs: the same for the own kernel, as far as it was tested.
        many_differs: the same for the kernel for many rows, where it may be used.
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
    """Compare every row of matmuls with ``counts`` rows to cuBLAS's result for 512 rows, bit by
    bit.

    Args:
        weight: ``[N, K]`` on a GPU. bias: ``[N]`` or None.
        counts: row counts. The inputs of rows beyond 512 repeat the first ones. All counts are
            tested with several draws of 512 rows, and small ones with several parts of a draw.
        ours_up_to: the highest count at which to test the own kernel. Each of its tiles is compiled
            once.
        has_gate: whether the weight contains gate and up. Then the kernel for many rows is tested
            with the fused activation.

    Returns:
        The report. It holds for this GPU, these libraries, and the settings in effect
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
    ``reference`` computes for it among 512 rows; both multiply with ``weight``. Several draws of
    512 rows are tested, more of them the fewer outputs there are."""
    found: set[int] = set()
    num_draws = min(-(-_LEAST_RESULTS // (REFERENCE_ROWS * len(weight))), _MAX_DRAWS)
    for draw in range(num_draws if counts else 0):
        x = _rows_to_try(weight, counts[-1], draw)
        found.update(_differing(matmul, x, counts, reference(x[:REFERENCE_ROWS])))
    return tuple(sorted(found))


def many_differs(weight: Tensor, bias: Tensor | None, has_gate: bool) -> tuple[int, ...]:
    """Row counts at which the own kernel for many rows differs in bits from cuBLAS with 512 rows
    and the activation after it; empty if that kernel is never used."""
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
    """At least ``num_rows`` and 512 random rows for ``weight``; rows beyond 512 repeat them."""
    generator = torch.Generator(weight.device).manual_seed(draw)
    shape = (REFERENCE_ROWS, weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device, dtype=torch.float32)
    return x.to(weight.dtype).repeat(-(-num_rows // REFERENCE_ROWS), 1)


def _differing(
    matmul: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int], expected: Tensor
) -> tuple[int, ...]:
    """The counts c at which some row of a matmul with c rows of ``x`` has other bits than in
    ``expected``, the matmul with the first 512. For counts below 512, up to four times c rows are
    tested."""
    bits = _bits(expected)

    def differs(count: int) -> Tensor:
        found = []
        for first in range(0, max(REFERENCE_ROWS - count, 0) + 1, count)[:_MAX_SLICES]:
            out = _bits(matmul(x[first : first + count]))
            for part in out.split(REFERENCE_ROWS):
                found.append((part != bits[first : first + len(part)]).any())
        return torch.stack(found).any()

    # One synchronisation with the device for all counts.
    found = torch.stack([differs(count) for count in counts]).tolist()
    return tuple(c for c, is_other in zip(counts, found, strict=True) if is_other)


def _bits(values: Tensor) -> Tensor:
    """The bits as integers, so that NaN equals itself and 0 differs from -0."""
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


def choose_plan(weight: Tensor, bias: Tensor | None = None, has_gate: bool = False) -> int:
    """The plan for weights of this shape, dtype and device, by :func:`sweep`: ``max_custom_rows``
    of :func:`.dispatch.linear`, or :data:`ALL_ROWS` for the own kernel alone.

    Costs tens of milliseconds and the compilation of the tiles to be used, so results should be
    kept. The own kernel is used alone, without testing cuBLAS, if the weight has few outputs, or if
    the kernel has one tile, which gives one class of bits for all rows. ``has_gate``: whether the
    weight contains gate and up.

    Raises:
        UnsupportedModelError: the own kernel would have to compute all rows, but its tiles differ.
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
        max_custom_rows = found  # so the own kernel is to be tested further


def rows_worth_it(weight: Tensor, has_gate: bool) -> int:
    """:func:`.tiles.fastest_custom_rows` for ``weight [N, K]``, or ``[2 N, K]`` with a gate."""
    num_outs, k_size = weight.shape
    num_outs //= 2 if has_gate else 1
    return fastest_custom_rows(num_outs, k_size, has_gate, Gpu.of(weight.device))


def _check_ours(weight: Tensor, bias: Tensor | None) -> None:
    """Raise UnsupportedModelError if the own kernel's tiles differ in their bits."""

    def ours(rows: Tensor) -> Tensor:
        return _ours(rows, weight, bias)

    changed = differing_counts(ours, ours, weight, SWEEP_ROWS)
    if changed:
        raise UnsupportedModelError(
            f"matmuls with a weight of {list(weight.shape)}, {weight.dtype}: on this GPU neither "
            f"cuBLAS nor pagespec's kernel keeps a row's bits for all numbers of rows (the kernel "
            f"differs from its {REFERENCE_ROWS} rows at {list(changed)}); "
            "transparent=False does not require this"
        )


def plan_from(report: SweepReport, worth_it: int) -> int:
    """Choose ``max_custom_rows``: above it, cuBLAS has the class of bits of the own kernel.

    ``worth_it``: the largest row count at which the own kernel is faster.

    Row counts between two tested ones count as the lower one. The own kernel computes all rows in
    three cases: cuBLAS differs at a count above both 64 and ``worth_it``, the own kernel differs
    at a count at which it would be used, or the kernel for many rows differs. The latter then
    serves no rows.
    """
    last_bad = max(report.cublas_differs, default=0)
    first_good = next((c for c in report.counts if c > last_bad), ALL_ROWS)
    max_custom_rows = max(worth_it, first_good - 1)
    has_two_classes = any(c <= max_custom_rows for c in report.ours_differs)
    if last_bad > max(worth_it, _MAX_UNSAFE_ROWS) or has_two_classes or report.many_differs:
        return ALL_ROWS
    return max_custom_rows
