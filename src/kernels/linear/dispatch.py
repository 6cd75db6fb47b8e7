"""Linear layers on a GPU: our kernels for few rows, cuBLAS for many, the same bits from all.

cuBLAS picks another algorithm, and with it another order of summation, as the number of rows
changes. Where it may not split K it keeps to the plain order from some number of rows up, which is
the order of our two kernels: :mod:`.matmul_sm90` up to 16 rows, on Hopper, and
:mod:`.matmul` for more and elsewhere. Up to 16, 64 or 256 rows they are
faster, too. So a shape needs one number, its *few rows*: up to it ours, above it cuBLAS.
:func:`choose_plan` finds that number on the card at hand, by comparing bits. Where the bits of our
tiles are not known to agree (float32, rows that are not whole 16-byte units), the Triton kernel
computes all rows, with one tile. A norm before a product of a few rows may join it
(:mod:`.norm_matmul_sm90`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UnsupportedModelError
from ..fused import dispatch as fused
from .matmul import can_describe, matmul
from .tiles import Card, EarlyTile, choose_early_tile, choose_tile, has_one_tile, rows_worth_it

MAX_FEW_ROWS = 16  # on an H100 our kernel beats cuBLAS up to here on every shape tried, or further
ALL_ROWS = 1 << 30
SWEEP_ROWS = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024)
REFERENCE_ROWS = 512

_MAX_UNSAFE_ROWS = 64  # where cuBLAS differs above what is ours and this, it is not used at all


def _ours(x: Tensor, weight: Tensor, bias: Tensor | None, has_gate: bool = False) -> Tensor:
    """One of our kernels; leading dims as x has them."""
    rows = x.reshape(-1, x.shape[-1])
    early = None
    if bias is None and x.dtype == weight.dtype and can_describe(rows):
        early = _early_tile(weight, len(rows), has_gate)
    if early is not None:
        # Gluon is not in every Triton; the card says whether it is.
        from . import matmul_sm90

        out = matmul_sm90.matmul(rows, weight, tile=early, has_gate=has_gate)
    else:
        shape = _product_shape(weight, has_gate)
        tile = choose_tile(len(rows), *shape, x.itemsize, has_gate, Card.of(x.device))
        out = matmul(rows, weight, bias, tile=tile, has_gate=has_gate)
    return out.view(*x.shape[:-1], out.shape[1])


def _product_shape(weight: Tensor, has_gate: bool) -> tuple[int, int]:
    """(N, K) of a product; a weight of gate and up has 2 N rows."""
    return len(weight) // (2 if has_gate else 1), weight.shape[1]


def _early_tile(weight: Tensor, num_rows: int, has_gate: bool) -> EarlyTile | None:
    """The tile for ``num_rows`` of the kernel in Gluon; None where that does not serve."""
    if weight.dtype != torch.bfloat16 or not can_describe(weight):
        return None
    shape = _product_shape(weight, has_gate)
    return choose_early_tile(num_rows, *shape, has_gate, Card.of(weight.device))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, few_rows: int = MAX_FEW_ROWS
) -> Tensor:
    """``F.linear(x, weight, bias)``.

    Args:
        x: ``[..., K]`` on a GPU. weight: ``[N, K]``, a parameter: it may be read before the
            kernels queued before have ended. bias: ``[N]`` or None.
        few_rows: up to how many rows our kernel computes, from a :class:`Plan`.

    Returns:
        ``[..., N]``.
    """
    if 0 < x.numel() <= few_rows * x.shape[-1]:
        return _ours(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_silu_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, few_rows: int = MAX_FEW_ROWS
) -> Tensor:
    """``silu(gate) * up`` of ``F.linear(x, weight, bias)``, gate and up being its halves.

    Args:
        x: ``[..., K]``. weight: ``[2 N, K]``, a parameter. bias: ``[2 N]`` or None.
        few_rows: as of :func:`linear`.

    Returns:
        ``[..., N]``.
    """
    if 0 < x.numel() <= few_rows * x.shape[-1]:
        return _ours(x, weight, bias, has_gate=True)
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return fused.act_mul(gate, up, "silu")


def has_joined_norm(weight: Tensor, has_gate: bool) -> bool:
    """Whether :func:`norm_linear` has one launch for this weight, given few rows."""
    return _tile_with_norm(weight, 1, has_gate) is not None


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    form: fused.NormForm,
    weight: Tensor,
    few_rows: int,
    has_gate: bool,
) -> tuple[Tensor, Tensor]:
    """The product of ``add_rms_norm``'s first result, and its second; for few rows one launch.

    Args:
        x, residual, norm_weight, eps, form: as of :func:`.dispatch.add_rms_norm`.
        weight, few_rows: as of :func:`linear`, or of :func:`linear_silu_mul` if ``has_gate``.

    Returns:
        ``[..., N]``, and ``residual + x``.
    """
    num_rows = x.numel() // x.shape[-1]
    if 0 < num_rows <= few_rows and x.is_contiguous() and residual.is_contiguous():
        tile = _tile_with_norm(weight, num_rows, has_gate)
        if tile is not None:
            from . import norm_matmul_sm90

            out, hidden = norm_matmul_sm90.matmul(
                x.view(num_rows, -1), residual.view(num_rows, -1), norm_weight, eps, form, weight,
                tile=tile, has_gate=has_gate,
            )  # fmt: skip
            return out.view(*x.shape[:-1], out.shape[1]), hidden.view(x.shape)
    normed, hidden = fused.add_rms_norm(x, residual, norm_weight, eps, form)
    product = linear_silu_mul if has_gate else linear
    return product(normed, weight, None, few_rows), hidden


def _tile_with_norm(weight: Tensor, num_rows: int, has_gate: bool) -> EarlyTile | None:
    """The tile for ``num_rows`` where one launch computes the norm, too; else None."""
    tile = _early_tile(weight, num_rows, has_gate)
    if tile is None:
        return None
    from . import norm_matmul_sm90

    has_few = 0 < num_rows <= norm_matmul_sm90.MAX_ROWS
    return tile if has_few and norm_matmul_sm90.fits(weight.shape[1], tile, has_gate) else None


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Which row counts gave other bits than :data:`REFERENCE_ROWS` rows through cuBLAS did.

    Attributes:
        counts: the row counts tried, ascending.
        cublas_differs: those at which some row of cuBLAS's result differs.
        ours_differs: the same for our kernel, as far as it was tried.
    """

    counts: tuple[int, ...]
    cublas_differs: tuple[int, ...]
    ours_differs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who computes a shape. ``few_rows`` is what the functions above take.

    Attributes:
        num_outs, k_size: of the weight.
        few_rows: up to how many rows our kernel computes; :data:`ALL_ROWS` for all.
    """

    num_outs: int
    k_size: int
    few_rows: int


def sweep(
    weight: Tensor,
    bias: Tensor | None = None,
    counts: Sequence[int] = SWEEP_ROWS,
    ours_up_to: int = ALL_ROWS,
) -> SweepReport:
    """Compare every row of products with ``counts`` rows with cuBLAS's for 512, bit by bit.

    Args:
        weight: ``[N, K]`` on a GPU. bias: ``[N]`` or None.
        counts: row counts. The inputs of rows beyond 512 repeat the first.
        ours_up_to: the highest at which to try our kernel; each of its tiles is compiled once.

    Returns:
        The report. It holds for this card, these libraries, and the settings in force
        (:func:`.cublas.pinned_algorithms`).
    """
    counts = sorted(set(counts))
    x = _rows_to_try(weight, counts[-1])
    expected = F.linear(x[:REFERENCE_ROWS], weight, bias)
    tried = [c for c in counts if c <= ours_up_to]
    return SweepReport(
        tuple(counts),
        _differing(lambda rows: F.linear(rows, weight, bias), x, counts, expected),
        _differing(lambda rows: _ours(rows, weight, bias), x, tried, expected),
    )


def _rows_to_try(weight: Tensor, num_rows: int) -> Tensor:
    """At least ``num_rows`` and 512 random rows for ``weight``; those beyond 512 repeat them."""
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (REFERENCE_ROWS, weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device, dtype=torch.float32)
    return x.to(weight.dtype).repeat(-(-num_rows // REFERENCE_ROWS), 1)


def _differing(
    product: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int], expected: Tensor
) -> tuple[int, ...]:
    """The counts c at which some row of ``product(x[:c])`` has other bits than in ``expected``."""

    def differs(out: Tensor) -> bool:
        return any(
            not torch.equal(_bits(part), _bits(expected[: len(part)]))
            for part in out.split(REFERENCE_ROWS)
        )

    return tuple(c for c in counts if differs(product(x[:c])))


def _bits(values: Tensor) -> Tensor:
    """As integers, so that NaN equals itself and 0 is not -0."""
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


def choose_plan(weight: Tensor, bias: Tensor | None = None) -> Plan:
    """The plan for weights of this shape, dtype and device, by :func:`sweep`.

    Some milliseconds and the compilation of the tiles that will be used; to be kept. Our kernel
    alone, without a look at cuBLAS, where it has one tile: that is one class of bits for all rows.

    Raises:
        UnsupportedModelError: our kernel would have to compute all rows, but its tiles differ.
    """
    num_outs, k_size = weight.shape
    if has_one_tile(k_size, weight.itemsize):
        return Plan(num_outs, k_size, ALL_ROWS)
    worth_it = few_rows = rows_worth_it(num_outs, k_size, Card.of(weight.device))
    while True:
        plan = plan_from(sweep(weight, bias, ours_up_to=few_rows), num_outs, k_size, worth_it)
        if plan.few_rows == ALL_ROWS:
            _check_ours(weight, bias)
        if plan.few_rows in (few_rows, ALL_ROWS):
            return plan
        few_rows = plan.few_rows  # so our kernel is to be tried further


def _check_ours(weight: Tensor, bias: Tensor | None) -> None:
    """Raise UnsupportedModelError unless our kernel's tiles agree among themselves."""
    x = _rows_to_try(weight, SWEEP_ROWS[-1])
    expected = _ours(x[:REFERENCE_ROWS], weight, bias)
    changed = _differing(lambda rows: _ours(rows, weight, bias), x, SWEEP_ROWS, expected)
    if changed:
        raise UnsupportedModelError(
            f"products with a weight of {list(weight.shape)}, {weight.dtype}: on this GPU neither "
            f"cuBLAS nor our kernel keeps a row's bits for all numbers of rows (ours differs from "
            f"its {REFERENCE_ROWS} rows at {list(changed)}); transparent=False does without"
        )


def plan_from(report: SweepReport, num_outs: int, k_size: int, worth_it: int) -> Plan:
    """cuBLAS from where it is known to be of one class, and of the same class as our kernel.

    ``worth_it``: up to how many rows our kernel is wanted for its speed.

    Row counts between two that were tried count as the lower one. If the last that differs is above
    64 and ``worth_it``, or our kernel differs wherever it would be used, it computes all rows.
    """
    last_bad = max(report.cublas_differs, default=0)
    first_good = next((c for c in report.counts if c > last_bad), ALL_ROWS)
    few_rows = max(worth_it, first_good - 1)
    has_two_classes = any(c <= few_rows for c in report.ours_differs)
    if last_bad > max(worth_it, _MAX_UNSAFE_ROWS) or has_two_classes:
        few_rows = ALL_ROWS
    return Plan(num_outs, k_size, few_rows)
