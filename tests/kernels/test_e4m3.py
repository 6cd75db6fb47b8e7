"""e4m3 values: every bit pattern, and rounding, against the format's formula."""

from __future__ import annotations

import numpy as np
import torch

from pagespec.kernels import e4m3
from tests.support.quantized_files import e4m3_table, nearest_e4m3


def test_every_number_is_decoded() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = (e4m3.decode(bits) * e4m3.DECODED_UNIT).double().numpy()
    table = e4m3_table()
    is_number = ~np.isnan(table)
    assert is_number.sum() == 254
    assert np.array_equal(numbers[is_number], table[is_number])
    assert np.array_equal(np.signbit(numbers), np.arange(256) > 127)


def test_encoded_to_the_nearest() -> None:
    table = np.unique(e4m3_table()[:127])
    middles = (table[1:] + table[:-1]) / 2
    numbers = np.concatenate([table, middles, np.linspace(-448, 448, 9973)]).astype(np.float32)
    found = e4m3.encode(torch.from_numpy(numbers)).numpy()
    assert np.array_equal(found, nearest_e4m3(numbers))


def test_nan_is_found() -> None:
    bits = torch.tensor([0, 0x7E, 0x80, 0xFE], dtype=torch.uint8)
    assert not e4m3.has_nan(bits)
    for nan in (0x7F, 0xFF):
        assert e4m3.has_nan(torch.cat((bits, torch.tensor([nan], dtype=torch.uint8))))


def test_scales() -> None:
    """Zeros, and values too small to divide, give all zeros; infinity gives an infinite scale."""
    largest = torch.tensor([0.0, 1e-44, 448.0, 3.0, torch.inf])
    scales = e4m3.scale_for(largest)
    assert bool((scales > 0).all())
    assert scales[2] == 1
    assert e4m3.encode(largest[:2] / scales[:2]).tolist() == [0, 0]
    assert e4m3.encode(largest[3:4] / scales[3:4]).tolist() == [0x7E]
    assert scales[4] == torch.inf
