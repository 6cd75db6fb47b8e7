"""Device functions of the recurrent kernels: elementary functions with torch's accuracy, slots, and
the arithmetic of chunks (equations: :mod:`.chunked`).

The arithmetic of chunks has one order of additions in any layout, because kernels of different
shapes share it: matmuls, elementwise operations, and sums in which all summands but one are zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..fused.rounding import EMULATE, exp, rounded

# A value that depends on the batch must not recompile a kernel: another layout of a state means
# another order of additions.
BATCH = [
    *("num_rows", "num_tokens", "interval", "table_stride", "unit", "x_stride", "dt_stride"),
    *("c_stride", "z_stride", "q_stride", "q_head_stride", "k_stride", "k_head_stride"),
    *("v_stride", "v_head_stride", "a_stride", "a_head_stride", "b_stride", "b_head_stride"),
]
ROW_POINTERS = ["starts", "contexts", "tables", "table_rows", "num_drafts"]


@triton.jit
def find_row(starts, contexts, tables, table_rows, row, is_row, table_stride):  # type: ignore[no-untyped-def]
    """(first token, one after the last, position of the first, table) of a row. For padding, which
    is no row, only the first is defined."""
    # All loads at once, because each takes as long as the load of a state.
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1, mask=is_row, other=0)
    context = tl.load(contexts + row, mask=is_row, other=0)
    table_row = tl.load(table_rows + row, mask=is_row, other=0)
    return begin, end, context - (end - begin), tables + table_row.to(tl.int64) * table_stride


@triton.jit
def end_of_own(num_drafts, row, end):  # type: ignore[no-untyped-def]
    """One after the last token of a row whose state is kept: before its draft tokens.
    ``num_drafts`` may be None."""
    if num_drafts is not None:
        end -= tl.load(num_drafts + row)
    return end


@triton.jit
def step_size(dt, bias, SOFTPLUS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``softplus(dt + bias)``, with each operation rounded to DTYPE; float32. bias may be None."""
    if bias is not None:
        dt = rounded(dt + rounded(bias.to(tl.float32), DTYPE), DTYPE)
    if SOFTPLUS:
        if EMULATE:
            soft = tl.log(1.0 + tl.exp(dt.to(tl.float64))).to(tl.float32)
        else:
            soft = libdevice.log1p(exp(dt))
        dt = rounded(tl.where(dt > 20.0, dt, soft), DTYPE)
    return dt


@triton.jit
def first_slot(table, position, interval):  # type: ignore[no-untyped-def]
    """The slot of the state before ``position``, which must be above 0."""
    return tl.load(table + (position - 1) // interval).to(tl.int64)


@triton.jit
def part_of_row(starts, num_rows, part, SIZE: tl.constexpr, MORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, part number within the row) of program ``part``. Programs are assigned to rows by
    length: ``starts[row] // SIZE + MORE * row`` programs come before a row. So a row with n tokens
    has at least ``n // SIZE + MORE`` programs."""
    i = tl.arange(0, 128)
    before = 0
    for first in range(0, num_rows, 128):
        rows = first + i
        inside = rows < num_rows
        parts = tl.load(starts + rows, mask=inside, other=0) // SIZE + MORE * rows
        before += tl.sum((inside & (parts <= part)).to(tl.int32), axis=0)
    row = before - 1
    return row, part - (tl.load(starts + row) // SIZE + MORE * row)


@triton.jit
def zero_padding(out, first, num_tokens, mask, STRIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store zeros to ``out``, pointers to the elements of token 0, for the tokens from ``first``
    on."""
    zeros = tl.zeros(mask.shape, out.dtype.element_ty)
    out += first.to(tl.int64) * STRIDE
    for _ in range(first, num_tokens):
        tl.store(out, zeros, mask=mask)
        out += STRIDE


# Precision of lossless float32 matmuls: six bfloat16 matmuls. With "ieee", a program of a large
# head would spill thousands of bytes.
_FLOAT32 = tl.constexpr("ieee" if EMULATE else "bf16x6")
_SMALLEST_LOGARITHM = tl.constexpr(-104.0)


@triton.jit
def as_bfloat16(x):  # type: ignore[no-untyped-def]
    """Two elements at a time: Triton 3.6 converts single elements at a quarter of the rate."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, True, 2
    )


@triton.jit
def split(x):  # type: ignore[no-untyped-def]
    """Two bfloat16 that sum to x, for a pair of elements at a time. Otherwise Triton would split
    its conversions for the differences, and join them again for the matmul."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 a, $0, 16;
            and.b32 b, $0, 0xffff0000;
            sub.rn.f32 a, $2, a;
            sub.rn.f32 b, $3, b;
            cvt.rn.bf16x2.f32 $1, b, a;
        }
        """,
        "=&r,=r,f,f", [x], (tl.bfloat16, tl.bfloat16), True, 2,
    )  # fmt: skip


@triton.jit
def matmul(x, y, total, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``total + x y`` with float32 x. With SPLIT in bfloat16, for y that bfloat16 represents
    exactly."""
    if SPLIT:
        x_high, x_low = split(x)
        if y.dtype == tl.bfloat16:
            total = tl.dot(x_low, y, total)
            total = tl.dot(x_high, y, total)
        else:
            y_high, y_low = split(y)
            total = tl.dot(x_low, y_high, total)
            total = tl.dot(x_high, y_low, total)
            total = tl.dot(x_high, y_high, total)
    else:
        total = tl.dot(x, y.to(tl.float32), total, input_precision=_FLOAT32)
    return total


@triton.jit
def inner_products(x, y):  # type: ignore[no-untyped-def]
    """``x y^T`` of tokens' queries or keys, in float32."""
    if x.dtype == tl.bfloat16 and not EMULATE:
        return tl.dot(x, tl.trans(y))
    return tl.dot(x.to(tl.float32), tl.trans(y.to(tl.float32)), input_precision=_FLOAT32)


@triton.jit
def diagonal(x):  # type: ignore[no-untyped-def]
    i, j = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    return tl.sum(tl.where(i == j, x, 0.0), 1)


@triton.jit
def logarithms(decay, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[i, j]``: the logarithm of the decays from a chunk's start to position i."""
    # exp of smaller values is also 0, and a larger sum would leave fewer digits for later
    # logarithms.
    decay = tl.maximum(decay, _SMALLEST_LOGARITHM, propagate_nan=tl.PropagateNan.ALL)
    i, j = tl.arange(0, decay.shape[0])[:, None], tl.arange(0, decay.shape[0])[None, :]
    lower = tl.where(i >= j, 1.0, 0.0)
    a = tl.broadcast_to(decay[:, None], lower.shape)
    if SPLIT:  # in three parts, which is lossless
        high, low = split(a)
        lowest = as_bfloat16(a - high.to(tl.float32) - low.to(tl.float32))
        ones = as_bfloat16(lower)
        return tl.dot(ones, high, tl.dot(ones, low, tl.dot(ones, lowest)))
    return tl.dot(lower, a, input_precision=_FLOAT32)


@triton.jit
def delta_inner(  # type: ignore[no-untyped-def]
    scores, known, squares, a, b, made, first, last, scale,
    L2NORM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The interactions between positions of a chunk in a delta rule.

    Args:
        scores: ``q k^T``. known: ``k k^T``. squares: ``q q^T``.
        a, b: decay and beta of each position.
        made: rows of M for positions before ``first``, computed earlier.
        first, last: the positions to compute.

    Returns:
        ``M = (I + A)^-1 beta`` and ``P M``, ``[2, CHUNK, CHUNK]``, which give u and the rest of y
        from ``v - exp(g) k S``; per position, the factors on what its key and its query read of S,
        and on what it adds to S; the factor on S.
    """
    CHUNK: tl.constexpr = scores.shape[0]
    index = tl.arange(0, CHUNK)
    i, j = index[:, None], index[None, :]
    g_i = logarithms(a, SPLIT)
    g_j = tl.trans(g_i)
    g = diagonal(g_i)
    # Later positions are excluded: their exponentials may be infinite.
    decayed = exp(tl.where(i >= j, g_i - g_j, 0.0))
    of_k = tl.full((CHUNK,), 1.0, tl.float32)
    of_q = of_k
    if L2NORM:
        of_k = tl.rsqrt(diagonal(known) + 1e-6)
        of_q = tl.rsqrt(diagonal(squares) + 1e-6)
    of_q *= scale
    decayed = decayed * of_k[None, :]
    scores = tl.where(i >= j, scores * (decayed * of_q[:, None]), 0.0)
    known = tl.where(i > j, known * (decayed * (of_k * b)[:, None]), 0.0)
    # Compute the rows of M in order, each from the preceding rows: M = beta - A M.
    zeros = tl.zeros((CHUNK, CHUNK), tl.float32)
    m = tl.where(i < first, made, 0.0)
    for row in range(first, last):
        lacking = matmul(tl.where(i == row, known, 0.0), m, zeros, SPLIT)
        m = tl.where(i == row, tl.where(i == j, b[None, :], 0.0) - lacking, m)
    grown = exp(g)
    g_last = tl.sum(tl.where(index == CHUNK - 1, g, 0.0), 0)
    both = tl.permute(tl.join(m, matmul(scores, m, zeros, SPLIT)), (2, 0, 1))
    return both, of_k * grown, of_q * grown, of_k * exp(g_last - g), exp(g_last)


@triton.jit
def ssd_inner(scores, a, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """P and the last three results, as in :func:`delta_inner`, for Mamba-2, where u does not depend
    on a state."""
    CHUNK: tl.constexpr = scores.shape[0]
    index = tl.arange(0, CHUNK)
    i, j = index[:, None], index[None, :]
    g_i = logarithms(a, SPLIT)
    g = diagonal(g_i)
    scores = tl.where(i >= j, scores * exp(tl.where(i >= j, g_i - tl.trans(g_i), 0.0)), 0.0)
    g_last = tl.sum(tl.where(index == CHUNK - 1, g, 0.0), 0)
    return scores, exp(g), exp(g_last - g), exp(g_last)


@triton.jit
def step_sizes(dt, bias, valid, dt_min, dt_max, SOFTPLUS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The step sizes of Mamba-2 for the positions of a chunk, 0 for missing positions."""
    dt = step_size(dt, bias, SOFTPLUS, DTYPE)
    return tl.where(valid, tl.minimum(tl.maximum(dt, dt_min), dt_max), 0.0)


@triton.jit
def halves(x):  # type: ignore[no-untyped-def]
    """The first and the last columns of ``[M, 2 N]``."""
    x = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(x, (0, 2, 1)))


@triton.jit
def read_state(state, reads, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the queries of a chunk, and in the delta rule also its keys, read of ``state [V, K]``,
    the state at the chunk's start."""
    zeros = tl.zeros((state.shape[0], reads.shape[0]), tl.float32)
    return matmul(state, tl.trans(reads), zeros, SPLIT)


@triton.jit
def advance(  # type: ignore[no-untyped-def]
    read, v, mixing, of_key, of_query, DELTA: tl.constexpr, SPLIT: tl.constexpr
):
    """u, y and v of a chunk in float32, ``[V, CHUNK]``.

    Args:
        read: from :func:`read_state`. v: the chunk's values ``[V, CHUNK]``, zeros for missing
            positions.
        mixing: ``[2 CHUNK, CHUNK]`` from :func:`delta_inner`; in Mamba-2 P. The factors also come
            from :func:`delta_inner`; in Mamba-2 ``of_key`` contains the step sizes.
    """
    v = v.to(tl.float32)
    if DELTA:
        zeros = tl.zeros(read.shape, tl.float32)
        read, known = halves(read)
        u, y = halves(matmul(v - known * of_key[None, :], tl.trans(mixing), zeros, SPLIT))
        y += read * of_query[None, :]
    else:
        u = v * of_key[None, :]
        y = matmul(u, tl.trans(mixing), read * of_query[None, :], SPLIT)
    return u, y, v


# Masked elements of loads are undefined. `tl.where` makes them zeros only where a program must wait
# in any case. Triton copies a matmul operand to shared memory directly after its load, and waits
# for it there, before later loads are issued.


@triton.jit
def load_rows(x, tokens, stride, kept, offsets, index, first, last, mask):  # type: ignore[no-untyped-def]
    """``[CHUNK, K]``, or ``[V, CHUNK]`` with the position as second dimension, of a chunk's
    positions: those below ``first`` from the slot, and those up to ``last`` from the step."""
    pointers = tl.where(
        index < first, kept.to(x.dtype, bitcast=True) + offsets, x + tokens * stride
    )
    return tl.load(pointers, mask=(index < last) & mask)


@triton.jit
def load_scalars(x, tokens, stride, kept, index, first, last):  # type: ignore[no-untyped-def]
    """Same as :func:`load_rows`, for one value per position, as float32; then zeros."""
    inside = (index >= first) & (index < last)
    new = tl.load(x + tokens * stride, mask=inside, other=0.0).to(tl.float32)
    return tl.where(index < first, tl.load(kept + index, mask=index < first, other=0.0), new)


@triton.jit
def has_reads(index, first, last, mask_k, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mask of the elements that :func:`load_reads` loads."""
    i = index % CHUNK
    return ((index >= CHUNK) | (i >= first)) & (i < last) & mask_k


@triton.jit
def load_reads(  # type: ignore[no-untyped-def]
    query, key, q_stride, k_stride, kept, offsets, token, first, last, index, mask_k,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Queries of positions [first, last) of a chunk, where ``token`` is the first; and for larger
    ``index`` the keys of these positions and of earlier ones, which the slot keeps."""
    i = index % CHUNK
    tokens = (token - first).to(tl.int64) + i
    is_key = index >= CHUNK
    pointers = tl.where(is_key, key + tokens * k_stride, query + tokens * q_stride)
    kept = kept.to(key.dtype, bitcast=True) + offsets
    pointers = tl.where(is_key & (i < first), kept, pointers)
    return tl.load(pointers, mask=has_reads(index, first, last, mask_k, CHUNK))


@triton.jit
def reads_of(  # type: ignore[no-untyped-def]
    query, key, q_stride, k_stride, index, k_index, CHUNK: tl.constexpr, KEYS: tl.constexpr
):
    """Pointers to a chunk's queries and, with KEYS, then its keys."""
    rows = index % CHUNK
    pointers = query + (rows * q_stride + k_index)
    if KEYS:
        pointers = tl.where(index >= CHUNK, key + (rows * k_stride + k_index), pointers)
    return pointers


@triton.jit
def load_mixing(place, reads, index):  # type: ignore[no-untyped-def]
    """The matrices that ``chunk_inner_kernel`` stored at ``place``."""
    return tl.load(place + reads * index.shape[0] + index[None, :])


@triton.jit
def load_factors(place, index):  # type: ignore[no-untyped-def]
    """The three factors stored with the matrices, and the factor on S."""
    CHUNK: tl.constexpr = index.shape[0]
    vectors = place + 2 * CHUNK * CHUNK + index
    return (
        tl.load(vectors),
        tl.load(vectors + CHUNK),
        tl.load(vectors + 2 * CHUNK),
        tl.load(place + 2 * CHUNK * CHUNK + 3 * CHUNK),
    )


@triton.jit
def keep_inputs(  # type: ignore[no-untyped-def]
    record, k, v, mixing, decay, beta, tokens, a_stride, b_stride, k_offsets, v_offsets, index,
    reads, first, last, mask_k, mask_v, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SCALARS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Append positions [first, last) of a chunk to the tail of a record."""
    CHUNK: tl.constexpr = index.shape[0]
    new = (index >= first) & (index < last)
    keys = record + KEYS
    keys = keys.to(tl.pointer_type(k.dtype), bitcast=True)
    tl.store(keys + k_offsets, k, mask=new[:, None] & mask_k)
    values = record + VALUES
    values = values.to(tl.pointer_type(v.dtype), bitcast=True)
    tl.store(values + v_offsets, v, mask=mask_v & new[None, :])
    scalars = record + SCALARS + index
    a = tl.load(decay + tokens * a_stride, mask=new, other=0.0)
    tl.store(scalars, a.to(tl.float32), mask=new)
    if beta is not None:
        b = tl.load(beta + tokens * b_stride, mask=new, other=0.0)
        tl.store(scalars + CHUNK, b.to(tl.float32), mask=new)
        cells = record + ROWS + reads * CHUNK + index[None, :]
        tl.store(cells, mixing, mask=(reads >= first) & (reads < last))
