"""The custom ops of recurrent layers: ``pagespec::short_conv``, ``pagespec::delta_rule``,
``pagespec::ssd_scan`` (Mamba-2) and ``pagespec::selective_scan`` (Mamba-1).

Shapes: T tokens of B rows lie back to back; row b owns tokens ``[query_starts[b],
query_starts[b + 1])``, the j-th of its n at position ``context_lens[b] - n + j``. Tokens from
``query_starts[B]`` on are padding and yield zeros. Inputs may be strided.

What a layer remembers of a row lies in a *slot* of its ``states [num_slots + 1, ...]``, which are
contiguous; the last slot is the *null slot*, which means nothing. Positions are cut into intervals;
with ``table = state_tables[table_rows[b]]``, ``table[i]`` is the slot of row b for positions
``[i * interval, (i + 1) * interval)``. Before position p > 0 the state is that of slot
``table[(p - 1) // interval]``, unless the call computed position p - 1; before position 0 it is
zeros. After the last position that a call computes in interval i, the state is written to slot
``table[i]``. So a slot that differs from the next one keeps the state at the end of its interval: a
checkpoint.

All ops are batch-invariant and schedule transparent: the output of a token and the state after it
have the same bits however positions are cut into steps and whatever other rows do. On a GPU they
are Triton kernels, which are imported at the first call, elsewhere torch's operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_op import custom_op
from . import cpu
from .cpu import ACTIVATIONS as ACTIVATIONS
from .walk import StepRows


@custom_op(mutates=("states",), fake=lambda x, *_: x.new_empty(x.shape))
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_tables: Tensor,
    table_rows: Tensor,
    interval: int,
    activation: str,
) -> Tensor:
    """Causal depthwise convolution, over the last K positions.

    Args:
        x: ``[T, C]``. weight: ``[C, K]``. bias: ``[C]`` or None.
        states: ``[num_slots + 1, K - 1, C]`` in x's dtype: the last inputs.
        query_starts: int32 ``[B + 1]``. context_lens: int32 ``[B]``.
        state_tables: int32 ``[R, M]``, of R >= B rows. table_rows: int32 ``[B]``, the row of
            ``state_tables`` of each row. interval: positions per entry.
        activation: a key of ``ACTIVATIONS``, or "" for none.

    Returns:
        ``[T, C]`` in x's dtype.
    """
    if x.is_cuda:
        from .short_conv import short_conv as kernel
    else:
        kernel = cpu.short_conv
    rows = StepRows(query_starts, context_lens, state_tables, table_rows, interval)
    return kernel(x, weight, bias, states, rows, activation)


@custom_op(mutates=("states",), fake=lambda query, _key, value, *_: query.new_empty(value.shape))
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_tables: Tensor,
    table_rows: Tensor,
    interval: int,
    scale: float,
    l2norm: bool,
) -> Tensor:
    """The gated delta rule (Yang et al. 2024): S becomes ``a S + k (x) beta (v - k a S)``, read by
    ``scale * q S``.

    Args:
        query: ``[T, Hk, K]``. key: alike. value: ``[T, H, V]``, H a multiple of Hk: heads of values
            in succession share one of keys.
        decay: log a, ``[T, H]``, or ``[T, H, K]`` for one per channel (Kimi Linear).
        beta: ``[T, H]``.
        states: float32 ``[num_slots + 1, H, K, V]``; on a GPU, of decays ``[T, H]``, as
            :mod:`.spec` has it.
        query_starts, context_lens, state_tables, table_rows, interval: as of :func:`short_conv`.
        scale: factor on the queries. l2norm: whether queries and keys are normalised first.

    Returns:
        ``[T, H, V]`` in the queries' dtype.
    """
    kernel = cpu.delta_rule
    if query.is_cuda:
        from . import chunked, walked

        kernel = (walked if decay.dim() == 3 else chunked).delta_rule
    rows = StepRows(query_starts, context_lens, state_tables, table_rows, interval)
    return kernel(query, key, value, decay, beta, states, rows, scale, l2norm)


@custom_op(mutates=("states",), fake=lambda x, *_: x.new_empty(x.shape, dtype=torch.float32))
def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_tables: Tensor,
    table_rows: Tensor,
    interval: int,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """Mamba-2 (Dao and Gu 2024): S becomes ``exp(A dt) S + B (x) dt x``, read by ``C S + D x``.

    Args:
        x: ``[T, H, P]``. dt: ``[T, H]``. A: ``[H]``, negative.
        B: ``[T, G, N]``, H a multiple of G. C: alike. D: ``[H]`` or None.
        dt_bias: ``[H]`` or None, added to dt before softplus (if dt_softplus) and the limits.
        states: float32 ``[num_slots + 1, H, N, P]``; on a GPU as :mod:`.spec` has it.
        query_starts, context_lens, state_tables, table_rows, interval: as of :func:`short_conv`.

    Returns:
        float32 ``[T, H, P]``.
    """
    if x.is_cuda:
        from .chunked import ssd_scan as kernel
    else:
        kernel = cpu.ssd_scan
    rows = StepRows(query_starts, context_lens, state_tables, table_rows, interval)
    return kernel(x, dt, A, B, C, D, dt_bias, states, rows, dt_softplus, dt_min, dt_max)


def _selective_scan_fake(
    x: Tensor, _dt: Tensor, _A: Tensor, _B: Tensor, _C: Tensor, D: Tensor | None, z: Tensor | None,
    *_: object,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape, dtype=cpu.result_type(x, D, z))


@custom_op(mutates=("states",), fake=_selective_scan_fake)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_tables: Tensor,
    table_rows: Tensor,
    interval: int,
    dt_softplus: bool,
) -> Tensor:
    """Mamba-1 (Gu and Dao 2023): S becomes ``exp(A dt) * S + B (x) dt x``, read by
    ``(C S + D x) * silu(z)``.

    Args:
        x: ``[T, I]``. dt: alike. A: ``[I, N]``, negative. B: ``[T, N]``. C: alike.
        D: ``[I]`` or None. z: ``[T, I]`` or None.
        dt_bias: ``[I]`` or None, added to dt before softplus (if dt_softplus).
        states: float32 ``[num_slots + 1, N, I]``.
        query_starts, context_lens, state_tables, table_rows, interval: as of :func:`short_conv`.

    Returns:
        ``[T, I]``, in the dtype of ``(x + x * D) * z``.
    """
    if x.is_cuda:
        from .walked import selective_scan as kernel
    else:
        kernel = cpu.selective_scan
    rows = StepRows(query_starts, context_lens, state_tables, table_rows, interval)
    return kernel(x, dt, A, B, C, D, z, dt_bias, states, rows, dt_softplus)
