"""The counting sort by expert under Triton's interpreter, against torch's stable sort."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from pagespec.kernels.jit.parallel_build import parallel_build
from pagespec.kernels.moe import sort_by_expert
from tests.kernels.moe.conftest import Skip
from tests.support.paged import poisoned_memory


# By the launch for few rows, in one part and in several, and by those for many, which begin beyond
# 6,000,000 rows x (experts + 128).
@pytest.mark.parametrize(
    ("num_rows", "num_experts"),
    [(n, e) for n in (1, 7, 200, 5_000) for e in (1, 5, 30)] + [(5_400, 1_000), (1_200, 5_000)],
)
def test_sorts_as_a_stable_sort(num_rows: int, num_experts: int) -> None:
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


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(5, 3), (1_200, 3), (600, 5_000)])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_padding_is_no_experts(num_tokens: int, num_experts: int, share: float) -> None:
    num_rows, num_real = 2 * num_tokens, int(num_tokens * share)
    ids = torch.randint(0, num_experts, (num_rows,), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, num_real], dtype=torch.int32)
    got, order, inverse, offs = sort_by_expert.sort_by_expert(ids, num_experts, 2, starts)
    real = ids[: 2 * num_real]
    padding = torch.full((num_rows - len(real),), num_experts)
    expected = torch.sort(torch.cat((real, padding)), stable=True)[1]
    assert torch.equal(order, expected)
    assert torch.equal(got, ids[expected])
    assert torch.equal(order[inverse], torch.arange(num_rows))
    assert torch.equal(offs, torch.bincount(real, minlength=num_experts).cumsum(0).int())


KERNELS = "_sort_kernel", "_count_kernel", "_place_kernel"
FEW, MANY = (torch.tensor([3, 3, 1]), 5), (torch.zeros(1_200, dtype=torch.int64), 5_000)


@pytest.mark.parametrize("given", [FEW, MANY])
def test_results_of_skipped_launches_are_indices(given: Any, skip_launches: Skip) -> None:
    """Launches of kernels that are being built do nothing; what reads at their results runs."""
    skip_launches(sort_by_expert, *KERNELS)
    with parallel_build(torch.device("cpu")), poisoned_memory("cpu"):
        found = sort_by_expert.sort_by_expert(*given)
    assert all((part == 0).all() for part in found)


def test_rows_that_were_not_counted_are_placed_inside(skip_launches: Skip) -> None:
    """One of the two launches for many rows may be left out, and the other not."""
    skip_launches(sort_by_expert, "_sort_kernel", "_count_kernel")
    with parallel_build(torch.device("cpu")):
        found = sort_by_expert.sort_by_expert(*MANY)
    for part in found:
        assert ((part >= 0) & (part < 5_000)).all()


def test_a_step_of_many_rows_makes_the_kernels_for_few(skip_launches: Skip) -> None:
    """The largest step may be the only one with prompts in which kernels are made."""
    launched = skip_launches(sort_by_expert, *KERNELS)
    with parallel_build(torch.device("cpu")):
        sort_by_expert.sort_by_expert(*MANY)
    assert [name for name, _ in launched] == [*KERNELS]


@pytest.mark.parametrize("number", [0, 1])
def test_programs_per_block_come_beyond_a_number_of_rows(number: int, skip_launches: Skip) -> None:
    num_experts = 512
    num_rows = 6_000_000 // (num_experts + 128) + number
    launched = skip_launches(sort_by_expert, *KERNELS)
    sort_by_expert.sort_by_expert(torch.zeros(num_rows, dtype=torch.int64), num_experts)
    grid = (-(-num_rows // 512),)
    of_many = [(name, grid) for name in KERNELS[1:]]
    assert launched == [[("_sort_kernel", (num_experts + 1,))], of_many][number]
