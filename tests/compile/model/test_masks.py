"""The window that a mask closure stands for."""

from __future__ import annotations

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from pagespec.compile.model.masks import window_of_mask


def test_windows_of_mask_closures() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert window_of_mask(causal_mask_function, 4) == 0
    for window in (1, 2, 24, 4096):
        assert window_of_mask(sliding_window_causal_mask_function(window), 4) == window
    assert window_of_mask(bidirectional_mask_function, 4) is None
    for chunk in (7, 64, 8192):
        assert window_of_mask(chunked_causal_mask_function(chunk, zero), 4) is None
    # A window for one head only, and a mask that is known at the probe's own positions only.
    assert window_of_mask(lambda b, h, q, k: (k <= q) & ((h == 0) | (k > q - 5)), 4) is None
    packed = torch.zeros(1, 8)
    assert window_of_mask(lambda b, h, q, k: packed[b, q] == packed[b, k], 4) is None
