"""Native matmuls with 4-bit and 8-bit weights: their error, and a row's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagespec.kernels.native import calls
from pagespec.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built")
# The weights of SmolLM2-135M but for its head, a part of that, and small ones.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 576), (1, 32), (50, 96)]
FORMATS: list[calls.Format] = ["int4", "int4_float32", "int8"]


class Weight:
    """A random weight of a format: what is multiplied with, and what it stands for."""

    def __init__(self, format: calls.Format, num_outputs: int, num_inputs: int) -> None:
        torch.manual_seed(0)
        self.format, self.num_outputs = format, num_outputs
        is_int4 = format != "int8"
        dtype = torch.float32 if format == "int4_float32" else torch.float16
        values = torch.randint(16 if is_int4 else 256, (num_outputs, num_inputs))
        numbers = [torch.rand(num_outputs, num_inputs // 32).add(0.5).to(dtype).float()]
        if is_int4:
            numbers.append(torch.randn(num_outputs, num_inputs // 32).to(dtype).float())
        wide = values.double() if is_int4 else values.double() - 128
        self.dense = wide * numbers[0].double().repeat_interleave(32, 1)
        if is_int4:
            self.dense += numbers[1].double().repeat_interleave(32, 1)
        self.values = calls.pack_values(values.to(torch.uint8), is_int4)
        self.numbers = calls.pack_numbers(numbers, dtype)

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        size = self.num_outputs
        return calls.linear(x, self.values, self.numbers, bias, size, self.format, starts)


def rounded(x: Tensor) -> Tensor:
    """Rows as the kernels round them: to 8 bits, with a scale for each 32 elements."""
    groups = x.unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    values = torch.round(groups * torch.where(most > 0, torch.tensor(127.0) / most, 0))
    return (values.double() * (most / 127).double()).flatten(-2)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error(shape: tuple[int, int], format: calls.Format) -> None:
    """Of the sums next to none; of the rows, half of the 127th part of their largest element."""
    weight, rows = Weight(format, *shape), torch.randn(19, shape[1])
    found = weight(rows).double()
    size = weight.dense.abs().mean() * shape[1] ** 0.5
    assert (found - rounded(rows) @ weight.dense.t()).abs().max() < 1e-5 * size
    bound = rows.unflatten(1, (-1, 32)).abs().amax(-1).double() / 127 / 2
    bound = bound.repeat_interleave(32, 1) @ weight.dense.abs().t()
    assert ((found - rows.double() @ weight.dense.t()).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_one_set_of_bits(shape: tuple[int, int], format: calls.Format) -> None:
    weight, rows = Weight(format, *shape), torch.randn(300, shape[1])
    expected = weight(rows)
    for count in (*range(1, 65), 65, 100, 257):
        first = 7 * count % (300 - count)
        group = slice(first, first + count)
        assert torch.equal(weight(rows[group]), expected[group]), count


@pytest.mark.parametrize("format", FORMATS)
def test_bias_shape_and_padding(format: calls.Format) -> None:
    weight, bias, rows = Weight(format, 50, 64), torch.randn(50), torch.randn(2, 3, 64)
    plain = weight(rows)
    assert plain.shape == (2, 3, 50)
    assert torch.equal(plain + bias, weight(rows, bias))
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    padded = weight(rows.view(1, 6, 64), None, starts)
    assert torch.equal(padded[0, :4], plain.view(6, 50)[:4])
    assert (padded[0, 4:] == 0).all()
    assert weight(rows[:0]).shape == (0, 3, 50)


@pytest.mark.parametrize("format", FORMATS)
def test_values_that_are_not_finite_stay_so(format: calls.Format) -> None:
    weight, rows = Weight(format, 50, 64), torch.randn(3, 64)
    rows[0, 40], rows[1, 3] = torch.nan, torch.inf
    found = weight(rows)
    assert found[0].isnan().all()
    assert not found[1].isfinite().any()
    assert found[2].isfinite().all()
    assert (weight(torch.zeros(1, 64)) == 0).all()
