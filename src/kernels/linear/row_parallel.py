"""Linear layers whose results are parts of a sum over the ranks, with the norm behind them."""

from __future__ import annotations

from torch import Tensor

from ..collectives.communicator import Communicator
from ..fused.dispatch import NormForm
from .dispatch import few_rows_kernel, linear
from .matmul import supports_tma


class RowParallel:
    """Row-parallel linear layers of this rank (Shoeybi et al. 2019).

    Args:
        communicator: what sums their results.
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
        """``all_reduce_norm`` of :func:`.dispatch.linear`, with the same bits; of a few rows the
        matmul pushes what it computes to the other ranks itself.

        Args:
            x, weight, max_custom_rows: as of :func:`.dispatch.linear`.
            residual, norm_weight, eps, form: as of
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
                del out, result  # until then all was only compiled
        return self._communicator.all_reduce_norm(linear(x, weight, None, max_custom_rows), *norm)
