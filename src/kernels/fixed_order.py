"""Matmuls with an explicit order of summation: the fallback of every CPU trial.

Each elementwise multiplication is rounded to float32. The K results of a sum are then added in
halves: the second half of the remaining ones to the first, until one is left. All operations are
elementwise, so the bits of a row depend only on that row and K. These matmuls read and write memory
K times as often as a library. They serve shapes for which no library call passes its trial.
"""

from __future__ import annotations

from torch import Tensor

# Elements of multiplication results held at once; 4 MiB.
_MOST_PRODUCTS = 1 << 20


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of ``[B, M, K]`` and ``[B, K, N]``, with any strides; summed in float32.

    Returns:
        ``[B, M, N]`` in the dtype of ``left``, rounded once.
    """
    (num_batch, num_rows, num_inputs), num_outputs = left.shape, right.shape[2]
    out = left.new_empty(num_batch, num_rows, num_outputs)
    if not num_inputs:
        return out.zero_()
    num_columns = max(1, min(num_outputs, _MOST_PRODUCTS // num_inputs))
    rows_at_once = max(1, _MOST_PRODUCTS // (num_inputs * num_columns))
    for rows, matrix, results in zip(left.float(), right, out, strict=True):
        for first in range(0, num_outputs, num_columns):
            columns = slice(first, first + num_columns)
            part = matrix[:, columns].float()
            for begin in range(0, num_rows, rows_at_once):
                some = slice(begin, begin + rows_at_once)
                results[some, columns] = _sums(rows[some].unsqueeze(2) * part)
    return out


def _sums(products: Tensor) -> Tensor:
    """``[M, N]`` from ``[M, K, N]``, which is overwritten."""
    size = products.shape[1]
    while size > 1:
        half = (size + 1) // 2
        products[:, : size - half] += products[:, half:size]
        size = half
    return products[:, 0]


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows [M, K]`` by ``weight [N, K]``; ``[M, N]``."""
    product: Tensor = bmm(rows.unsqueeze(0), weight.t().unsqueeze(0))[0]
    return product
