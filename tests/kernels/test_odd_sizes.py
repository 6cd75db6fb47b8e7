"""CPU matmuls with odd sizes in every dimension.

A recipe is measured for the exact shape. A row has the same bits alone, in a batch, and at every
position.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagespec.errors import UnsupportedModelError
from pagespec.kernels import fixed_order
from pagespec.kernels.arguments import AttentionParams
from pagespec.kernels.attention import cpu_invariant, cpu_trial
from pagespec.kernels.attention.cpu_invariant import AttentionRecipe
from pagespec.kernels.matmul.cpu import invariant
from pagespec.kernels.mla import head_matmul
from tests.support.paged import Shape, check_positions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 23, 31, 33, 64, 65)
NUM_ROWS = 101
# Of small sums: libraries have other code for few outputs, and torch for few multiplications.
SIZES = [*range(1, 20), 23, 26, 29, 31, 35, 63, 65, 95, 127, 130, 257]


def varied(rows: Tensor, weight: Tensor) -> None:
    """Exponents that differ, and pairs of inputs ``[.., K]`` that cancel: sums of 16 bits would
    hide the order of summation."""
    for part in (rows, weight):
        part *= 2.0 ** torch.randint(0, 8, part.shape)
    half = rows.shape[-1] // 2
    rows[..., half : 2 * half] = rows[..., :half]
    weight[..., half : 2 * half] = -weight[..., :half]
    rows[..., 2 * half :] = 0


def difference(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[int, int] | None:
    """The first group of rows, by count and position, with other bits than among all rows."""
    whole = multiply(rows)
    for count in COUNTS:
        last = len(rows) - count
        for first in sorted({0, 1, 2, 3, 5, 7, 13, 5 * count % (last + 1), last}):
            group = slice(first, first + count)
            if not torch.equal(multiply(rows[group]), whole[group]):
                return count, first
    return None


def cases(seed: int, num: int) -> list[tuple[int, int, int, torch.dtype, bool]]:
    """(heads, inputs, outputs, dtype, transposed); those of the first report among them."""
    numbers = random.Random(seed)
    some = [(4, 17, 7, dtype, is_t) for dtype in DTYPES for is_t in (False, True)]
    while len(some) < num:
        sizes = numbers.randint(1, 8), numbers.choice(SIZES), numbers.choice(SIZES)
        some.append((*sizes, DTYPES[len(some) % 3], numbers.random() < 0.5))
    return some


@pytest.mark.parametrize("seed", range(4))
def test_matmuls_of_heads(seed: int) -> None:
    different = {}
    for case in cases(seed, 36):
        num_heads, num_inputs, num_outputs, dtype, is_transposed = case
        torch.manual_seed(seed)
        recipe = head_matmul.choose_recipe(*case)
        rows = torch.randn(NUM_ROWS, num_heads, num_inputs).to(dtype)
        weight = torch.randn(num_heads, num_outputs, num_inputs).to(dtype)
        if dtype != torch.float32:
            varied(rows, weight)
        weight = weight.transpose(1, 2)
        if not is_transposed:
            weight = weight.contiguous()
        found = difference(lambda x: head_matmul.head_matmul(x, weight, recipe), rows)  # noqa: B023
        if found is not None:
            different[case] = recipe, found
    assert different == {}


@pytest.mark.parametrize("seed", range(2))
def test_linear_layers(seed: int) -> None:
    different = {}
    for case in cases(seed, 36):
        _, num_inputs, num_outputs, dtype, is_transposed = case
        torch.manual_seed(seed)
        recipe = invariant.choose_recipe(
            num_outputs, num_inputs, dtype, is_contiguous=not is_transposed
        )
        rows = torch.randn(NUM_ROWS, num_inputs).to(dtype)
        weight = torch.randn(num_outputs, num_inputs).to(dtype)
        if dtype != torch.float32:
            varied(rows, weight)
        if is_transposed:
            weight = weight.t().contiguous().t()
        found = difference(lambda x: invariant.linear(x, weight, None, recipe), rows)  # noqa: B023
        if found is not None:
            different[case] = recipe, found
    assert different == {}


# Heads of queries and of keys; elements of keys and of values.
HEADS = [
    (6, 2, 17, 7),
    (5, 1, 35, 1),
    (14, 2, 13, 5),
    (6, 3, 2, 7),
    (6, 2, 127, 1),
    (21, 3, 27, 9),
    (4, 2, 97, 9),
    (3, 1, 100, 11),
    (7, 7, 1, 3),
    (9, 3, 33, 31),
]


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_attention(sizes: tuple[int, int, int, int]) -> None:
    hq, hkv, dk, dv = sizes
    recipe = cpu_trial.choose_recipe(hq, hkv, dk, dv, False)

    def attend(attention: tuple) -> Tensor:
        query, k_cache, v_cache, starts, contexts, *others = attention
        tables, table_rows, scale, window, softcap, sinks = others
        layout = cpu_invariant.build_layout(k_cache, starts, contexts, tables, table_rows, window)
        params = AttentionParams(scale, softcap=softcap, sinks=sinks)
        return cpu_invariant.attend(query, k_cache, v_cache, layout, params, 0, recipe)

    check_positions(attend, Shape(hq=hq, hkv=hkv, dk=dk, dv=dv), 7)


@pytest.mark.parametrize("is_latent", [False, True])
def test_every_recipe_of_attention_computes_the_same(is_latent: bool) -> None:
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(40, 6, 17),
        torch.randn(3, 16, 2, 17),
        torch.randn(3, 16, 2, 7),
    )
    starts, contexts = torch.tensor([0, 40]), torch.tensor([40])
    layout = cpu_invariant.build_layout(
        keys, starts, contexts, torch.tensor([[2, 0, 1]]), torch.tensor([0])
    )
    caches = (keys, None, layout) if is_latent else (keys, values, layout)
    found = [
        cpu_invariant.attend(query, *caches, AttentionParams(0.2), 7, recipe)
        for recipe in (AttentionRecipe(), AttentionRecipe(16), AttentionRecipe(1, True))
    ]
    for other in found[1:]:
        assert other.shape == (40, 6, 7)
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 0, 2), (0, 5, 3), (7, 33, 5), (2, 1 << 11, 600)])
def test_a_written_order_is_a_matmul(shape: tuple[int, int, int]) -> None:
    num_rows, num_inputs, num_outputs = shape
    rows, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    exact = rows.double() @ weight.double().t()
    whole = fixed_order.linear(rows, weight)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-4)
    for row in range(num_rows):
        assert torch.equal(fixed_order.linear(rows[row : row + 1], weight)[0], whole[row])


def test_a_written_order_adds_halves() -> None:
    """The order of summation, in plain Python: 5 terms become 3, 2, 1."""
    rows, weight = torch.randn(1, 5), torch.randn(1, 5)
    p = [a * b for a, b in zip(rows[0], weight[0], strict=True)]
    assert fixed_order.linear(rows, weight)[0, 0] == ((p[0] + p[3]) + p[2]) + (p[1] + p[4])


def follows_the_rows(x: Tensor, weight: Tensor) -> Tensor:
    """A library whose bits depend on the number of rows and on a row's position."""
    out = x @ weight.transpose(-1, -2) if weight.dim() == 2 else x @ weight
    return out + len(x) + torch.arange(out.shape[-2]).unsqueeze(-1)


def test_where_no_library_passes_the_order_is_written_out(torch_calls: dict[Any, Any]) -> None:
    torch_calls |= {F.linear: follows_the_rows, torch.bmm: follows_the_rows_of_heads}
    for dtype in DTYPES:
        assert invariant.choose_recipe(5, 7, dtype) == invariant.FIXED_ORDER
    assert head_matmul.choose_recipe(2, 5, 7, torch.float32, False).is_fixed_order
    assert cpu_trial.choose_recipe(4, 2, 5, 7, False).is_fixed_order


def follows_the_rows_of_heads(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    found = torch.einsum("bmk,bkn->bmn", x, weight) + x.shape[1]
    found += torch.arange(x.shape[1]).unsqueeze(-1)
    return found if out is None else out.copy_(found)


def test_a_recipe_that_fails_its_trial_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recipe is returned without a trial, the last one included."""
    with monkeypatch.context() as patch:
        patch.setattr(invariant, "is_row_invariant", lambda *_: False)
        with pytest.raises(UnsupportedModelError, match=r"\[5, 7\] in torch\.float32"):
            invariant.choose_recipe(5, 7, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(head_matmul, "_is_row_invariant", lambda *_: False)
        with pytest.raises(UnsupportedModelError, match=r"of heads in torch\.float32"):
            head_matmul.choose_recipe(2, 5, 7, torch.float32, False)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_trial, "attend", lambda *_: torch.randn(len(_[0]), 4, 7))
        with pytest.raises(UnsupportedModelError, match="attention heads"):
            cpu_trial.choose_recipe(4, 2, 5, 7, False)
