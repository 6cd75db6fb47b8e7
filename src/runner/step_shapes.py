"""The buckets that steps are padded to: one CUDA graph per shape."""

from __future__ import annotations

from typing import NamedTuple

from ..compile.step_inputs import MIN_SIZE

_FEW_ROWS = 8
_MAX_TOKENS_OF_FEW_ROWS = 2048
_MANY_ROWS = 256  # from here on a matmul takes longer for more tokens


class StepShape(NamedTuple):
    """Sizes a step is padded to: those of a captured graph.

    Attributes:
        num_tokens, num_rows: of the step. A decode step has one token a row.
        is_decode: every row computes one token and samples.
    """

    num_tokens: int
    num_rows: int
    is_decode: bool


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of decode steps to capture: powers of two and the sizes halfway from 64 on.

    Rows of padding cost next to nothing below 256 (a matmul reads its whole weight for any number
    of rows, attention reads nothing for them, and they go to no expert). Each graph costs memory
    and start-up time, most of it for loading the library's kernels for one more number of rows.
    One request runs in the bucket of 2, the smallest batch the captured graph is valid for.
    """
    sizes = [2, 4, 8, 16, 32, *(n * 2**k for k in range(5, 16) for n in (2, 3))]
    buckets = [size for size in sizes if size < max_num_seqs]
    return (*buckets, max(max_num_seqs, MIN_SIZE))


def mixed_shapes(max_num_tokens: int, max_num_rows: int) -> tuple[StepShape, ...]:
    """Shapes to capture for steps that are not pure decode: up to the token budget, for all rows,
    and for few of them where that matters to the time to a first token.

    Under a steady load of many requests, most steps are a token of every row and a prompt or two:
    sizes are close to one another there, since padding is computed like any token.
    """
    far = {64, 256, 512, *(1024 * 2**k for k in range(16)), 12288}
    near = {n * max_num_rows // 2 for n in (3, 4, 5, 6)} if max_num_rows >= _MANY_ROWS else set()
    near -= far
    sizes = sorted(size for size in far | near if size < max_num_tokens)
    shapes = []
    for size in [*sizes, max(max_num_tokens, MIN_SIZE)]:
        shapes.append(StepShape(size, max(max_num_rows, MIN_SIZE), False))
        if size in near or size > _MAX_TOKENS_OF_FEW_ROWS:
            continue
        if max_num_rows > _FEW_ROWS:
            shapes.append(StepShape(size, _FEW_ROWS, False))
    return tuple(shapes)
