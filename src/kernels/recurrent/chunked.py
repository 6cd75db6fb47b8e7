"""The gated delta rule and Mamba-2 as Triton kernels, a chunk of positions at a time.

Of a chunk that begins with state S, with g the decays' logarithms summed up from its begin:

    A[i, j] = beta[i] exp(g[i] - g[j]) (k[i] . k[j]) for j < i
    P[i, j] = exp(g[i] - g[j]) (q[i] . k[j])         for j <= i
    u = M (v - exp(g) k S), M = (I + A)^-1 beta      (Mamba-2: u = dt x)
    y = exp(g) q S + P u
    S after the chunk = exp(g[last]) S + sum over i of exp(g[last] - g[i]) k[i] (x) u[i]

(Yang et al. 2024, Dao and Gu 2024). All are matmuls, of which a row for position i adds up
nothing but zeros from positions after i, if their inputs are finite. So what a position gives does
not depend on how far its chunk has come: a decode step computes it as a prompt does, with the
chunk's earlier positions taken from the slot, which holds the state before the chunk and the inputs
since (:mod:`.spec`). The state is written at a chunk's end, and where an interval begins,
in another slot.

Matmuls are of bfloat16 with float32 sums; a float32 factor is split into two bfloat16, 16 bits of
its mantissa. Of inputs in other dtypes they are of float32.

In steps of prompts a kernel computes what follows from queries, keys and decays alone, for all
chunks side by side, and another walks the chunks. In
steps of a token per row the second has each state go from slot to slot, and of few rows it does the
first's work, too (:mod:`.chunk_kernels`).
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
# Elements that are loaded at once, where heads are of multiples of it.
_UNIT = 8
# Of a program of the kernel in front.
_MOST_HEADS = 4
# Of a thread that moves states from slot to slot: so a multiprocessor runs three programs, not two.
REGISTERS_OF_MANY_ROWS = 168
# Programs that compute everything of their chunks themselves: eight times as many as run at a time.
_FEW_PROGRAMS = 1 << 11


def delta_rule(
    inputs: DeltaInputs, states: Tensor, rows: StepRows, scale: float, l2norm: bool
) -> Tensor:
    """Same as :func:`.ops.delta_rule`, for decays ``[T, H]`` and states of :mod:`.spec`."""
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
    """Same as :func:`.ops.ssd_scan`, for states of :mod:`.spec`."""
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
    is_long = has_long_rows(len(out), num_rows)
    chunks = None
    if rows.interval % spec.CHUNK == 0 and (is_long or has_many_rows(grid)):
        num_chunks = len(out) // spec.CHUNK + 2 * num_rows + 2
        shape = num_chunks, num_heads, sizes["SIZE"]
        chunks = torch.empty(shape, dtype=torch.float32, device=out.device)
        # Of the heads that share keys a program computes some.
        heads = math.gcd(num_heads // key.shape[1], _MOST_HEADS)
        parts = len(out) // spec.CHUNK + 2 * num_rows if is_long else num_rows
        chunk_inner_kernel[(num_heads // heads, parts)](
            query, key, *given[3:], *per_head[:2], states, chunks, *walk[:4],
            *walk[6:], *limits, *strides[:4], *strides[6:], num_rows if is_long else 0,
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


# Which kernels compute a step; its bits are the same.


def has_long_rows(num_tokens: int, num_rows: int) -> bool:
    """Whether rows have more than a chunk or two, as a rule."""
    return num_tokens > num_rows


def has_many_rows(grid: tuple[int, int]) -> bool:
    """Whether what positions of a chunk have to do with each other is worth a kernel of its own,
    though a program could compute it for its tile while a state is on its way."""
    return grid[0] * grid[1] > _FEW_PROGRAMS


def _aligned(x: Tensor, unit: int) -> Tensor:
    """``[T, heads, size]`` as the kernels read it: a head's elements side by side, tokens and heads
    a multiple of ``unit`` apart, all at a multiple of 16 bytes. A copy where it is not so."""
    suits = x.stride(2) == 1 and all(stride % unit == 0 for stride in x.stride()[:2])
    if suits and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
