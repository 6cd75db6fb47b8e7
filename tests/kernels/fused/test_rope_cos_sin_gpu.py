"""The table of rotation angles on a GPU: the bits of torch's own operations there."""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels.fused.dispatch import rope_table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("half", "scaling"), [(8, 1.0), (24, 1.3), (64, 1.0)])
def test_the_table_has_the_bits_of_torch(half: int, scaling: float, dtype: torch.dtype) -> None:
    frequencies = 10_000.0 ** -torch.linspace(0, 1, half, device="cuda")[None, :, None]
    positions = torch.arange(40_960, device="cuda")[None, None, :]
    angles = (frequencies * positions.float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = rope_table(frequencies, positions, scaling, dtype)
    assert torch.equal(cos, (angles.cos() * scaling).to(dtype))
    assert torch.equal(sin, (angles.sin() * scaling).to(dtype))
