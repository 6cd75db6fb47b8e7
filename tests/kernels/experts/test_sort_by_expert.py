"""The counting sort by expert under the interpreter, against torch's stable sort."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton")
from pagespec.kernels.experts import sort_by_expert
from pagespec.kernels.jit.parallel_build import parallel_build


@pytest.fixture(params=["few", "many"], autouse=True)
def _number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launches for few rows, and by those for many."""
    if request.param == "many":
        monkeypatch.setattr(sort_by_expert, "_MANY", 0)


@pytest.mark.parametrize("at_once", [1, 64, 8192])
@pytest.mark.parametrize("num_experts", [1, 5, 30])
@pytest.mark.parametrize("num_rows", [1, 7, 200])
def test_sorts_as_a_stable_sort(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, num_experts: int, at_once: int
) -> None:
    blocks = ((16, 10, 4), (64, 1000, 4))  # several parts of the rows
    monkeypatch.setattr(sort_by_expert, "_BLOCKS", blocks)
    monkeypatch.setattr(sort_by_expert, "_BLOCK", 32)
    monkeypatch.setattr(sort_by_expert, "_COUNTS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(num_rows)
    # Some of no expert here.
    ids = torch.randint(0, num_experts + 2, (num_rows,), generator=generator)
    got, order, inverse, offs = sort_by_expert.sort_by_expert(ids, num_experts)
    _, expected_order = torch.sort(ids.clamp(max=num_experts), stable=True)
    assert torch.equal(order, expected_order)
    assert torch.equal(got, ids[expected_order])
    assert torch.equal(order[inverse], torch.arange(num_rows, device=ids.device))
    counts = torch.bincount(ids[ids < num_experts], minlength=num_experts)
    assert torch.equal(offs, counts.cumsum(0).int())


def test_experts_without_rows_end_where_they_begin() -> None:
    got, _, _, offs = sort_by_expert.sort_by_expert(torch.tensor([3, 3, 1]), 5)
    assert got.tolist() == [1, 3, 3]
    assert offs.tolist() == [0, 1, 1, 3, 3]


@pytest.mark.parametrize("num_real", [0, 1, 5])
def test_padding_is_no_experts(monkeypatch: pytest.MonkeyPatch, num_real: int) -> None:
    monkeypatch.setattr(sort_by_expert, "_BLOCKS", ((4, 1000, 4),))  # several parts of the rows
    ids = torch.tensor([2, 0, 1, 2, 0, 1, 1, 2, 0, 2])  # two a token
    starts = torch.tensor([0, num_real], dtype=torch.int32)
    got, order, inverse, offs = sort_by_expert.sort_by_expert(ids, 3, 2, starts)
    real = ids[: 2 * num_real]
    expected = torch.sort(torch.cat((real, torch.full((10 - len(real),), 3))), stable=True)[1]
    assert torch.equal(order, expected)
    assert torch.equal(got, ids[expected])
    assert torch.equal(order[inverse], torch.arange(10))
    assert torch.equal(offs, torch.bincount(real, minlength=3).cumsum(0).int())


def test_what_a_build_leaves_out_can_be_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of kernels that are being built do nothing; what reads at their results runs."""
    left_out = dict.fromkeys([(6,), (1,)], lambda *_, **__: None)
    for kernel in ("_sort_kernel", "_count_kernel", "_place_kernel"):
        monkeypatch.setattr(sort_by_expert, kernel, left_out)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, -(1 << 40)))
    with parallel_build(torch.device("cpu")):
        found = sort_by_expert.sort_by_expert(torch.tensor([3, 3, 1]), 5)
    assert all((part == 0).all() for part in found)


def test_what_was_not_counted_is_placed_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two launches for many rows may be left out, and the other not."""
    monkeypatch.setattr(sort_by_expert, "_MANY", 0)
    monkeypatch.setattr(sort_by_expert, "_count_kernel", {(1,): lambda *_, **__: None})
    with parallel_build(torch.device("cpu")):
        found = sort_by_expert.sort_by_expert(torch.tensor([3, 3, 1]), 5)
    for part in found:
        assert ((part >= 0) & (part < 5)).all()


def test_a_step_of_many_rows_makes_the_kernels_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step may be the only one with prompts in which kernels are made."""
    monkeypatch.setattr(sort_by_expert, "_MANY", 0)
    launched: list[str] = []
    for kernel in ("_sort_kernel", "_count_kernel", "_place_kernel"):
        launch = functools.partial(lambda name, *_, **__: launched.append(name), kernel)
        monkeypatch.setattr(sort_by_expert, kernel, {(6,): launch, (1,): launch})
    with parallel_build(torch.device("cpu")):
        sort_by_expert.sort_by_expert(torch.tensor([3, 3, 1]), 5)
    assert launched == ["_sort_kernel", "_count_kernel", "_place_kernel"]


@pytest.mark.parametrize("number", [0, 1])
def test_programs_per_block_come_beyond_a_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.undo()  # by the numbers that engines have
    num_experts = 512
    num_rows = 6_000_000 // (num_experts + 128) + number
    launched: list[str] = []
    for kernel in ("_sort_kernel", "_count_kernel", "_place_kernel"):
        launch = functools.partial(lambda name, *_, **__: launched.append(name), kernel)
        grids = dict.fromkeys([(num_experts + 1,), (-(-num_rows // 512),)], launch)
        monkeypatch.setattr(sort_by_expert, kernel, grids)
    sort_by_expert.sort_by_expert(torch.zeros(num_rows, dtype=torch.int64), num_experts)
    assert launched == [["_sort_kernel"], ["_count_kernel", "_place_kernel"]][number]
