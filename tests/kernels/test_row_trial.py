"""Trials of a CPU's matmuls compare the bits of all thread counts that may be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagespec.kernels import row_trial
from pagespec.kernels.attention import cpu_trial
from pagespec.kernels.matmul.cpu import invariant
from pagespec.kernels.matmul.cpu import quantized as cpu_quantized
from pagespec.kernels.matmul.cpu.expanded import choose_expanded_recipe
from pagespec.kernels.mla import head_matmul

NUMBERS = (4, 2, 1)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3  # whatever a trial does
    torch.set_num_threads(before)


@pytest.fixture
def without_threads() -> Iterator[None]:
    """Torch keeps the number and starts no threads: on a shared machine they would take minutes."""
    number = [3]
    with pytest.MonkeyPatch.context() as patch:
        torch.set_num_threads(1)
        patch.setattr(torch, "get_num_threads", lambda: number[0])
        patch.setattr(torch, "set_num_threads", lambda n: number.__setitem__(0, n))
        yield
        assert number == [3]
    torch.set_num_threads(3)


class Library:
    """The library's matmuls, but that results with ``differing`` threads have other bits, perhaps
    those of few or of many rows alone."""

    def __init__(self, differing: int, min_rows: int = 0, max_rows: int = 1 << 30) -> None:
        self.differing, self.min_rows, self.max_rows = differing, min_rows, max_rows
        self.num_calls = dict.fromkeys((3, *NUMBERS), 0)

    def changed(self, out: Tensor, num_rows: int) -> Tensor:
        self.num_calls[torch.get_num_threads()] += 1
        is_other = torch.get_num_threads() == self.differing
        if is_other and self.min_rows <= num_rows <= self.max_rows:
            out += 1
        return out

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.changed(F.linear(x, weight), len(x))

    def bmm(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        found = self.changed(torch.bmm(x, weight), x.shape[1])
        return found if out is None else out.copy_(found)


@pytest.mark.parametrize("differing", NUMBERS)
@pytest.mark.usefixtures("without_threads")
def test_a_library_that_follows_the_number_is_called_with_one_thread_or_not_at_all(
    torch_calls: dict[Any, Any], differing: int
) -> None:
    library = Library(differing)
    torch_calls |= {F.linear: library.linear, torch.bmm: library.bmm}
    others = tuple(number for number in NUMBERS if number != differing)
    for dtype in (torch.float32, torch.bfloat16):
        assert invariant.choose_recipe(24, 40, dtype, threads=NUMBERS).is_serial
        assert not invariant.choose_recipe(24, 40, dtype, threads=others).is_serial
    heads = 2, 40, 24, torch.float32, False
    assert head_matmul.choose_recipe(*heads, NUMBERS).is_fixed_order
    assert not head_matmul.choose_recipe(*heads, others).is_fixed_order
    assert cpu_trial.choose_recipe(4, 2, 16, 16, False, NUMBERS).is_fixed_order
    assert not cpu_trial.choose_recipe(4, 2, 16, 16, False, others).is_fixed_order


@pytest.mark.parametrize("differing", NUMBERS[1:])
@pytest.mark.parametrize(("min_rows", "max_rows"), [(0, 12), (60, 1 << 30)])
@pytest.mark.usefixtures("without_threads")
def test_of_few_or_of_many_rows_alone_it_shows(
    torch_calls: dict[Any, Any], differing: int, min_rows: int, max_rows: int
) -> None:
    library = Library(differing, min_rows, max_rows)
    torch_calls |= {F.linear: library.linear, torch.bmm: library.bmm}
    for dtype in (torch.float32, torch.bfloat16):
        recipe = invariant.choose_recipe(24, 40, dtype, threads=NUMBERS)
        assert recipe == invariant.FALLBACK  # calls of 16 rows
    assert head_matmul.choose_recipe(2, 40, 24, torch.float32, False, NUMBERS).is_tiled


def test_outputs_that_threads_share_with_other_bits() -> None:
    """Of 17 outputs 3 threads make other sums than 1 (seen with MKL)."""
    recipe = invariant.choose_recipe(17, 512, torch.float32, threads=(3, 1))
    torch.manual_seed(1)
    weight, rows = torch.randn(17, 512), torch.randn(40, 512)
    found = []
    for number in (3, 1):
        with row_trial.num_threads(number):
            found.append(invariant.linear(rows, weight, None, recipe))
            found.append(invariant.linear(rows[:5], weight, None, recipe))
            assert torch.get_num_threads() == number
    assert all(torch.equal(out, found[0][: len(out)]) for out in found)


@pytest.mark.usefixtures("without_threads")
def test_batches_keep_their_bits(torch_calls: dict[Any, Any]) -> None:
    shape = 4, 16, 32, (1, 2, 5)
    assert row_trial.keeps_batched_bits(*shape, (2, 1))
    torch_calls[torch.bmm] = Library(1).bmm
    assert not row_trial.keeps_batched_bits(*shape, (2, 1))
    assert row_trial.keeps_batched_bits(*shape, (4, 2))
    torch_calls[torch.bmm] = lambda x, y: torch.bmm(x, y) + (len(x) == 2)
    assert not row_trial.keeps_batched_bits(*shape, (2,))


@pytest.mark.usefixtures("without_threads")
def test_other_numbers_get_few_of_the_calls(torch_calls: dict[Any, Any]) -> None:
    library = Library(0)
    torch_calls[F.linear] = library.linear
    invariant.choose_recipe(300, 200, torch.bfloat16, threads=NUMBERS)
    most, half, one = (library.num_calls[number] for number in NUMBERS)
    assert 1 < half == one < most / 3
    assert library.num_calls[3] == 0


@pytest.mark.usefixtures("without_threads")
def test_weights_that_are_held_quantised_are_tried_alike(
    torch_calls: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(rows: Tensor) -> Tensor:
        return rows[:, :40] * (1 + (torch.get_num_threads() == 2))

    assert cpu_quantized.is_row_invariant(multiply, 64, (4, 1))
    assert not cpu_quantized.is_row_invariant(multiply, 64, NUMBERS)
    torch_calls[F.linear] = Library(1).linear
    monkeypatch.setattr(invariant, "can_pack", lambda _: False)
    for threads in ((4, 2), NUMBERS):
        recipe = choose_expanded_recipe(24, 40, transparent=True, threads=threads)
        assert recipe.whole is not None
        assert recipe.whole.is_serial == (threads == NUMBERS)


@pytest.mark.usefixtures("without_threads")
def test_a_trial_that_fails_leaves_the_number() -> None:
    def fails(_: bool) -> bool:
        assert torch.get_num_threads() == 2
        raise MemoryError

    with pytest.raises(MemoryError):
        row_trial.holds_with_all((2, 1), fails)
    assert torch.get_num_threads() == 3
    assert not row_trial.holds_with_all((2, 1), lambda is_first: not is_first)


@pytest.mark.usefixtures("without_threads")
def test_without_numbers_the_present_one_is_tried() -> None:
    seen: list[tuple[int, bool]] = []

    def sees(is_first: bool) -> bool:
        seen.append((torch.get_num_threads(), is_first))
        return True

    assert row_trial.holds_with_all((), sees)
    assert row_trial.holds_with_all((2, 1), sees)
    assert seen == [(3, True), (2, True), (1, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (7, 64)])
@pytest.mark.parametrize("may_pack", [False, True])
def test_rows_keep_their_bits_with_every_number(
    dtype: torch.dtype, shape: tuple[int, int], may_pack: bool
) -> None:
    numbers = (3, 1)
    recipe = invariant.choose_recipe(*shape, dtype, may_pack=may_pack, threads=numbers)
    torch.manual_seed(0)
    weight, rows = torch.randn(shape).to(dtype), torch.randn(130, shape[1]).to(dtype)
    if dtype != torch.float32:
        row_trial.make_cancel(rows, weight)
    if recipe.is_packed:
        weight = invariant.pack(weight)
    whole = invariant.linear(rows, weight, None, recipe)
    for number in numbers:
        with row_trial.num_threads(number):
            for count in (1, 2, 3, 5, 8, 31, 64, 130):
                part = invariant.linear(rows[-count:], weight, None, recipe)
                assert torch.equal(part, whole[-count:]), (number, count)
