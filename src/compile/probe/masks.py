"""Derive the attention pattern (causal, sliding window, chunks) from a mask closure of
transformers, and the slopes from an ALiBi bias.

Mask builders pass a closure ``mask_function(batch_idx, head_idx, q_idx, kv_idx) -> bool`` to the
mask interface. This module evaluates it at chosen index tensors and compares it with the patterns
that the kernels compute: causal, and causal within a sliding window or within chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# No supported context is this long, so a larger window has no effect.
_FAR = 1 << 24


def _evaluate(mask_function: MaskFunction, head: int, q_index: Tensor, kv_index: Tensor) -> Tensor:
    batch_index = torch.zeros((), dtype=torch.int64)
    result = mask_function(batch_index, torch.tensor(head), q_index, kv_index)
    return torch.as_tensor(result).broadcast_to(q_index.shape).bool()


class MaskPattern(NamedTuple):
    """The past positions that a causal mask shows: a window of positions, or the query's own chunk;
    all if both are 0."""

    window: int = 0
    chunk: int = 0


def pattern_of_mask(mask_function: MaskFunction, num_heads: int) -> MaskPattern | None:
    """The pattern of a mask closure.

    Returns:
        None if it has another pattern (bidirectional, packed, per head, ...), or if the closure
        cannot be evaluated at positions beyond the probe's own.
    """
    try:
        size = _first_query_without(mask_function)
        patterns = [MaskPattern(size), MaskPattern(chunk=size)] if size else [MaskPattern()]
        for pattern in patterns:
            q_index, kv_index = _sample_points(size)
            expected = kv_index <= q_index
            if pattern.window:
                expected &= kv_index > q_index - size
            if pattern.chunk:
                expected &= kv_index >= q_index // size * size
            if all(
                torch.equal(_evaluate(mask_function, head, q_index, kv_index), expected)
                for head in (0, num_heads - 1)
            ):
                return pattern
    except (IndexError, RuntimeError, TypeError):
        return None
    return None


def _first_query_without(mask_function: MaskFunction) -> int:
    """The first query that does not see position 0; 0 if all do."""

    def sees(query: int) -> bool:
        return bool(_evaluate(mask_function, 0, torch.tensor([query]), torch.tensor([0])))

    if sees(_FAR):
        return 0
    low, high = 0, _FAR  # sees it; does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sees(middle) else (low, middle)
    return high


def _sample_points(size: int) -> tuple[Tensor, Tensor]:
    """(query, key) positions that distinguish the patterns: dense near the diagonal and near the
    edges of a window or chunk, for queries in many residue classes, and scattered elsewhere."""
    step = max(size, 97)
    queries = torch.cat(
        [torch.arange(40), torch.arange(1, 60) * step // 7 + 3, torch.arange(1, 30) * 104_729]
    )
    near = torch.arange(-6, 7)
    offsets = [near, -size + near, torch.linspace(-4 * step, 0, 41).long()]
    pairs = [(queries.unsqueeze(1), queries.unsqueeze(1) + offset) for offset in offsets]
    pairs.append((queries.unsqueeze(1), (queries.unsqueeze(1) * torch.arange(17)) // 17))
    if size:
        pairs.append((queries.unsqueeze(1), (queries // size * size).unsqueeze(1) + near))
    q_index = torch.cat([q.expand_as(kv).reshape(-1) for q, kv in pairs])
    kv_index = torch.cat([kv.reshape(-1) for _, kv in pairs])
    valid = kv_index >= 0
    return q_index[valid], kv_index[valid]


def alibi_slopes(bias: Tensor, num_heads: int, num_tokens: int) -> tuple[float, ...] | None:
    """The slopes of a bias ``[1, Hq, 1 or T, T]`` on scores that grows linearly with the position
    of the key; None if it does not.

    It may differ by a constant per query and head, which does not change a softmax.
    """
    if bias.dim() != 4 or bias.shape[:2] != (1, num_heads) or bias.shape[3] != num_tokens:
        return None
    rows = bias[0].float()
    # A slope is exact where the bias is near 0.
    first = bool(rows[0, 0, 0].abs() <= rows[0, 0, -1].abs())
    slopes = rows[:, 0, 1] - rows[:, 0, 0] if first else rows[:, 0, -1] - rows[:, 0, -2]
    expected = slopes[:, None, None] * torch.arange(num_tokens, device=bias.device)
    tolerance = 1e-5 if bias.dtype == torch.float32 else 2e-2
    error = (rows - rows[:, :, :1] - expected).abs().max()
    if not bool(error <= tolerance * rows.abs().max()):
        return None
    return tuple(slopes.tolist())
