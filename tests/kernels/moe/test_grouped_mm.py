"""Grouped matmuls under Triton's interpreter, against a loop over the experts."""

from __future__ import annotations

import pytest
import torch

triton_grouped = pytest.importorskip("pagespec.kernels.moe.grouped_mm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    "counts",
    [[3, 0, 17, 1], [0, 0, 0, 5], [40, 33, 0, 16], [1, 1, 1, 1], [0, 80, 0, 0], [0, 0, 0, 0]],
)
def test_equals_a_loop_over_the_experts(
    counts: list[int], is_transposed: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows, k_size, num_outs = sum(counts) + 2, 64, 40
    x = torch.randn(num_rows, k_size, generator=generator).to(dtype)
    shape = (4, num_outs, k_size) if is_transposed else (4, k_size, num_outs)
    weight = torch.randn(shape, generator=generator).to(dtype)
    weight = weight.transpose(1, 2) if is_transposed else weight
    offs = torch.tensor(counts).cumsum(0).int()
    out = triton_grouped.grouped_mm(x, weight, offs)
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        expected = (x[begin:end].float() @ weight[expert].float()).to(dtype)
        torch.testing.assert_close(out[begin:end], expected)
        begin = end
    assert (out[begin:] == 0).all()


def test_a_row_has_the_same_bits_at_every_position() -> None:
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, 32, generator=generator)
    weight = torch.randn(3, 32, 24, generator=generator)
    found = []
    for before, behind in ((0, 0), (5, 1), (20, 40)):
        x = torch.randn(before + 1 + behind, 32, generator=generator)
        x[before] = row
        offs = torch.tensor([0, len(x), len(x)]).int()
        found.append(triton_grouped.grouped_mm(x, weight, offs)[before])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_outs", [40, 64])
def test_a_gate_is_applied_as_behind_the_product(num_outs: int, is_transposed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(30, 64, generator=generator).half()
    shape = (3, 2 * num_outs, 64) if is_transposed else (3, 64, 2 * num_outs)
    weight = torch.randn(shape, generator=generator).half()
    weight = weight.transpose(1, 2) if is_transposed else weight
    offs = torch.tensor([20, 20, 28]).int()
    gate, up = triton_grouped.grouped_mm(x, weight, offs).chunk(2, 1)
    expected = torch.nn.functional.silu(gate.float()).half() * up
    found = triton_grouped.grouped_mm(x, weight, offs, has_gate=True)
    torch.testing.assert_close(found, expected)
    assert (found[28:] == 0).all()
