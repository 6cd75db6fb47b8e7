"""The native kernels on tensors, as called by lowered graphs. All tensors are float32 on the CPU.

Each kernel computes the same bits for a row whatever the other rows are (see ``common.h``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..arguments import RopeInputs
from .library import library

GROUP = 32
"""Inputs of a weight that share a scale."""
OUTPUT_UNIT = 16
"""Outputs are packed in groups of this many; the last group is padded."""
DIM_UNIT = 16
"""Head sizes of attention must be a multiple of this."""

Format = Literal["int4", "int4_float32", "int8"]
_FORMATS: dict[Format, int] = {"int4": 0, "int4_float32": 1, "int8": 2}
_ALIGNMENT = 64
# Bytes of a row rounded to 8 bits: its values, and three float32 per group.
_BYTES_PER_GROUP = GROUP + 12


class TableWidth(int):
    """The width of a step's block tables, which varies between steps of one shape."""


class Recorder(Protocol):
    """Receives the calls of a thread while a recording is made (:mod:`.replay`)."""

    def add(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Record a call."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result."""

    def refuse(self) -> None:
        """torch had to copy a tensor, which a recording does not contain."""


class _Recording(threading.local):
    recorder: Recorder | None = None


recording = _Recording()


def _call(name: str, *arguments: Any) -> None:
    """Call a kernel with these arguments followed by the number of threads."""
    arguments = *arguments, torch.get_num_threads()
    kernels = library()
    if kernels is None:
        raise RuntimeError("the native kernels are not available")
    if recording.recorder is not None:
        recording.recorder.add(name, arguments)
    getattr(kernels, name)(*arguments)


def _empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    if recording.recorder is not None:
        return recording.recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def _contiguous(tensor: Tensor) -> Tensor:
    if recording.recorder is not None and not tensor.is_contiguous():
        recording.recorder.refuse()
    return tensor.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack_values(values: Tensor, is_int4: bool) -> Tensor:
    """uint8 ``[N, K]`` in the order that :func:`linear` reads; two 4-bit values per byte.

    For 16 outputs and 32 inputs: 8 vectors (4 bits: 4) of 16 outputs by 4 inputs.
    """
    num_inputs = values.shape[1]
    values = _filled(values).view(-1, OUTPUT_UNIT, num_inputs // GROUP, GROUP // 4, 4)
    values = values.permute(0, 2, 3, 1, 4)
    if is_int4:
        low, high = values.chunk(2, 2)
        values = low | (high << 4)
    return _aligned(values.contiguous().view(-1))


def pack_numbers(numbers: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Scales (and minima), each ``[N, K / 32]``, in the order that :func:`linear` reads."""
    parts = [
        _filled(part).view(-1, OUTPUT_UNIT, part.shape[1]).permute(0, 2, 1) for part in numbers
    ]
    return _aligned(torch.stack(parts, 2).to(dtype).contiguous().view(-1))


def _filled(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % OUTPUT_UNIT))


def _aligned(flat: Tensor) -> Tensor:
    """A copy whose memory is aligned for vectors."""
    size = flat.numel()
    room = flat.new_empty(size + _ALIGNMENT // flat.element_size())
    offset = -room.data_ptr() % _ALIGNMENT // flat.element_size()
    return room[offset : offset + size].copy_(flat)


def linear(
    x: Tensor,
    values: Tensor,
    numbers: Tensor,
    bias: Tensor | None,
    num_outputs: int,
    format: Format,
    query_starts: Tensor | None,
) -> Tensor:
    """``F.linear`` with a packed weight. Rows are rounded to 8 bits, and sums are float32.

    Args:
        x: ``[..., K]``. values, numbers: from :func:`pack_values` and :func:`pack_numbers`.
        bias: ``[N]`` or None.
        query_starts: int32 ``[B + 1]`` if the rows are the tokens of a step. Rows from its last
            entry on are padding and get zeros.

    Returns:
        ``[..., num_outputs]``.
    """
    x = _contiguous(x)
    num_inputs = x.shape[-1]
    num_rows = x.numel() // num_inputs
    out = _empty((*x.shape[:-1], num_outputs))
    scratch = _empty((num_rows * (num_inputs // GROUP) * _BYTES_PER_GROUP,), torch.uint8)
    num_real = None
    if query_starts is not None:
        num_real = query_starts.data_ptr() + 4 * (query_starts.shape[0] - 1)
    _call(
        "linear", x.data_ptr(), num_rows, num_real, num_inputs, num_outputs, _FORMATS[format],
        values.data_ptr(), numbers.data_ptr(), _address(bias), out.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    return out


def attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """:func:`.ops.paged_attention`, for head sizes that are multiples of :data:`DIM_UNIT`."""
    query = _contiguous(query)
    num_tokens, q_heads, dim = query.shape
    _, block_size, kv_heads, value_dim = v_cache.shape
    out = _empty((num_tokens, q_heads, value_dim))
    _call(
        "attention", query.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        query_starts.data_ptr(), context_lens.data_ptr(), block_tables.data_ptr(),
        table_rows.data_ptr(), _address(sinks), num_tokens, context_lens.shape[0],
        TableWidth(block_tables.shape[1]), block_size, q_heads, kv_heads, dim, value_dim, window,
        scale, softcap, out.data_ptr(),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    """:func:`.fused.dispatch.rms_norm`."""
    return _norm(x, None, weight, eps, form)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """:func:`.fused.dispatch.add_rms_norm`."""
    return _norm(x, _contiguous(residual), weight, eps, form)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    x = _contiguous(x)
    normed = _empty(x.shape)
    hidden = x if residual is None else _empty(x.shape)
    width = x.shape[-1]
    _call(
        "rms_norm", x.data_ptr(), _address(residual), weight.data_ptr(), _shift(form), eps,
        x.numel() // width, width, hidden.data_ptr(), normed.data_ptr(),
    )  # fmt: skip
    return normed, hidden


def _shift(form: str) -> float:
    return 1.0 if form == "plus_one" else 0.0


def act_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """:func:`.fused.dispatch.act_mul`."""
    shape, width = gate.shape, gate.shape[-1]
    gate, up = _as_rows(gate), _as_rows(up)
    out = _empty(shape)
    _call(
        "gated_activation", gate.data_ptr(), gate.stride(-2), up.data_ptr(), up.stride(-2),
        int(kind != "silu"), gate.numel() // width, width, out.data_ptr(),
    )  # fmt: skip
    return out


def _as_rows(x: Tensor) -> Tensor:
    """``x [..., M, N]`` with a single stride between all of its rows, and contiguous rows."""
    is_one = x.dim() == 2 or (x.dim() == 3 and x.shape[0] == 1)
    return x if is_one and x.stride(-1) == 1 else _contiguous(x)


def norm_rope_store(
    inputs: RopeInputs, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """:func:`.fused.dispatch.norm_rope_store`."""
    query, key, value, cos, sin, rotary_dim, q_weight, k_weight, eps, form = inputs
    query, key, value = (x if x.stride(2) == 1 else _contiguous(x) for x in (query, key, value))
    cos, sin = _contiguous(cos), _contiguous(sin)
    num_tokens, q_heads, dim = query.shape
    rotated = _empty((num_tokens, q_heads, dim))
    _call(
        "rope_store", query.data_ptr(), key.data_ptr(), value.data_ptr(), *query.stride()[:2],
        *key.stride()[:2], *value.stride()[:2], cos.data_ptr(), sin.data_ptr(), cos.shape[-1],
        rotary_dim, _address(q_weight), _address(k_weight), _shift(form), eps,
        slot_mapping.data_ptr(), num_tokens, q_heads, key.shape[1], dim, value.shape[2],
        rotated.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
    )  # fmt: skip
    return rotated
