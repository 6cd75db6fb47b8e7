"""Attention over latent vectors tile by tile: device functions shared by decode and prefill.

The online softmax of :mod:`..attention.online_softmax`, with its rules for equal bits, transposed
("turned"): *lines* (a query and a head each) are columns. So the keys of a tile, and then the
dimensions of values, are the long side of the matrix instructions, and 16 lines suffice. A tile is
read from memory once: its first R elements are both keys and values.

States are the turned states of that module: ``(row_max [M], row_sum [W, M], acc [R, M])``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..attention.online_softmax import (
    add_tile,
    block_ids,
    empty_state,
    ends_split,
    fold,
    slot_pointers,
)
from ..sparse.index_kernels import chosen_slots


class Vectors(NamedTuple):
    """Pointers to the cached vectors of a row.

    Attributes:
        chosen: selected positions in order, which replace positions 0, 1, 2, ... of a context; or
            None.
        position: position of the query that they were selected for.
    """

    cache: Any
    table: Any
    chosen: Any = None
    position: Any = None


class VectorShape(NamedTuple):
    """Constants: sizes of a tile of cached vectors."""

    R: Any  # elements of a latent, which are the values
    P: Any  # rotated elements after them
    R_PAD: Any
    P_PAD: Any
    PAGE: Any
    BLOCK_N: Any
    ONES: Any  # rows of the matrix of ones that sums the weights
    PRECISION: Any  # of tl.dot


class Lines(NamedTuple):
    """Queries of the lines.

    Attributes:
        latent: in the latent space, ``[M, R_PAD]``. rope: ``[M, P_PAD]``.
    """

    latent: Any
    rope: Any


@triton.jit
def _places(vectors, start, last, shape):  # type: ignore[no-untyped-def]
    """The location of the tile at ``start``: its :func:`block_ids`, or the slots of selected
    positions."""
    if vectors.chosen is None:
        places = block_ids(vectors.table, start, last, shape.PAGE, shape.BLOCK_N)
    else:
        places = chosen_slots(
            vectors.chosen, vectors.position, vectors.table, start, last, shape.PAGE, shape.BLOCK_N
        )
    return places


@triton.jit
def _load_part(  # type: ignore[no-untyped-def]
    cache, places, start, last, D: tl.constexpr, D_PAD: tl.constexpr, ARE_SLOTS: tl.constexpr, shape
):
    """``[BLOCK_N, D_PAD]``: D elements of each vector of the tile at ``start``, from ``cache`` on;
    zeros beyond D and ``last``."""
    WIDTH: tl.constexpr = shape.R + shape.P
    dims = tl.arange(0, D_PAD)
    offsets = tl.arange(0, shape.BLOCK_N)
    if ARE_SLOTS:
        rows = (cache + places.to(tl.int64) * WIDTH)[:, None]
    else:
        rows = slot_pointers(
            cache, places, start, WIDTH, shape.PAGE * WIDTH, shape.PAGE, shape.BLOCK_N
        )
    exists = (offsets <= last - start)[:, None]
    mask = exists if D == D_PAD else exists & (dims < D)[None, :]
    return tl.load(rows + dims[None, :], mask=mask, other=0.0)


@triton.jit
def attend_vectors(  # type: ignore[no-untyped-def]
    lines, vectors, begin, end, last, positions, factor, splits, shape
):
    """The total over the splits from ``begin`` to ``end``.

    Args:
        lines: :class:`Lines`.
        begin: first position, the start of a split. end: one after the last position.
        last: last position that any of the lines sees. positions: positions of the lines, ``[M]``.
            With selected positions, all four are indices of these.
        factor: converts scores to base-2 logarithms.
    """
    LINES: tl.constexpr = lines.rope.shape[0]
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    DTYPE: tl.constexpr = vectors.cache.dtype.element_ty
    offsets = tl.arange(0, BLOCK_N)
    ones = tl.full((shape.ONES, BLOCK_N), 1.0, DTYPE)
    total = empty_state(LINES, shape.ONES, shape.R_PAD, TURNED=True)
    state = total
    ARE_SLOTS: tl.constexpr = vectors.chosen is not None
    places = _places(vectors, begin, last, shape)
    for start in tl.range(begin, end, BLOCK_N):
        # Vectors of unused slots may be NaN, but values must be finite.
        latents = _load_part(
            vectors.cache, places, start, last, shape.R, shape.R_PAD, ARE_SLOTS, shape
        )
        scores = tl.dot(latents, tl.trans(lines.latent), input_precision=shape.PRECISION)
        ropes = _load_part(
            vectors.cache + shape.R, places, start, last, shape.P, shape.P_PAD, ARE_SLOTS, shape
        )
        # One tile ahead, so that no address waits for the load of its block id.
        places = _places(vectors, start + BLOCK_N, last, shape)
        scores = tl.dot(ropes, tl.trans(lines.rope), scores, input_precision=shape.PRECISION)
        visible = (start + offsets)[:, None] <= positions[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        state = add_tile(scores, tl.trans(latents), ones, state, factor, True)
        if ends_split(start + BLOCK_N, splits):
            total = fold(total, state, factor, True)
            state = empty_state(LINES, shape.ONES, shape.R_PAD, TURNED=True)
    # The last split if its end was not reached; otherwise an empty state, which changes nothing.
    return fold(total, state, factor, True)


@triton.jit
def load_lines(  # type: ignore[no-untyped-def]
    query, tokens, heads, is_line, token_stride, head_stride, shape
):
    """The :class:`Lines`, with zeros where there is no line."""
    rows = query + (tokens * token_stride + heads.to(tl.int64) * head_stride)[:, None]
    r = tl.arange(0, shape.R_PAD)[None, :]
    p = tl.arange(0, shape.P_PAD)[None, :]
    latent = tl.load(rows + r, mask=is_line[:, None] & (r < shape.R), other=0.0)
    rope = tl.load(rows + shape.R + p, mask=is_line[:, None] & (p < shape.P), other=0.0)
    return Lines(latent, rope)
