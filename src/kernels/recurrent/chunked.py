"""The gated delta rule and Mamba-2 as Triton kernels, one chunk of positions at a time.

For a chunk that begins with state S, with g the cumulative sum of log decays from its start:

    A[i, j] = beta[i] exp(g[i] - g[j]) (k[i] . k[j]) for j < i
    P[i, j] = exp(g[i] - g[j]) (q[i] . k[j])         for j <= i
    u = M (v - exp(g) k S), M = (I + A)^-1 beta      (Mamba-2: u = dt x)
    y = exp(g) q S + P u
    S after the chunk = exp(g[last]) S + sum over i of exp(g[last] - g[i]) k[i] (x) u[i]

(Yang et al. 2024, Dao and Gu 2024). All are matmuls. For position i, a row adds only zeros for
positions after i, if their inputs are finite. So a position's result does not depend on how much of
its chunk is present: a decode step computes it as a prompt does, with the chunk's earlier positions
from the slot. The slot contains the state before the chunk and the inputs since
(:mod:`.recurrent_spec`). The state is written at a chunk's end, and at the start of an interval to
another slot.

Matmuls are bfloat16 with float32 accumulators. A float32 factor is split into two bfloat16, which
keep 16 bits of its mantissa. For inputs in other dtypes they are float32.

In prompt steps one kernel computes, for all chunks in parallel, everything that depends only on
queries, keys and decays. A second kernel processes the chunks in order. In steps with one token per
row, the second kernel moves each state from slot to slot. With few rows it also does the work of
the first (:mod:`.chunk_kernels`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arguments import DeltaInputs, SsdInputs
from . import recurrent_spec as spec
from .chunk_kernels import chunk_decode_kernel, chunk_inner_kernel, chunk_prompt_kernel
from .walk import StepRows

_NUM_WARPS = 4
_NUM_WARPS_INNER = 1
# Elements loaded at once, if head sizes are multiples of it.
_UNIT = 8
# Heads per program of the first kernel.
_MOST_HEADS = 4
# Registers per thread of programs that move states from slot to slot: with this limit a
# multiprocessor runs three programs instead of two.
REGISTERS_OF_MANY_ROWS = 168
# The most programs that compute everything of their chunks themselves: eight times as many as run
# concurrently.
_FEW_PROGRAMS = 1 << 11


def delta_rule(
    inputs: DeltaInputs, states: Tensor, rows: StepRows, scale: float, l2norm: bool
) -> Tensor:
    """Same as :func:`.ops.delta_rule`, for decays ``[T, H]`` and states of
    :mod:`.recurrent_spec`."""
    out = inputs.query.new_empty(inputs.value.shape)
    limits = (scale, 0.0, 0.0)
    options = {"L2NORM": l2norm, "SOFTPLUS": False}
    _launch(inputs, (None, None, None), states, out, rows, limits, options)
    return out


def ssd_scan(
    inputs: SsdInputs,
    states: Tensor,
    rows: StepRows,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """Same as :func:`.ops.ssd_scan`, for states of :mod:`.recurrent_spec`."""
    x, dt, A, B, C, D, dt_bias = inputs
    out = x.new_empty(x.shape, dtype=torch.float32)
    limits = (1.0, dt_min, dt_max)
    options = {"L2NORM": False, "SOFTPLUS": dt_softplus}
    _launch((C, B, x, dt, None), (A, dt_bias, D), states, out, rows, limits, options)
    return out


def _launch(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    per_head: tuple[Tensor | None, Tensor | None, Tensor | None],
    states: Tensor,
    out: Tensor,
    rows: StepRows,
    limits: tuple[float, float, float],
    options: dict[str, Any],
) -> None:
    num_rows, num_heads, num_values = len(rows.context_lens), *out.shape[1:]
    if not len(out):
        return
    num_keys = tokens[1].shape[2]
    unit = _UNIT if num_keys % _UNIT == 0 == num_values % _UNIT else 1
    query, key, value = (_aligned(x, unit) for x in tokens[:3])
    given = query, key, value, *tokens[3:]
    strides = [x.stride(n) // unit for x in (query, key, value) for n in (0, 1)]
    strides += [0 if x is None else x.stride(n) for x in tokens[3:] for n in (0, 1)]
    layout = spec.record_layout(num_keys, num_values, key.dtype, value.dtype)
    if states.shape[2] != layout.record:
        found = f"slots of {states.shape[2]} elements per record"
        raise ValueError(f"{found} for inputs of {key.dtype} and {value.dtype}: {layout.record}")
    places = {name.upper(): place for name, place in layout._asdict().items()}
    sizes: dict[str, Any] = {
        "H": num_heads,
        "HK": key.shape[1],
        "K": num_keys,
        "K_PAD": spec.padded(num_keys),
        "CHUNK": spec.CHUNK,
        "UNIT": unit,
        "SIZE": spec.PREPARED_SIZE,
        # The same roundings in all kernels.
        "enable_fp_fusion": False,
        "num_stages": 1,
    }
    tiles: dict[str, Any] = {
        **places,
        "V": num_values,
        "BLOCK_V": spec.block_v(num_keys, num_values),
        "num_warps": _NUM_WARPS,
    }
    walk = rows.arguments(len(out))
    grid = states.shape[1], num_rows + 1
    is_long = has_long_rows(len(out), num_rows) or rows.drafts is not None
    chunks = None
    if rows.interval % spec.CHUNK == 0 and (is_long or has_many_rows(grid)):
        num_chunks = len(out) // spec.CHUNK + 2 * num_rows + 2
        shape = num_chunks, num_heads, sizes["SIZE"]
        chunks = torch.empty(shape, dtype=torch.float32, device=out.device)
        # A program computes some of the heads that share keys.
        heads = math.gcd(num_heads // key.shape[1], _MOST_HEADS)
        parts = len(out) // spec.CHUNK + 2 * num_rows if is_long else num_rows
        chunk_inner_kernel[(num_heads // heads, parts)](
            query, key, *given[3:], *per_head[:2], states, chunks, *walk[:4],
            *walk[7:], *limits, *strides[:4], *strides[6:], num_rows if is_long else 0,
            TILES=states.shape[1] // num_heads,
            HEADS=heads,
            KEYS=layout.keys,
            SCALARS=layout.scalars,
            RECORD=layout.record,
            num_warps=_NUM_WARPS_INNER,
            **sizes,
            **options,
        )  # fmt: skip
    if is_long and chunks is not None:
        chunk_prompt_kernel[grid](
            *given, per_head[2], states, chunks, out, *walk, *strides,
            **sizes,
            **tiles,
        )  # fmt: skip
    else:
        if chunks is not None and key.dtype == torch.bfloat16:
            tiles["maxnreg"] = REGISTERS_OF_MANY_ROWS
        chunk_decode_kernel[grid](
            *given, *per_head, states, chunks, out, *walk, *limits, *strides,
            **sizes,
            **tiles,
            **options,
        )  # fmt: skip


# Which kernels compute a step. The choice changes no bits.


def has_long_rows(num_tokens: int, num_rows: int) -> bool:
    """Whether rows typically have more than one or two chunks."""
    return num_tokens > num_rows


def has_many_rows(grid: tuple[int, int]) -> bool:
    """Whether a separate kernel for the interactions within chunks is faster, although a program
    could compute them for its tile while a state is being loaded."""
    return grid[0] * grid[1] > _FEW_PROGRAMS


def _aligned(x: Tensor, unit: int) -> Tensor:
    """``[T, heads, size]`` as the kernels read it: elements of a head contiguous, strides of tokens
    and heads multiples of ``unit``, and addresses multiples of 16 bytes. A copy if the input
    differs."""
    suits = x.stride(2) == 1 and all(stride % unit == 0 for stride in x.stride()[:2])
    if suits and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
