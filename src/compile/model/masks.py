"""Reads the attention pattern (causal, sliding window) off a mask closure of transformers.

Mask builders hand a closure ``mask_function(batch_idx, head_idx, q_idx, kv_idx) -> bool`` to the
mask interface. It is evaluated here at chosen index tensors and compared with the two patterns
the kernels compute: causal, and causal within a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# No supported context reaches this far, so a window larger than it is no window.
_FAR = 1 << 24


def _evaluate(mask_function: MaskFunction, head: int, q_index: Tensor, kv_index: Tensor) -> Tensor:
    batch_index = torch.zeros((), dtype=torch.int64)
    result = mask_function(batch_index, torch.tensor(head), q_index, kv_index)
    return torch.as_tensor(result).broadcast_to(q_index.shape).bool()


def window_of_mask(mask_function: MaskFunction, num_heads: int) -> int | None:
    """The window of a mask closure: 0 for causal, w > 0 for a causal window of w positions.

    Returns:
        None if the pattern is neither (chunked, bidirectional, packed, per head, ...), or if the
        closure cannot be evaluated at positions beyond the probe's own.
    """
    try:
        far = torch.tensor([_FAR])
        if bool(_evaluate(mask_function, 0, far, torch.tensor([0]))):
            window = 0
        else:
            low, high = 0, _FAR  # not seen; seen
            while high - low > 1:
                middle = (low + high) // 2
                if bool(_evaluate(mask_function, 0, far, torch.tensor([middle]))):
                    high = middle
                else:
                    low = middle
            window = _FAR - low
        for head in (0, num_heads - 1):
            q_index, kv_index = _sample_points(window)
            expected = kv_index <= q_index
            if window:
                expected &= kv_index > q_index - window
            if not torch.equal(_evaluate(mask_function, head, q_index, kv_index), expected):
                return None
    except (IndexError, RuntimeError, TypeError):
        return None
    return window


def _sample_points(window: int) -> tuple[Tensor, Tensor]:
    """(query, key) positions that tell the patterns apart: dense near the diagonal and near both
    edges of the window, for queries in many residue classes, and scattered elsewhere."""
    step = max(window, 97)
    queries = torch.cat(
        [torch.arange(40), torch.arange(1, 60) * step // 7 + 3, torch.arange(1, 30) * 104_729]
    )
    near = torch.arange(-6, 7)
    offsets = [near, -window + near, torch.linspace(-4 * step, 0, 41).long()]
    pairs = [(queries.unsqueeze(1), queries.unsqueeze(1) + offset) for offset in offsets]
    pairs.append((queries.unsqueeze(1), (queries.unsqueeze(1) * torch.arange(17)) // 17))
    q_index = torch.cat([q.expand_as(kv).reshape(-1) for q, kv in pairs])
    kv_index = torch.cat([kv.reshape(-1) for _, kv in pairs])
    valid = kv_index >= 0
    return q_index[valid], kv_index[valid]
