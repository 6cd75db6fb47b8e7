"""Host side of top-k indexers on a GPU: grids, launches and the memory that scores take.

Nothing waits for the device, so that calls can be captured in a CUDA graph and replayed with other
contents.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..device import has_dependent_launch, vector_strides
from .index_kernels import choose_kernel, index_scores_kernel, store_keys_kernel

_MAX_SCORE_BYTES = 256 << 20  # of the tokens that are scored together
_NUM_PROGRAMS = 528  # with fewer tokens, about so many programs share their contexts
_LARGEST_TILE = 8192  # scores that a program keeps in registers
_SCORES_A_WARP = 512


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
    """As :func:`..ops.index_topk`; positions are in order, any block size.

    Tokens are scored in parts, so that scores take no more than ``max_score_bytes``, or those of
    one token.
    """
    num_tokens = len(query)
    num_rows, table_width = len(context_lens), block_tables.shape[1]
    page, dim = cache.shape[1], cache.shape[3]
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=query.device)
    if num_tokens == 0 or num_rows == 0:
        return chosen.fill_(-1)
    pdl = has_dependent_launch(query.device)
    options = {"PDL": pdl, "launch_pdl": pdl}
    key = key if key.stride(1) == 1 else key.contiguous()
    store_keys_kernel[(num_tokens,)](
        key, cache, slot_mapping, key.stride(0), D=dim, num_warps=1, **options
    )
    query = query if query.stride(2) == 1 else query.contiguous()
    token_stride, head_stride, step = vector_strides(query)
    batch = query_starts, context_lens
    # Where all contexts fit into the choice there is nothing to score.
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
            num_warps=max(1, min(16, tile // _SCORES_A_WARP)),
            **options,
        )  # fmt: skip
    return chosen
