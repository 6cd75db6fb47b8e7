"""Masked rows by the compiled kernels, against the same kernels on logits that are masked first."""

from __future__ import annotations

import os

import pytest
import torch

from pagespec import SamplingParams

pytest.importorskip("triton")
from pagespec.kernels.sampling.draw_functions import Rows
from pagespec.kernels.sampling.gumbel import sample_simple
from pagespec.kernels.sampling.top_k_top_p import sample_truncated
from pagespec.runner.row_params import truncated_fields
from tests.kernels.sampling.test_masked_rows import KINDS, flags_of


def check(device: str, dtype: torch.dtype, num_rows: int, vocab: int) -> None:
    torch.manual_seed(0)
    # Rounded, so that many are equal.
    logits = (torch.randn(num_rows, vocab) * 8).round().div(4).to(dtype)
    masks = torch.randint(-(1 << 31), (1 << 31) - 1, (num_rows, vocab // 32 + 3)).int()
    masks[1::3] &= masks.flip(0)[1::3] & masks.roll(1, 0)[1::3]
    masks[2::3] = 0
    masks[2::3, 1] = 1 << 7
    places = torch.arange(0, num_rows, 2).int()
    numbers = places.flip(0)
    copy = logits.clone()
    for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
        copy[place, ~flags_of(masks[number].numpy(), vocab)] = float("-inf")
    params = [SamplingParams(**KINDS[i // 2 % len(KINDS)]) for i in range(num_rows)]
    fields = torch.from_numpy(truncated_fields(params))
    fields = fields[:, fields[0] % 2 == 0].contiguous()
    numbers_of_fields = numbers[fields[0].long() // 2]
    own = [
        torch.tensor([p.temperature for p in params]),
        torch.arange(num_rows) * 77 - (1 << 40),
        torch.arange(num_rows) + 5,
    ]
    tensors = (logits, copy, masks, places, numbers, fields, numbers_of_fields, *own)
    sent = [tensor.to(device) for tensor in tensors]
    logits, copy, masks, places, numbers, fields, numbers_of_fields, *own = sent
    found, expected = [torch.full((num_rows,), -1, device=device) for _ in range(2)]
    sample_simple(copy, *own, expected)
    expected[1::2] = -1
    sample_simple(logits, *own, found, rows=Rows(places, None, numbers, masks))
    assert torch.equal(found, expected)
    sample_truncated(copy, fields.view(-1), *own, expected)
    rows = Rows(fields[0], None, numbers_of_fields, masks)
    sample_truncated(logits, fields.view(-1), *own, found, rows=rows)
    assert torch.equal(found, expected)
    assert len(found.unique()) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [151_936, 50_257, 513])
def test_tokens_are_those_of_masked_logits(dtype: torch.dtype, vocab: int) -> None:
    check("cuda", dtype, 192, vocab)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled")
def test_the_same_when_interpreted() -> None:
    check("cpu", torch.float32, 24, 300)
