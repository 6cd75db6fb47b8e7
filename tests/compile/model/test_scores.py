"""Attention scores are recognised in every spelling, and rejected if they compute anything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagespec.compile.fx.nodes import calls
from pagespec.compile.model.scores import Scores, Unreadable, find_product, find_scores, trace_part

LOWEST = torch.finfo(torch.float32).min
Written = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _Attention(nn.Module):
    """``written(query, transposed keys, mask, bias)`` are the scores."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor
    ) -> Tensor:
        scores = self.written(query, key.transpose(-1, -2), mask, bias)
        return torch.matmul(F.dropout(scores.softmax(dim=-1), 0.1, False), value)


def _read(written: Written, *, is_hidden: bool = False) -> Scores:
    query, key, value = (torch.randn(1, 3, 7, 4) for _ in range(3))
    mask = torch.zeros(1, 1, 7, 7)
    arguments = query, key, value, mask.bool() if is_hidden else mask, torch.zeros(1, 3, 1, 7)
    gm = trace_part(_Attention(written), arguments, {})
    (softmax,) = (node for node in gm.graph.nodes if calls(node, "softmax"))
    assert calls(find_product(softmax), "matmul")
    return find_scores(softmax)


@pytest.mark.parametrize(
    ("written", "scale", "bias_scale"),
    [
        (lambda q, k, mask, _: q @ k * 0.5 + mask, 0.5, None),
        (lambda q, k, mask, _: q.matmul(k).mul(0.5).add(mask), 0.5, None),
        (lambda q, k, mask, _: torch.add(torch.matmul(q, k) / 4, mask).float(), 0.25, None),
        (lambda q, k, mask, _: torch.div(q @ k, 4).mul(2.0) + mask, 0.5, None),
        (lambda q, k, mask, bias: q @ k / 4 + bias + mask, 0.25, 1.0),
        (lambda q, k, mask, bias: (q @ k + bias) * 0.5 + mask, 0.5, 0.5),
        (lambda q, k, mask, bias: ((q @ k) * 3.0 + bias[:, :, :, :7]) * 0.5 + mask, 1.5, 0.5),
    ],
)
def test_forms_that_are_read(written: Written, scale: float, bias_scale: float | None) -> None:
    scores = _read(written)
    assert (scores.scale, scores.own_window) == (scale, None)
    assert scores.mask is not None
    assert scores.mask.op == "placeholder"
    assert (scores.bias is None) == (bias_scale is None)
    assert scores.bias_scale == (1.0 if bias_scale is None else bias_scale)


def test_a_filled_mask_is_read() -> None:
    scores = _read(lambda q, k, mask, _: (q @ k / 2).masked_fill(mask, LOWEST), is_hidden=True)
    assert scores.mask is not None
    assert (scores.mask.op, scores.scale) == ("placeholder", 0.5)


@pytest.mark.parametrize(
    ("written", "source"),
    [
        (lambda q, k, mask, _: torch.add(q @ k, mask, alpha=2.0), "add"),
        (lambda q, k, mask, _: torch.div(q @ k, 4, rounding_mode="floor") + mask, "div"),
        (lambda q, k, mask, bias: torch.add(q @ k, bias, alpha=2.0) + mask, "add"),
        (lambda q, k, mask, _: (q @ k).tanh() + mask, "tanh"),
        (lambda q, k, mask, bias: (q @ k) * bias + mask, "mul"),
        (lambda q, k, mask, bias: q @ k + bias + bias + mask, "add"),
    ],
)
def test_other_scores_are_refused(written: Written, source: str) -> None:
    with pytest.raises(Unreadable, match=f"scores come from '{source}'"):
        _read(written)


def test_a_mask_that_hides_too_little_is_refused() -> None:
    with pytest.raises(Unreadable, match="scores come from 'masked_fill'"):
        _read(lambda q, k, mask, _: (q @ k).masked_fill(mask, -10.0), is_hidden=True)
