"""Linear layers on a CPU: the few-rows matmul, and the row-invariant operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagespec.kernels.fused import cpu_activation
from pagespec.kernels.matmul.cpu import invariant
from pagespec.kernels.matmul.cpu.few_rows import linear_few_rows

# [out, in]: shapes of the tiny models, of SmolLM2-135M (its LM head cut to a twelfth), and odd.
SHAPES = [
    (320, 48),
    (48, 96),
    (4, 48),
    (7, 13),
    (321, 48),
    (576, 576),
    (960, 576),
    (576, 1536),
    (4096, 576),
]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9, 16, 64, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(num_rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, num_rows, 48), torch.randn(160, 48)
    b = torch.randn(160) if bias else None
    out = linear_few_rows(x, weight, b)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, b), rtol=1e-5, atol=1e-4)
    assert out.is_contiguous()
    strided = torch.randn(1, num_rows, 96)[..., :48]
    torch.testing.assert_close(
        linear_few_rows(strided, weight, b),
        torch.nn.functional.linear(strided, weight, b),
        rtol=1e-5,
        atol=1e-4,
    )


def products(shape: tuple[int, int], dtype: torch.dtype) -> list[invariant.MatmulRecipe]:
    """What is chosen for a weight, the fallback, and oneDNN where large weights get it."""
    chosen = [
        invariant.choose_recipe(*shape, dtype, may_pack=may_pack) for may_pack in (False, True)
    ]
    found = [*chosen, invariant.FALLBACK]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        found.append(invariant.MatmulRecipe("onednn", 2))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(130, shape[1]).to(dtype)
    plain = weight
    for product in products(shape, dtype):
        weight = invariant.pack(plain) if product.is_packed else plain
        whole = invariant.linear(x, weight, bias, product)
        close = F.linear(x.double(), plain.double(), bias.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(whole.double(), close, rtol=tolerance, atol=tolerance * 10)
        for begin in (0, 1, 17):
            for count in (*range(1, 34), 64, 65, 100):
                part = invariant.linear(x[begin : begin + count], weight, bias, product)
                assert torch.equal(part, whole[begin : begin + count]), (product, begin, count)


@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rows_at_all_are_multiplied(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    """An expert may get no token."""
    x, weight = torch.randn(*leading, 48).to(dtype), torch.randn(320, 48).to(dtype)
    for product in [
        *products((320, 48), dtype),
        invariant.MatmulRecipe("mkl", 4, is_even=True),
    ]:
        given = invariant.pack(weight) if product.is_packed else weight
        for bias in (None, torch.randn(320).to(dtype)):
            assert invariant.linear(x, given, bias, product).shape == (*leading, 320), product
        if not product.is_packed and len(leading) == 1:
            experts = torch.randn(3, 48, 64).to(dtype)
            none = torch.zeros(3, dtype=torch.int32)
            assert invariant.grouped_mm(x, experts, none, product).shape == (0, 64), product
    if dtype == torch.float32:
        assert linear_few_rows(x, weight, None).shape == (*leading, 320)


@pytest.mark.parametrize("name", sorted(cpu_activation.ELEMENTWISE))
@pytest.mark.parametrize("shape", [(0,), (0, 48), (2, 0, 48), (5, 0)], ids=str)
def test_no_elements_at_all_are_no_error(name: str, shape: tuple[int, ...]) -> None:
    assert cpu_activation.elementwise(name, torch.empty(shape)).shape == shape


@pytest.mark.parametrize("shape", [(320, 48), (576, 1536)], ids=str)
def test_a_packed_weight_is_chosen_only_where_allowed(shape: tuple[int, int]) -> None:
    if not torch.backends.mkldnn.is_available():
        assert not invariant.choose_recipe(*shape, torch.float32, may_pack=True).is_packed
        return
    assert invariant.choose_recipe(*shape, torch.float32, may_pack=True).is_packed
    assert not invariant.choose_recipe(*shape, torch.float32).is_packed
    assert not invariant.choose_recipe(*shape, torch.bfloat16, may_pack=True).is_packed
    strided = {"is_contiguous": False, "may_pack": True}
    assert not invariant.choose_recipe(*shape, torch.float32, **strided).is_packed


def test_a_trial_refuses_what_depends_on_the_number_of_rows() -> None:
    """MKL without padding: one row takes another code path than many."""
    torch.manual_seed(0)
    weight, rows = torch.randn(576, 576), torch.randn(129, 576)
    assert not invariant.is_row_invariant(invariant.MatmulRecipe("mkl", 1), rows, weight)


def test_an_expert_does_not_see_the_rows_of_others() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(41, 48), torch.randn(3, 48, 64)
    product = invariant.choose_recipe(64, 48, torch.float32, is_contiguous=False)
    whole = invariant.grouped_mm(rows, weight, torch.tensor([9, 9, 38]), product)
    assert (whole[38:] == 0).all()
    torch.testing.assert_close(whole[9:38], rows[9:38] @ weight[2], rtol=1e-5, atol=1e-4)
    for row in range(38):
        offs = torch.tensor([1, 1, 1] if row < 9 else [0, 0, 1])
        alone = invariant.grouped_mm(rows[row : row + 1], weight, offs, product)
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("name", sorted(cpu_activation.ELEMENTWISE))
@pytest.mark.parametrize("width", [1, 3, 32, 96, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_element_has_the_same_bits_at_any_place(
    name: str, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, width).abs().to(dtype) if name == "rsqrt" else torch.randn(40, width)
    x = x.to(dtype)
    whole = cpu_activation.elementwise(name, x)
    # 0 has no reciprocal, but the zeros that fill a row up are cut off again.
    expected = cpu_activation.ELEMENTWISE[name](x.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance)
    for begin in range(0, 40, 3):
        for count in (1, 2, 7):
            part = cpu_activation.elementwise(name, x[None, begin : begin + count])
            assert torch.equal(part[0], whole[begin : begin + count])
