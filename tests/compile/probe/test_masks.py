"""The mask pattern that a mask closure computes, and the slopes of a bias."""

from __future__ import annotations

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from pagespec.compile.probe.masks import MaskPattern, alibi_slopes, pattern_of_mask


def test_patterns_of_mask_closures() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert pattern_of_mask(causal_mask_function, 4) == MaskPattern()
    for window in (1, 2, 24, 4096):
        found = pattern_of_mask(sliding_window_causal_mask_function(window), 4)
        assert found == MaskPattern(window)
    assert pattern_of_mask(bidirectional_mask_function, 4) is None
    for chunk in (7, 64, 8192):
        found = pattern_of_mask(chunked_causal_mask_function(chunk, zero), 4)
        assert found == MaskPattern(chunk=chunk)
    # A window for one head only, and a mask that is known at the probe's own positions only.
    assert pattern_of_mask(lambda b, h, q, k: (k <= q) & ((h == 0) | (k > q - 5)), 4) is None
    packed = torch.zeros(1, 8)
    shifted = chunked_causal_mask_function(24, zero + 5)
    assert pattern_of_mask(shifted, 4) is None
    assert pattern_of_mask(lambda b, h, q, k: packed[b, q] == packed[b, k], 4) is None


def test_slopes_of_a_bias() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.7])
    keys = torch.arange(300)
    bias = (slopes[:, None, None] * keys)[None]
    assert alibi_slopes(bias, 3, 300) == tuple(slopes.tolist())
    from_the_last = (slopes[:, None, None] * (keys - 299))[None]
    assert alibi_slopes(from_the_last, 3, 300) == tuple(slopes.tolist())
    of_queries = bias - torch.randn(1, 3, 300, 1)
    assert torch.tensor(alibi_slopes(of_queries, 3, 300)).allclose(slopes, atol=1e-4)
    assert alibi_slopes(bias.bfloat16(), 3, 300) is not None
    # Rounded to few digits in a float32 model, curved, of other heads or keys.
    assert alibi_slopes(bias.bfloat16().float(), 3, 300) is None
    assert alibi_slopes(bias * keys, 3, 300) is None
    assert alibi_slopes(bias, 4, 300) is None
    assert alibi_slopes(bias, 3, 299) is None
