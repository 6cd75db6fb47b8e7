"""Store step of Hopper's prefill attention: :mod:`.results` in Gluon."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..fused.e4m3_groups import GROUP, SMALLEST_SCALE, quantized

_GROUP = gl.constexpr(GROUP)


@gluon.jit
def store_lines(
    lines, out, scales, num_tokens, tokens, heads, is_line, part,
    HQ: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Store ``lines [M, D]``, of each head the D values from ``part`` on, rounded to the model's
    dtype; with scales, a group of 128 channels.

    Args:
        out: ``[T, HQ, DV]``. scales: ``[HQ * DV / 128, T]``, or None. num_tokens: T.
        tokens: int64 ``[M]``. heads: query heads, ``[M]``. is_line: which of them are there.
    """
    if scales is None:
        _store(lines, out, tokens, heads, is_line, part, HQ, DV)
    else:
        gl.static_assert(lines.shape[1] == _GROUP)
        values, factors = quantized(lines.to(gl.float32))
        _store(values, out, tokens, heads, is_line, part, HQ, DV)
        _store_scales(factors, scales, num_tokens, tokens, heads, is_line, part, DV)


@gluon.jit
def store_zeros(
    out, scales, num_tokens, tokens, heads, is_line, part,
    HQ: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """:func:`store_lines` of zeros, of LAYOUT.

    Not by quantising zeros: as constants all their pairs of e4m3 numbers are one, and where a word
    is a pair twice, ptxas before CUDA 13 takes the upper half from a register that nothing wrote.
    """
    M: gl.constexpr = tokens.shape[0]
    zeros = gl.zeros([M, D], out.dtype.element_ty, LAYOUT)
    _store(zeros, out, tokens, heads, is_line, part, HQ, DV)
    if scales is not None:
        factors = gl.full([M], SMALLEST_SCALE, gl.float32, tokens.type.layout)
        _store_scales(factors, scales, num_tokens, tokens, heads, is_line, part, DV)


@gluon.jit
def _store(lines, out, tokens, heads, is_line, part, HQ: gl.constexpr, DV: gl.constexpr):
    D: gl.constexpr = lines.shape[1]
    dims = part + gl.arange(0, D, gl.SliceLayout(0, lines.type.layout))
    target = out + (tokens * HQ + heads)[:, None] * DV + dims[None, :]
    mask = is_line[:, None]
    if DV % D:
        mask = mask & (dims < DV)[None, :]
    gl.store(target, lines, mask=mask)


@gluon.jit
def _store_scales(
    factors, scales, num_tokens, tokens, heads, is_line, part, DV: gl.constexpr
):  # fmt: skip
    group = heads.to(gl.int64) * (DV // _GROUP) + part // _GROUP
    gl.store(scales + group * num_tokens + tokens, factors, mask=is_line)
