"""Store step of Hopper's prefill attention: :mod:`.results` in Gluon."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..fused.e4m3_groups import GROUP, quantized

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
    D: gl.constexpr = lines.shape[1]
    dims = part + gl.arange(0, D, gl.SliceLayout(0, lines.type.layout))
    target = out + (tokens * HQ + heads)[:, None] * DV + dims[None, :]
    mask = is_line[:, None]
    if DV % D:
        mask = mask & (dims < DV)[None, :]
    if scales is None:
        gl.store(target, lines, mask=mask)
    else:
        gl.static_assert(D == _GROUP)
        values, factors = quantized(lines.to(gl.float32))
        gl.store(target, values, mask=mask)
        group = heads.to(gl.int64) * (DV // _GROUP) + part // _GROUP
        gl.store(scales + group * num_tokens + tokens, factors, mask=is_line)
