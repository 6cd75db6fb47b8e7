"""Top-k indexers as Triton kernels: the store of keys, the scores of the positions in view, and the
selection.

The formula is that of :mod:`.indexer`. No code waits for the device, so calls can be captured in a
CUDA graph. Every token is a separate unit, whatever its row. A query's selection depends only on
its own text:

- A score comes from one kernel with one tile, in a prompt and in decode. Position j is line ``j %
  BLOCK_N`` of a tile that begins at a fixed position. So there is one order of summation over the
  elements of a head, and over the heads.
- The selection compares integers, which have the order of the float scores. Bisection finds the
  lowest of the K highest scores, and positions are written in order.

Of equal scores the lowest positions are selected, as by ``torch.topk`` on a GPU, which transformers
calls there. On a CPU torch selects others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.online_softmax import count_at_most, dot_precision, dot_size
from ..device import overlap_options, vector_strides


@triton.jit
def row_of_token(starts, contexts, num_rows, token):  # type: ignore[no-untyped-def]
    """(row, position) of any token of a step; position -1 for padding."""
    row = count_at_most(starts + 1, num_rows - 1, token, 1, 1, False, 256)
    end = tl.load(starts + row + 1, mask=row < num_rows, other=0)
    context = tl.load(contexts + row, mask=row < num_rows, other=0)
    return row, tl.where(row < num_rows, context - (end - token), -1)


@triton.jit
def chosen_slots(  # type: ignore[no-untyped-def]
    chosen, position, table, start, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Slots ``[BLOCK_N]`` of the selected positions from index ``start`` on; beyond ``last`` the
    slot of ``last``. ``chosen`` points to those of a query at ``position``; there are ``last + 1``
    of them."""
    at = tl.load(chosen + tl.minimum(start + tl.arange(0, BLOCK_N), last))
    # While kernels are being compiled, the selecting kernel may not have run.
    at = tl.minimum(at.to(tl.uint32), position.to(tl.uint32))
    blocks = tl.load(table + at // PAGE)
    return blocks.to(tl.int64) * PAGE + at % PAGE


_HIGHEST = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["key_stride"], do_not_specialize_on_alignment=["slot_mapping"])
def store_keys_kernel(  # type: ignore[no-untyped-def]
    key, cache, slot_mapping, key_stride, D: tl.constexpr, PDL: tl.constexpr
):
    """``cache[slot_mapping[t]] = key[t]``. Grid: ``(T,)``.

    Shapes: key ``[T, D]``, cache ``[slots, D]``, slot_mapping ``[T]``.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    i = tl.arange(0, triton.next_power_of_2(D))
    tl.store(cache + slot * D + i, tl.load(key + token * key_stride + i, mask=i < D), mask=i < D)


@triton.jit
def ordered_bits(x):  # type: ignore[no-untyped-def]
    """Float32 as int32 with the same order; both zeros are equal, NaN is the highest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & _HIGHEST), _HIGHEST)


@triton.jit(
    # A value that depends on the batch must not recompile the kernel.
    do_not_specialize=[
        "first_token", "q_token_stride", "q_head_stride", "w_token_stride", "w_head_stride",
        "table_stride", "num_rows", "num_workers", "width",
    ],
    do_not_specialize_on_alignment=["weights", "starts", "contexts", "tables", "table_rows"],
)  # fmt: skip
def index_scores_kernel(  # type: ignore[no-untyped-def]
    query, weights, cache, scores, starts, contexts, tables, table_rows, scale, first_token,
    q_token_stride, q_head_stride,  # in units of STEP elements
    w_token_stride, w_head_stride, table_stride, num_rows, num_workers, width,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``scores[t, j] = sum_h weights[t, h] * relu(scale * query[t, h] . key[j])`` as
    :func:`ordered_bits`, for the positions that t sees, if there are more than NUM_CHOSEN.

    Grid: ``(num_workers, n)``. The workers of a token share its tiles; token t of the n is token
    ``first_token + t`` of the step. Shapes: query ``[T, H, D]``, weights ``[T, H]``, cache
    ``[blocks, PAGE, 1, D]``, scores ``[n, width]``, starts ``[B + 1]``, contexts ``[B]``, tables
    ``[rows, M]``, table_rows ``[B]``.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    D_PAD: tl.constexpr = dot_size(D)
    H_PAD: tl.constexpr = dot_size(H)
    DTYPE: tl.constexpr = cache.dtype.element_ty
    line = tl.program_id(1)
    token = first_token + line
    row, last = row_of_token(starts, contexts, num_rows, token)
    if last < NUM_CHOSEN:  # padding, or no selection needed
        return
    heads = tl.arange(0, H_PAD)
    dims = tl.arange(0, D_PAD)
    offsets = tl.arange(0, BLOCK_N)
    source = query + token.to(tl.int64) * q_token_stride * STEP
    source += (heads.to(tl.int64) * q_head_stride * STEP)[:, None] + dims[None, :]
    mask = (heads < H)[:, None] & (dims < D)[None, :]
    q = tl.trans(tl.load(source, mask=mask, other=0.0).to(DTYPE))
    of_heads = weights + token.to(tl.int64) * w_token_stride + heads.to(tl.int64) * w_head_stride
    w = tl.load(of_heads, mask=heads < H, other=0.0).to(tl.float32)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    target = scores + line.to(tl.int64) * width
    step = num_workers * BLOCK_N
    for start in tl.range(tl.program_id(0) * BLOCK_N, last + 1, step):
        at = tl.minimum(start + offsets, last)
        blocks = tl.load(table + at.to(tl.uint32) // PAGE).to(tl.int64)
        slots = blocks * PAGE + at % PAGE
        # Keys of unused slots are not read: beyond the last position, the last one is read again.
        keys = tl.load(cache + (slots * D)[:, None] + dims[None, :], mask=(dims < D)[None, :])
        products = tl.dot(keys, q, input_precision=dot_precision(DTYPE))
        products = tl.maximum(products * scale, 0.0, propagate_nan=tl.PropagateNan.ALL)
        # Beyond H both factors are 0.
        score = tl.sum(products * w[None, :], 1)
        tl.store(target + start + offsets, ordered_bits(score), mask=start + offsets <= last)


@triton.jit
def _tile(scores, start, last, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(scores of TILE positions from ``start`` on, mask of those that exist)."""
    at = start + tl.arange(0, TILE)
    return tl.load(scores + at, mask=at <= last, other=0), at <= last


@triton.jit
def _count(first, is_first, scores, last, bound, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of positions up to ``last`` with a score above ``bound``; those of the first tile
    are ``first``."""
    total = tl.sum((is_first & (first > bound)).to(tl.int32))
    for start in range(TILE, last + 1, TILE):
        values, exists = _tile(scores, start, last, TILE)
        total += tl.sum((exists & (values > bound)).to(tl.int32))
    return total


@triton.jit(
    do_not_specialize=["first_token", "num_rows", "width"],
    do_not_specialize_on_alignment=["starts", "contexts"],
)
def choose_kernel(  # type: ignore[no-untyped-def]
    scores, chosen, starts, contexts, first_token, num_rows, width,
    NUM_CHOSEN: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``chosen[t]``: the positions in view with the NUM_CHOSEN highest scores, in order. If there
    are no more than that: all, followed by -1.

    Grid: ``(n,)``, tokens as in :func:`index_scores_kernel`. Shapes: scores ``[n, width]``, chosen
    ``[T, NUM_CHOSEN]``. Rows of scores up to TILE are read once, longer ones in each of up to 32
    rounds.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    line = tl.program_id(0)
    token = first_token + line
    _, last = row_of_token(starts, contexts, num_rows, token)
    target = chosen + token.to(tl.int64) * NUM_CHOSEN
    if last < NUM_CHOSEN:
        for start in range(0, NUM_CHOSEN, TILE):
            at = start + tl.arange(0, TILE)
            tl.store(target + at, tl.where(at <= last, at, -1), mask=at < NUM_CHOSEN)
        return
    scores += line.to(tl.int64) * width
    first, is_first = _tile(scores, 0, last, TILE)
    # NUM_CHOSEN or more scores are >= ``low``; fewer are > ``high``.
    low = tl.min(tl.where(is_first, first, _HIGHEST))
    high = tl.max(tl.where(is_first, first, -_HIGHEST - 1))
    for start in range(TILE, last + 1, TILE):
        values, exists = _tile(scores, start, last, TILE)
        low = tl.minimum(low, tl.min(tl.where(exists, values, _HIGHEST)))
        high = tl.maximum(high, tl.max(tl.where(exists, values, -_HIGHEST - 1)))
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and never too large
        count = _count(first, is_first, scores, last, middle - 1, TILE)
        # Exactly NUM_CHOSEN: no need to search for the lowest of them.
        high = tl.where(count > NUM_CHOSEN, high, tl.where(count == NUM_CHOSEN, middle, middle - 1))
        low = tl.where(count >= NUM_CHOSEN, middle, low)
    quota = NUM_CHOSEN - _count(first, is_first, scores, last, low, TILE)
    # In the tiles before: positions above the threshold, and at it.
    num_above, num_equal = 0, 0
    for start in range(0, last + 1, TILE):
        values, exists = _tile(scores, start, last, TILE)
        is_above = (exists & (values > low)).to(tl.int32)
        is_equal = (exists & (values == low)).to(tl.int32)
        counts = tl.cumsum((is_above << 16) + is_equal, 0)
        above_before = num_above + (counts >> 16) - is_above
        equal_before = num_equal + (counts & 0xFFFF) - is_equal
        is_chosen = (is_above == 1) | ((is_equal == 1) & (equal_before < quota))
        at = above_before + tl.minimum(equal_before, quota)
        tl.store(target + at, start + tl.arange(0, TILE), mask=is_chosen)
        num_above += tl.sum(is_above)
        num_equal += tl.sum(is_equal)


_MAX_SCORE_BYTES = 256 << 20  # of the tokens that are scored together
_NUM_PROGRAMS = 528  # with fewer tokens, about this many programs share their contexts
_LARGEST_TILE = 8192  # scores that a program keeps in registers
_SCORES_PER_WARP = 512


def index_topk(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    scale: float,
    num_chosen: int,
    max_score_bytes: int = _MAX_SCORE_BYTES,
) -> Tensor:
    """Same as :func:`..ops.index_topk`; positions are in order, any block size.

    Tokens are scored in groups, so that scores take at most ``max_score_bytes``, or the scores of
    one token.
    """
    num_tokens = len(query)
    num_rows, table_width = len(context_lens), block_tables.shape[1]
    page, dim = cache.shape[1], cache.shape[3]
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=query.device)
    if num_tokens == 0 or num_rows == 0:
        return chosen.fill_(-1)
    options = overlap_options(query.device)
    key = key if key.stride(1) == 1 else key.contiguous()
    store_keys_kernel[(num_tokens,)](
        key, cache, slot_mapping, key.stride(0), D=dim, num_warps=1, **options
    )
    query = query if query.stride(2) == 1 else query.contiguous()
    token_stride, head_stride, step = vector_strides(query)
    batch = query_starts, context_lens
    # If the selection covers whole contexts, no scores are needed.
    width = table_width * page if table_width * page > num_chosen else 0
    at_once = max(1, max_score_bytes // (4 * width)) if width else num_tokens
    at_once = min(at_once, num_tokens)
    scores = torch.empty(at_once if width else 0, width, dtype=torch.int32, device=query.device)
    block_n, num_warps = (32, 8) if cache.dtype == torch.float32 else (128, 4)
    num_workers = min(triton.cdiv(width, block_n), triton.cdiv(_NUM_PROGRAMS, at_once))
    tile = min(_LARGEST_TILE, triton.next_power_of_2(max(width, num_chosen)))
    for first in range(0, num_tokens, at_once):
        num = min(at_once, num_tokens - first)
        if width:
            index_scores_kernel[(num_workers, num)](
                query, weights, cache, scores, *batch, block_tables, table_rows, scale,
                first, token_stride, head_stride, *weights.stride(), block_tables.stride(0),
                num_rows, num_workers, width,
                H=query.shape[1],
                D=dim,
                PAGE=page,
                STEP=step,
                NUM_CHOSEN=num_chosen,
                BLOCK_N=block_n,
                num_warps=num_warps,
                num_stages=3,
                **options,
            )  # fmt: skip
        choose_kernel[(num,)](
            scores, chosen, *batch, first, num_rows, width,
            NUM_CHOSEN=num_chosen,
            TILE=tile,
            num_warps=max(1, min(16, tile // _SCORES_PER_WARP)),
            **options,
        )  # fmt: skip
    return chosen
