"""The custom ops of recurrent layers: ``pagespec::short_conv``, ``pagespec::delta_rule``,
``pagespec::ssd_scan`` (Mamba-2) and ``pagespec::selective_scan`` (Mamba-1).

Shapes: T tokens of B rows lie back to back; row b owns tokens ``[query_starts[b],
query_starts[b + 1])``, the j-th of its n at position ``context_lens[b] - n + j``. Tokens from
``query_starts[B]`` on are padding and yield zeros. Inputs may be strided.

What a layer remembers of a row lies in a *slot* of its ``states [num_slots + 1, ...]``, which are
contiguous; the last slot is the *null slot*, which means nothing. Positions are cut into intervals;
``state_tables[b, i]`` is the slot of row b for positions ``[i * interval, (i + 1) * interval)``.
Before position p > 0 the state is that of slot ``state_tables[b, (p - 1) // interval]``, unless the
call computed position p - 1; before position 0 it is zeros. After the last position that a call
computes in interval i, the state is written to slot ``state_tables[b, i]``. So a slot that differs
from the next one keeps the state at the end of its interval: a checkpoint.

All ops are batch-invariant and schedule transparent: the output of a token and the state after it
have the same bits however positions are cut into steps and whatever other rows do. On a GPU they
are Triton kernels, elsewhere torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cpu_linear_state, cpu_selective_scan, cpu_short_conv
from .cpu_short_conv import ACTIVATIONS as ACTIVATIONS
from .walk import StepRows

# As in kernels/ops.py; a fragment, as the namespace is theirs.
_LIBRARY = torch.library.Library("pagespec", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_KEY = "CompositeExplicitAutograd"

_ROWS = "Tensor query_starts, Tensor context_lens, Tensor state_tables, int interval"
_LIBRARY.define(
    "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) states, "
    f"{_ROWS}, str activation) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, "
    f"Tensor(a!) states, {_ROWS}, float scale, bool l2norm) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "ssd_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, "
    f"Tensor(a!) states, {_ROWS}, bool dt_softplus, float dt_min, float dt_max) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    f"Tensor? dt_bias, Tensor(a!) states, {_ROWS}, bool dt_softplus) -> Tensor",
    tags=_TAGS,
)


def _bundled(function: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """``function`` for arguments of which four, from ``place`` on, are :class:`.walk.StepRows`."""

    def call(*arguments: Any) -> Tensor:
        rows = StepRows(*arguments[place : place + 4])
        return function(*arguments[:place], rows, *arguments[place + 4 :])

    return call


_LIBRARY.impl("short_conv", _bundled(cpu_short_conv.short_conv, 4), _KEY)
_LIBRARY.impl("delta_rule", _bundled(cpu_linear_state.delta_rule, 6), _KEY)
_LIBRARY.impl("ssd_scan", _bundled(cpu_linear_state.ssd_scan, 8), _KEY)
_LIBRARY.impl("selective_scan", _bundled(cpu_selective_scan.selective_scan, 9), _KEY)


# Triton is only there on machines with a GPU, so its modules are imported at the first call.
def _short_conv_cuda(*arguments: Any) -> Tensor:
    from .short_conv import short_conv as kernel

    return _bundled(kernel, 4)(*arguments)


def _delta_rule_cuda(*arguments: Any) -> Tensor:
    from . import chunked, walked_delta_rule

    has_channels = arguments[3].dim() == 3
    kernel = walked_delta_rule.delta_rule if has_channels else chunked.delta_rule
    return _bundled(kernel, 6)(*arguments)


def _ssd_scan_cuda(*arguments: Any) -> Tensor:
    from .chunked import ssd_scan as kernel

    return _bundled(kernel, 8)(*arguments)


def _selective_scan_cuda(*arguments: Any) -> Tensor:
    from .selective_scan import selective_scan as kernel

    return _bundled(kernel, 9)(*arguments)


_LIBRARY.impl("short_conv", _short_conv_cuda, "CUDA")
_LIBRARY.impl("delta_rule", _delta_rule_cuda, "CUDA")
_LIBRARY.impl("ssd_scan", _ssd_scan_cuda, "CUDA")
_LIBRARY.impl("selective_scan", _selective_scan_cuda, "CUDA")


@torch.library.register_fake("pagespec::short_conv", lib=_LIBRARY)
def _short_conv_fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("pagespec::delta_rule", lib=_LIBRARY)
def _delta_rule_fake(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(value.shape)


@torch.library.register_fake("pagespec::ssd_scan", lib=_LIBRARY)
def _ssd_scan_fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


@torch.library.register_fake("pagespec::selective_scan", lib=_LIBRARY)
def _selective_scan_fake(
    x: Tensor,
    _dt: Tensor,
    _A: Tensor,
    _B: Tensor,
    _C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    *_: object,
) -> Tensor:
    return x.new_empty(x.shape, dtype=cpu_selective_scan.result_type(x, D, z))


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    state_tables: Tensor,
    interval: int,
    activation: str,
) -> Tensor:
    """Causal depthwise convolution, over the last K positions.

    Args:
        x: ``[T, C]``. weight: ``[C, K]``. bias: ``[C]`` or None.
        states: ``[num_slots + 1, K - 1, C]`` in x's dtype: the last inputs.
        query_starts: int32 ``[B + 1]``. context_lens: int32 ``[B]``.
        state_tables: int32 ``[B, M]``. interval: positions an entry.
        activation: a key of ``ACTIVATIONS``, or "" for none.

    Returns:
        ``[T, C]`` in x's dtype.
    """
    out: Tensor = torch.ops.pagespec.short_conv(
        x, weight, bias, states, query_starts, context_lens, state_tables, interval, activation
    )
    return out


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
            :mod:`.chunk_layout` has it.
        query_starts, context_lens, state_tables, interval: as of :func:`short_conv`.
        scale: factor on the queries. l2norm: whether queries and keys are normalised first.

    Returns:
        ``[T, H, V]`` in the queries' dtype.
    """
    out: Tensor = torch.ops.pagespec.delta_rule(
        query,
        key,
        value,
        decay,
        beta,
        states,
        query_starts,
        context_lens,
        state_tables,
        interval,
        scale,
        l2norm,
    )
    return out


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
        states: float32 ``[num_slots + 1, H, N, P]``; on a GPU as :mod:`.chunk_layout` has it.
        query_starts, context_lens, state_tables, interval: as of :func:`short_conv`.

    Returns:
        float32 ``[T, H, P]``.
    """
    out: Tensor = torch.ops.pagespec.ssd_scan(
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        states,
        query_starts,
        context_lens,
        state_tables,
        interval,
        dt_softplus,
        dt_min,
        dt_max,
    )
    return out


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
        query_starts, context_lens, state_tables, interval: as of :func:`short_conv`.

    Returns:
        ``[T, I]``, in the dtype of ``(x + x * D) * z``.
    """
    out: Tensor = torch.ops.pagespec.selective_scan(
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        states,
        query_starts,
        context_lens,
        state_tables,
        interval,
        dt_softplus,
    )
    return out
