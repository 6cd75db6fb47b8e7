"""Linear layers on a GPU: own kernels for few rows, cuBLAS or own kernels for many, with equal
bits.

cuBLAS selects another algorithm, and with it another order of summation, as the number of rows
changes. Without split-K it uses the plain order from some number of rows up. The own kernels use
the same order: :mod:`.sm90.matmul_sm90` on Hopper, where it has a tile, and :mod:`.matmul`
elsewhere. Up to 16, 64 or 256 rows they are also faster. So each shape needs one value,
``max_custom_rows``: up to it the own kernels compute, above it cuBLAS. :func:`.plan.choose_plan`
finds it on this GPU by comparing bits. Above it :mod:`.sm90.matmul_sm90_many` replaces cuBLAS where
it is faster, which depends on the number of rows (:mod:`.tiles`) and changes no bits. Where equal
bits of all tiles are not established (float32, rows that are not whole 16-byte units), the Triton
kernel computes all rows with one tile. A norm before a matmul of a few rows may be fused with it
(:func:`.matmul_sm90.norm_matmul`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arch import Implementation
from ..collectives.communicator import Communicator
from ..device import Gpu
from ..fused import dispatch as fused
from ..fused.dispatch import NormForm
from ..jit.parallel_build import may_skip_launches
from ..registry import registry
from .matmul import matmul, supports_tma
from .tiles import choose_tile

MAX_FEW_ROWS = 16  # on an H100 the own kernels beat cuBLAS at least up to here on every shape tried
ALL_ROWS = 1 << 30


def _ours(
    x: Tensor, weight: Tensor, bias: Tensor | None, has_gate: bool = False, prefetches: bool = True
) -> Tensor:
    """Multiply by an own kernel; leading dims as those of x. ``prefetches``: whether the kernel may
    read the weight before the previous kernel has ended."""
    rows = x.reshape(-1, x.shape[-1])
    few = None
    if prefetches and bias is None and x.dtype == weight.dtype and supports_tma(rows):
        few = few_rows_kernel(weight, len(rows), has_gate)
    if few is not None:
        by_arch, few_tile = few
        out = by_arch.function("matmul")(rows, weight, tile=few_tile, has_gate=has_gate)
    else:
        shape = _matmul_shape(weight, has_gate)
        tile = choose_tile(len(rows), *shape, x.itemsize, has_gate, Gpu.of(x.device))
        out = matmul(rows, weight, bias, tile=tile, has_gate=has_gate)
    return out.view(*x.shape[:-1], out.shape[1])


def _matmul_shape(weight: Tensor, has_gate: bool) -> tuple[int, int]:
    """(N, K) of a matmul; a weight of gate and up has 2 N rows."""
    return len(weight) // (2 if has_gate else 1), weight.shape[1]


def few_rows_kernel(
    weight: Tensor, num_rows: int, has_gate: bool
) -> tuple[Implementation, Any] | None:
    """This architecture's kernel for ``num_rows`` rows, and its tile; None selects the Triton
    kernel."""
    if weight.dtype != torch.bfloat16 or not supports_tma(weight):
        return None
    card = Gpu.of(weight.device)
    found = registry().find("few_rows_matmul", "bfloat16", card.arch)
    if found is None:
        return None
    shape = _matmul_shape(weight, has_gate)
    tile = found.function("choose_tile")(num_rows, *shape, has_gate, card)
    return None if tile is None else (found, tile)


def many_rows_kernel(weight: Tensor, bias: Tensor | None, has_gate: bool) -> Implementation | None:
    """The kernel that may replace cuBLAS for some row counts, or None."""
    if bias is not None or weight.dtype != torch.bfloat16 or not _has_tma_rows(weight):
        return None
    found = registry().find("many_rows_matmul", "bfloat16", Gpu.of(weight.device).arch)
    shape = _matmul_shape(weight, has_gate)
    return found if found is not None and found.function("serves")(*shape, has_gate) else None


def _has_tma_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and supports_tma(matrix)


def _multiply_many(x: Tensor, weight: Tensor, bias: Tensor | None, has_gate: bool) -> Tensor | None:
    """Multiply by the kernel for many rows; None if cuBLAS is to multiply."""
    if x.numel() == 0 or x.dtype != weight.dtype:
        return None
    by_arch = many_rows_kernel(weight, bias, has_gate)
    if by_arch is None:
        return None
    num_rows, shape = x.numel() // x.shape[-1], _matmul_shape(weight, has_gate)
    # During compilation for later steps with other row counts, compile both kernels.
    wants_both = may_skip_launches()
    is_quicker = by_arch.function("is_quicker")
    if not wants_both and not is_quicker(num_rows, *shape, has_gate, Gpu.of(weight.device)):
        return None
    rows = x.reshape(num_rows, -1)
    if not _has_tma_rows(rows):
        return None
    out: Tensor = by_arch.function("matmul")(rows, weight, has_gate)
    return None if wants_both else out.view(*x.shape[:-1], shape[0])


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, max_custom_rows: int, has_gate: bool
) -> Tensor:
    if 0 < x.numel() <= max_custom_rows * x.shape[-1]:
        return _ours(x, weight, bias, has_gate)
    out = _multiply_many(x, weight, bias, has_gate)
    if out is not None:
        return out
    out = F.linear(x, weight, bias)
    if not has_gate:
        return out
    gate, up = out.chunk(2, dim=-1)
    return fused.act_mul(gate, up, "silu")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, max_custom_rows: int = MAX_FEW_ROWS
) -> Tensor:
    """``F.linear(x, weight, bias)``.

    Args:
        x: ``[..., K]`` on a GPU. bias: ``[N]`` or None.
        weight: ``[N, K]``, a parameter: it may be read before earlier kernels have ended.
        max_custom_rows: the largest row count for the kernels for few rows, from
            :func:`.plan.choose_plan`.

    Returns:
        ``[..., N]``.
    """
    return _multiply(x, weight, bias, max_custom_rows, has_gate=False)


def left_matmul(weight: Tensor, columns: Tensor, max_custom_rows: int = MAX_FEW_ROWS) -> Tensor:
    """``weight @ columns`` in the summation order of :func:`linear`, whatever the number of
    columns.

    Args:
        weight: ``[N, K]``, a parameter. columns: ``[..., K, T]``.
        max_custom_rows: see :func:`linear`; counts columns.

    Returns:
        ``[..., N, T]``, contiguous.
    """
    return linear(columns.mT, weight, None, max_custom_rows).mT.contiguous()


def linear_silu_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, max_custom_rows: int = MAX_FEW_ROWS
) -> Tensor:
    """``silu(gate) * up`` of ``F.linear(x, weight, bias)``, whose halves are gate and up.

    Args:
        x: ``[..., K]``. weight: ``[2 N, K]``, a parameter. bias: ``[2 N]`` or None.
        max_custom_rows: see :func:`linear`.

    Returns:
        ``[..., N]``.
    """
    return _multiply(x, weight, bias, max_custom_rows, has_gate=True)


def has_joined_norm(weight: Tensor, has_gate: bool) -> bool:
    """Whether :func:`norm_linear` uses a single launch for this weight, given few rows."""
    return _kernel_with_norm(weight, 1, has_gate) is not None


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    form: fused.NormForm,
    weight: Tensor,
    max_custom_rows: int,
    has_gate: bool,
) -> tuple[Tensor, Tensor]:
    """The matmul of ``add_rms_norm``'s first result, and its second result; for few rows one
    launch.

    Args:
        x, residual, norm_weight, eps, form: see :func:`.dispatch.add_rms_norm`.
        weight, max_custom_rows: see :func:`linear`; with ``has_gate``, see :func:`linear_silu_mul`.

    Returns:
        ``[..., N]``, and ``residual + x``.
    """
    num_rows = x.numel() // x.shape[-1]
    if 0 < num_rows <= max_custom_rows and x.is_contiguous() and residual.is_contiguous():
        joined = _kernel_with_norm(weight, num_rows, has_gate)
        if joined is not None:
            by_arch, tile = joined
            out, hidden = by_arch.function("matmul")(
                x.view(num_rows, -1), residual.view(num_rows, -1), norm_weight, eps, form, weight,
                tile=tile, has_gate=has_gate,
            )  # fmt: skip
            return out.view(*x.shape[:-1], out.shape[1]), hidden.view(x.shape)
    normed, hidden = fused.add_rms_norm(x, residual, norm_weight, eps, form)
    return _multiply(normed, weight, None, max_custom_rows, has_gate), hidden


def _kernel_with_norm(
    weight: Tensor, num_rows: int, has_gate: bool
) -> tuple[Implementation, Any] | None:
    """The kernel that also computes the norm of ``num_rows`` rows, and its tile, if any."""
    few = few_rows_kernel(weight, num_rows, has_gate)
    found = registry().find("norm_matmul", "bfloat16", Gpu.of(weight.device).arch)
    if few is None or found is None:
        return None
    serves = found.function("serves")(num_rows, weight.shape[1], few[1], has_gate)
    return (found, few[1]) if serves else None


class RowParallel:
    """Row-parallel linear layers of this rank (Shoeybi et al. 2019), with the all-reduce of their
    results and the norm after it.

    Args:
        communicator: sums the results over the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def linear_norm(
        self,
        x: Tensor,
        weight: Tensor,
        max_custom_rows: int,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        form: NormForm,
    ) -> tuple[Tensor, Tensor]:
        """``all_reduce_norm`` of :func:`linear`, with the same bits. With few rows the matmul
        itself pushes its results to the other ranks.

        Args:
            x, weight, max_custom_rows: see :func:`linear`.
            residual, norm_weight, eps, form: see
                :meth:`..collectives.communicator.Communicator.all_reduce_norm`.
        """
        norm = residual, norm_weight, eps, form
        num_rows = x.numel() // x.shape[-1]
        if 0 < num_rows <= max_custom_rows and x.dtype == weight.dtype:
            target = self._communicator.push_target(num_rows, len(weight), x.dtype)
            few = None if target is None else few_rows_kernel(weight, num_rows, has_gate=False)
            rows = x.reshape(num_rows, -1)
            if target is not None and few is not None and supports_tma(rows):
                by_arch, tile = few
                out = by_arch.function("matmul")(rows, weight, tile=tile, target=target)
                result = target.all_reduce_norm(out.view(*x.shape[:-1], -1), *norm)
                if target.is_connected:
                    return result
                del out, result  # so far the calls only compiled
        return self._communicator.all_reduce_norm(linear(x, weight, None, max_custom_rows), *norm)
