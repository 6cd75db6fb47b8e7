"""The custom ops of recurrent layers: ``pagespec::short_conv``, ``pagespec::delta_rule``,
``pagespec::ssd_scan`` (Mamba-2) and ``pagespec::selective_scan`` (Mamba-1).

Shapes: T tokens of B rows are back to back; row b owns tokens ``[query_starts[b],
query_starts[b + 1])``, the j-th of its n at position ``context_lens[b] - n + j``. Tokens from
``query_starts[B]`` on are padding and yield zeros. Inputs may be strided.

A layer's state of a row is stored in a *slot* of its contiguous ``states [num_slots + 1, ...]``.
The last slot is the *null slot*, whose contents have no meaning. Positions are divided into
intervals. With ``table = state_tables[table_rows[b]]``, ``table[i]`` is the slot of row b for
positions ``[i * interval, (i + 1) * interval)``. Before position p > 0 the state is that of slot
``table[(p - 1) // interval]``, unless the same call computed position p - 1. Before position 0 it
is zero. After the last position that a call computes in interval i, the state is written to slot
``table[i]``. So a slot that differs from the next one keeps the state at the end of its interval: a
checkpoint.

The last ``num_drafts[b]`` tokens of row b are draft tokens, which may be rejected. Their outputs
are computed like others. The states after them are not written, and no entry of the table is read
for them.

All ops are batch-invariant and schedule transparent: a token's output and the state after it have
the same bits however positions are divided into steps, and whatever the other rows are. On a GPU
the ops are Triton kernels, imported at the first call. Elsewhere they are torch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import DeltaInputs, ScanInputs, SsdInputs
from ..custom_op import custom_op
from . import cpu
from .cpu import ACTIVATIONS as ACTIVATIONS
from .walk import StepRows


@custom_op(mutates=("states",), fake=lambda x, *_: x.new_empty(x.shape))
def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StepRows, activation: str
) -> Tensor:
    """Causal depthwise convolution, over the last K positions.

    Args:
        x: ``[T, C]``. weight: ``[C, K]``. bias: ``[C]`` or None.
        states: ``[num_slots + 1, K - 1, C]`` in x's dtype: the last inputs.
        activation: a key of ``ACTIVATIONS``, or "" for none.

    Returns:
        ``[T, C]`` in x's dtype.
    """
    kernel = cpu.short_conv
    if x.is_cuda:
        from .short_conv import short_conv as kernel
    return kernel(x, weight, bias, states, rows, activation)


@custom_op(mutates=("states",), fake=lambda inputs, *_: inputs.query.new_empty(inputs.value.shape))
def delta_rule(
    inputs: DeltaInputs, states: Tensor, rows: StepRows, scale: float, l2norm: bool
) -> Tensor:
    """The gated delta rule (Yang et al. 2024): S becomes ``a S + k (x) beta (v - k a S)``, read by
    ``scale * q S``.

    Args:
        states: float32 ``[num_slots + 1, H, K, V]``. On a GPU, with decays ``[T, H]``, see
            :mod:`.recurrent_spec`.
        scale: factor on the queries. l2norm: whether queries and keys are normalised first.

    Returns:
        ``[T, H, V]`` in the queries' dtype.
    """
    kernel = cpu.delta_rule
    if inputs.query.is_cuda:
        from . import chunked, walked

        kernel = (walked if inputs.decay.dim() == 3 else chunked).delta_rule
    return kernel(inputs, states, rows, scale, l2norm)


@custom_op(
    mutates=("states",),
    fake=lambda inputs, *_: inputs.x.new_empty(inputs.x.shape, dtype=torch.float32),
)
def ssd_scan(
    inputs: SsdInputs,
    states: Tensor,
    rows: StepRows,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """Mamba-2 (Dao and Gu 2024): S becomes ``exp(A dt) S + B (x) dt x``, read by ``C S + D x``.

    Args:
        states: float32 ``[num_slots + 1, H, N, P]``. On a GPU see :mod:`.recurrent_spec`.
        dt_softplus: whether softplus is applied to dt before its limits.

    Returns:
        float32 ``[T, H, P]``.
    """
    kernel = cpu.ssd_scan
    if inputs.x.is_cuda:
        from .chunked import ssd_scan as kernel
    return kernel(inputs, states, rows, dt_softplus, dt_min, dt_max)


@custom_op(
    mutates=("states",),
    fake=lambda inputs, *_: inputs.x.new_empty(inputs.x.shape, dtype=cpu.result_type(inputs)),
)
def selective_scan(inputs: ScanInputs, states: Tensor, rows: StepRows, dt_softplus: bool) -> Tensor:
    """Mamba-1 (Gu and Dao 2023): S becomes ``exp(A dt) * S + B (x) dt x``, read by
    ``(C S + D x) * silu(z)``.

    Args:
        states: float32 ``[num_slots + 1, N, I]``.
        dt_softplus: whether softplus is applied to dt.

    Returns:
        ``[T, I]``, in the dtype of ``(x + x * D) * z``.
    """
    kernel = cpu.selective_scan
    if inputs.x.is_cuda:
        from .walked import selective_scan as kernel
    return kernel(inputs, states, rows, dt_softplus)
