"""Collectives over peer memory, under Triton's interpreter; ranks are processes.

The processes share memory in place of peer memory.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagespec.kernels.collectives.boxes import Boxes, Capacity, LaunchShape
from pagespec.kernels.collectives.communicator import LoneRank
from pagespec.kernels.collectives.symmetric import PeerCommunicator
from pagespec.kernels.fused.dispatch import NormForm
from pagespec.kernels.sampling.sampler import GROUP, VocabShard
from tests.support.apart import run_apart
from tests.support.ranks import fork_ranks, shared

peer_memory = pytest.importorskip("pagespec.kernels.collectives.peer_memory")
rms_norm = pytest.importorskip("pagespec.kernels.fused.rms_norm")
gumbel = pytest.importorskip("pagespec.kernels.sampling.gumbel")

MAX_CHUNKS = 16
SHAPE = LaunchShape(few_rows=4, few_row_bytes=12288)


class Group:
    """Communicators of forked ranks."""

    def __init__(
        self,
        num_ranks: int,
        max_chunks: int = MAX_CHUNKS,
        shape: LaunchShape = SHAPE,
        row_bytes: int = 1,
    ) -> None:
        sums = max_chunks, row_bytes
        self.num_ranks, self._sums, self._shape = num_ranks, sums, shape
        self.capacity = Capacity.of(sums, (), shape, num_ranks)
        sizes = Boxes.num_bytes(self.capacity, shape, num_ranks)
        self._num_box_bytes = sizes[0]
        self.boxes = [shared(sum(sizes), dtype=torch.uint8) for _ in range(num_ranks)]
        for rank in range(num_ranks):
            self._boxes_of(rank).clear()

    def _boxes_of(self, rank: int) -> Boxes:
        addresses = [memory.data_ptr() for memory in self.boxes]
        return Boxes.over(self.boxes[rank], addresses, self.capacity, self._shape)

    def box(self, rank: int) -> Tensor:
        return self.boxes[rank][: self._num_box_bytes]

    def rank(self, rank: int) -> PeerCommunicator:
        def make(capacity: Capacity, *_: object) -> Boxes:
            assert capacity == self.capacity
            return self._boxes_of(rank)

        host = LoneRank(rank, self.num_ranks)
        communicator = PeerCommunicator(host, torch.device("cpu"), make, self._shape)
        communicator.reserve(self._sums)
        communicator.connect()
        return communicator


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums_have_rank_order_at_every_size(dtype: torch.dtype) -> None:
    num_ranks = 3
    # Sizes change from call to call, so that boxes are used anew in other places.
    sizes = [(3, 100), (1, 100), (2, 3000), (16, 8), (1, 5000), (3, 100)]
    generator = torch.Generator().manual_seed(0)
    parts = [
        [(torch.randn(size, generator=generator) * 100).to(dtype) for _ in range(num_ranks)]
        for size in sizes
    ]
    group = Group(num_ranks)
    sums = [[shared(*size, dtype=dtype) for _ in range(num_ranks)] for size in sizes]

    def run(rank: int) -> None:
        communicator = group.rank(rank)
        for call in range(len(sizes)):
            sums[call][rank].copy_(communicator.all_reduce(parts[call][rank]))

    fork_ranks(num_ranks, run)
    for call in range(len(sizes)):
        for rank in range(num_ranks):
            assert torch.equal(sums[call][rank], in_rank_order(parts[call])), (call, rank)
    # The order shows in the bits: else this test would say nothing.
    backwards = [in_rank_order(of_call[::-1]) for of_call in parts]
    if dtype == torch.float32:  # less shows nothing of it
        forwards = map(in_rank_order, parts)
        assert any(not torch.equal(a, b) for a, b in zip(backwards, forwards, strict=True))


FORMS: tuple[NormForm, ...] = ("rounded", "wide", "plus_one")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_joined_with_its_norm_has_the_bits_of_two_launches(dtype: torch.dtype) -> None:
    num_ranks = 2
    sizes = [(1, 5000), (2, 1100), (7, 300), (1, 2500), (33, 70), (7, 1300), (1, 1), (2, 1100)]
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator) * 3).to(dtype)

    parts = [[normal(*size) for _ in range(num_ranks)] for size in sizes]
    residuals = [normal(*size) if n % 4 != 3 else None for n, size in enumerate(sizes)]
    weights = [normal(size[1]) for size in sizes]
    group = Group(num_ranks, 64)
    joined, apart = (
        [[shared(2, *size, dtype=dtype) for _ in range(num_ranks)] for size in sizes]
        for _ in range(2)
    )

    def run(rank: int) -> None:
        communicator = group.rank(rank)
        for call, (residual, weight) in enumerate(zip(residuals, weights, strict=True)):
            partial, norm = parts[call][rank], (weight, 1e-6, FORMS[call % 3])
            found = communicator.all_reduce_norm(partial, residual, *norm)
            joined[call][rank].copy_(torch.stack(found))
            total = communicator.all_reduce(partial)
            if residual is None:
                wanted = (rms_norm.rms_norm(total, *norm),) * 2
            else:
                wanted = rms_norm.add_rms_norm(total, residual, *norm)
            apart[call][rank].copy_(torch.stack(wanted))

    fork_ranks(num_ranks, run)
    for call, residual in enumerate(residuals):
        assert joined[call][0].count_nonzero() > 0
        for rank in range(num_ranks):
            assert torch.equal(joined[call][rank], apart[call][rank]), (call, rank)
            if residual is not None:
                hidden = residual + in_rank_order(parts[call])
                assert torch.equal(joined[call][rank][1], hidden), (call, rank)


def test_calls_may_be_cut_otherwise() -> None:
    num_ranks, shape = 2, LaunchShape(1024, 2, 8, few_rows=0)
    parts = torch.randn(num_ranks, 3, 1200, generator=torch.Generator().manual_seed(5))
    group = Group(num_ranks, shape=shape)
    sums = [shared(2, *parts.shape[1:]) for _ in range(num_ranks)]

    def run(rank: int) -> None:
        communicator, part = group.rank(rank), parts[rank]
        _, total = communicator.all_reduce_norm(part, 0 * part, part[0], 1e-6, "wide")
        sums[rank].copy_(torch.stack([communicator.all_reduce(part), total]))

    fork_ranks(num_ranks, run)
    for found in sums:
        assert torch.equal(found, in_rank_order(list(parts)).expand(2, -1, -1))


def test_halves_of_a_box_are_used_in_turn_however_calls_are_cut() -> None:
    """A peer may still read the data that the previous call pushed."""
    num_ranks, max_chunks, shape = 2, 8, LaunchShape(few_rows=0)
    barrier = multiprocessing.get_context("fork").Barrier(num_ranks)
    group = Group(num_ranks, max_chunks, shape)
    generator = torch.Generator().manual_seed(4)

    def run(rank: int) -> None:
        communicator, box = group.rank(rank), group.box(rank).view(2, num_ranks, max_chunks, -1)
        last_half = [-1] * max_chunks
        for width, is_joined in [(100, 0), (2500, 1), (2500, 1), (1100, 0), (2500, 1), (100, 1)]:
            num_chunks = -(-width * 4 // 4096)
            num_rows = max_chunks // num_chunks if num_chunks > 1 else 1
            x = torch.randn(num_rows, width, generator=generator)
            before = box.clone()
            barrier.wait(60)
            if is_joined:
                communicator.all_reduce_norm(x, x, torch.ones(width), 1e-6, "rounded")
            else:
                communicator.all_reduce(x)
            barrier.wait(60)  # and what a peer pushes next has not come
            changed = (box != before).any(-1)[:, 1 - rank]
            assert changed.any(0).sum() == num_rows * num_chunks
            for half, chunk in changed.nonzero().tolist():
                assert half != last_half[chunk], (width, chunk)
                last_half[chunk] = half

    fork_ranks(num_ranks, run)


@pytest.mark.parametrize("two_shot_bytes", [1 << 30, 0, 1000], ids=["one-shot", "two-shot", "both"])
def test_data_that_is_waited_for_may_be_any(two_shot_bytes: int) -> None:
    """Of three ranks, calls of one row and of several: NaNs with the bits of the sentinel, widths
    and dtypes that change. What was read is cleared."""
    num_ranks = 3
    calls = [(torch.bfloat16, 2, 300), (torch.float32, 1, 300), (torch.float16, 4, 7)] * 3
    generator = torch.Generator().manual_seed(6)
    parts = []
    for dtype, *size in calls:
        part = torch.randn(num_ranks, *size, generator=generator).to(dtype)
        part.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[1:, 0, ::3] = -1
        parts.append(part)
    group = Group(num_ranks, shape=replace(SHAPE, few_two_shot_bytes=two_shot_bytes))
    found = [shared(*part.shape, dtype=part.dtype) for part in parts]

    def run(rank: int) -> None:
        communicator = group.rank(rank)
        for part, total in zip(parts, found, strict=True):
            zero, weight = torch.zeros_like(part[0]), torch.ones_like(part[0, 0])
            total[rank] = communicator.all_reduce_norm(part[rank], zero, weight, 1e-6, "wide")[1]

    fork_ranks(num_ranks, run)
    for part, total in zip(parts, found, strict=True):
        expected = in_rank_order(list(part)).expand_as(total)
        assert expected.isnan().any()
        assert torch.equal(total.isnan(), expected.isnan())
        assert torch.equal(total.nan_to_num(), expected.nan_to_num())
    for rank in range(num_ranks):
        assert (group._boxes_of(rank).own_rows == 0xFF).all()


def test_parts_of_different_sizes_are_laid_side_by_side() -> None:
    sizes, num_rows = [5, 1500, 0], 3
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(num_rows, 2, size, generator=generator) for size in sizes]
    group = Group(len(sizes))
    found = [shared(num_rows, 2, sum(sizes)) for _ in sizes]

    def run(rank: int) -> None:
        communicator = group.rank(rank)
        for _ in range(3):
            found[rank].copy_(communicator.all_gather(parts[rank], sizes))

    fork_ranks(len(sizes), run)
    for rank in range(len(sizes)):
        assert torch.equal(found[rank], torch.cat(parts, -1)), rank


def test_a_peer_may_be_a_call_ahead() -> None:
    """The peer has received its data and has begun the next call before this rank reads."""
    group = Group(2)
    size = 2 * MAX_CHUNKS * SHAPE.chunk_bytes  # of a half of a box
    box, flags = group.box(0), group._boxes_of(0).own_flags
    for number, value in ((1, 5.0), (2, 7.0)):
        begin = (number % 2) * size + size // 2  # rank 1's part of chunk 0
        box[begin : begin + 32].view(torch.float32).fill_(value)
        flags[MAX_CHUNKS] = number
    communicator = group.rank(0)
    assert communicator.all_reduce(torch.ones(1, 8)).tolist() == [[6.0] * 8]
    assert communicator.all_reduce(torch.ones(1, 8)).tolist() == [[8.0] * 8]


def test_nothing_waits_for_a_lost_rank() -> None:
    communicator = Group(2).rank(0)
    communicator.end()
    x = torch.ones(1, 8)
    assert communicator.all_reduce(x).shape == (1, 8)
    for _ in range(3):
        assert communicator.all_reduce_norm(x, x, x[0], 1e-6, "wide")[1].shape == (1, 8)
    assert communicator.all_gather(torch.ones(1, 8), [8, 8]).shape == (1, 16)


def test_no_two_shot_sum_waits_for_a_lost_rank() -> None:
    communicator = Group(3, shape=LaunchShape(two_shot_bytes=0), row_bytes=32).rank(1)
    communicator.end()
    x = torch.ones(16, 8)
    assert communicator.all_reduce(x).shape == (16, 8)
    assert communicator.all_reduce_norm(x, x, x[0], 1e-6, "wide")[1].shape == (16, 8)


def test_a_call_that_does_not_fit_is_refused() -> None:
    group = Group(2)
    with pytest.raises(ValueError, match="17 rows of 1 chunks for 16"):
        group.rank(0).all_reduce(torch.zeros(17, 4))


@pytest.mark.parametrize(
    ("num_ranks", "with_flags", "without"),
    [
        (1, 1 << 62, 1 << 62),
        (2, 1 << 62, 1 << 62),
        (3, 256 << 10, 512 << 10),
        (8, 256 << 10, 512 << 10),
    ],
)
def test_sums_are_two_shot_from_a_size_on(num_ranks: int, with_flags: int, without: int) -> None:
    given = LaunchShape(two_shot_bytes=5, few_two_shot_bytes=7)
    for has_flags, least, chosen in ((True, with_flags, 5), (False, without, 7)):
        assert LaunchShape().min_two_shot_bytes(num_ranks, has_flags=has_flags) == least
        assert given.min_two_shot_bytes(num_ranks, has_flags=has_flags) == chosen


def test_memory_for_sums_holds_either_kind_of_call() -> None:
    sums, gathers = (8192, 10240), [(64, 400_000)]
    default, never = LaunchShape(), LaunchShape(two_shot_bytes=1 << 62)
    assert Capacity.of(sums, gathers, default, 2) == Capacity(8192 * 3)
    assert Capacity.of(sums, gathers, never, 4) == Capacity(8192 * 3)
    of_four = Capacity.of(sums, gathers, default, 4)
    least = default.min_two_shot_bytes(4)
    assert of_four.max_chunks == max(64 * 98, -(-least // 10240) * 3)
    assert of_four.holds(8192, 10240)
    assert not of_four.holds(8193, 10240)
    assert not of_four.holds(1, 10242)
    # The parts of all owners, and the sums.
    parts = Boxes.num_bytes(of_four, default, 4)
    assert parts[2] == 2 * 8192 * 10240
    assert Capacity.of((100, 100), gathers, default, 4) == Capacity(64 * 98)


def test_ranks_choose_the_tokens_that_one_would() -> None:
    sizes = [2 * GROUP, GROUP, 2 * GROUP + 77]
    num_rows, vocab_size = 8, sum(sizes)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    logits[6, 700:] = logits[6].max() + 1  # ties: the lowest id wins
    logits[7] = -torch.inf
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0, 9.0, 1.0, 0.0, 1.0])
    seeds, positions = torch.arange(num_rows) * 7 - 3, torch.arange(num_rows) + 1
    alone = torch.full((num_rows,), -1)
    gumbel.sample_simple(logits, temperatures, seeds, positions, alone)
    group = Group(len(sizes))
    found = [shared(num_rows, dtype=torch.int64) for _ in sizes]

    def run(rank: int) -> None:
        shard = VocabShard(tuple(sizes), group.rank(rank))
        own = logits.split(sizes, 1)[rank].contiguous()
        gumbel.sample_simple(own, temperatures, seeds, positions, found[rank], shard=shard)

    fork_ranks(len(sizes), run)
    for rank in range(len(sizes)):
        assert found[rank].tolist() == alone.tolist(), rank
    assert (
        len(
            {
                int(torch.bucketize(token, torch.tensor(sizes).cumsum(0), right=True))
                for token in alone
            }
        )
        == 3
    )


SHAPES = [
    (dtype, width, gap)
    for dtype in ("bfloat16", "float32")
    for width, gap in [(576, 0), (896, 1), (1000, 0), (4096, 0), (5120, 16)]
]


def test_on_a_gpu_a_row_is_added_up_in_one_order() -> None:
    """A norm has the same order of additions, fused with the sum or alone, and so the same bits.
    The program also checks that kernels are compiled before ranks wait for each other."""
    script = Path(__file__).with_name("compile_peer_memory.py")
    printed = run_apart(str(script), json.dumps(SHAPES))
    answer, (matmul, behind_it) = json.loads(printed)
    for shape, found in zip(SHAPES, answer, strict=True):
        orders, few_order, order, many_order, few_two_order = found
        assert all(one == orders[-1] for one in orders), (shape, orders)
        # The weight is loaded before the wait. The flag follows the pushed data, and nothing is
        # loaded between the two.
        assert re.match(r"l+wd[lo]+s+bfp", order), (shape, order)
        # Few rows: pushes, then the start of the next kernel and the polls for arriving data.
        assert re.match(r"l+w[lo]+s+dm+b", few_order), (shape, few_order)
        # Many rows: the flags follow the pushed parts, and the pushed sums.
        assert re.match(r"wd[lo]+s+bf[^f]+[lo]s+bf[^f]+$", many_order), (shape, many_order)
        # Few rows of owners: they are pushed, or polled, summed and then pushed.
        assert re.match(r"l+wd[lo]+.*m.*s+", few_two_order), (shape, few_two_order)
    # A matmul that pushes reads which half of the buffer to use after its wait, which lets the sum
    # start. The sum lets the next kernel start and waits for data only. At its end it waits for
    # all kernels before it.
    assert re.search(r"wd[bo]+$", matmul), matmul
    assert re.match(r"l+do?l+m+b", behind_it), behind_it
    assert behind_it.endswith("sw"), behind_it


@pytest.mark.parametrize(
    ("dtype", "block_rows", "max_programs"),
    # The interpreter runs programs one after the other.
    [(torch.float32, 1, 1), (torch.bfloat16, 4, None)],
)
def test_two_shot_sums_have_the_bits_of_one_shot_sums(
    dtype: torch.dtype, block_rows: int, max_programs: int | None
) -> None:
    num_ranks = 3
    # Sizes change from call to call, so that rows lie elsewhere and calls have other rows.
    sizes = [(40, 70), (1, 300), (33, 300), (13, 299), (2, 1), (40, 70)]
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator) * 30).to(dtype)

    # Rows of a wider tensor.
    parts = [[normal(r, n + 8)[:, :n] for _ in range(num_ranks)] for r, n in sizes]
    residuals = [normal(*size) if n % 3 else None for n, size in enumerate(sizes)]
    weights = [normal(size[1]) for size in sizes]
    shapes = (
        LaunchShape(few_rows=0, two_shot_bytes=1 << 30),
        LaunchShape(
            few_rows=0, two_shot_bytes=0, block_rows=block_rows, lag=2, max_programs=max_programs
        ),
    )
    one, two = (Group(num_ranks, 64, shape, 1200) for shape in shapes)
    found = [
        [[shared(3, *size, dtype=dtype) for _ in range(num_ranks)] for size in sizes]
        for _ in range(2)
    ]

    def run(rank: int) -> None:
        for group, results in zip((one, two), found, strict=True):
            communicator = group.rank(rank)
            for call, (residual, weight) in enumerate(zip(residuals, weights, strict=True)):
                partial, norm = parts[call][rank], (weight, 1e-6, FORMS[call % 3])
                total = communicator.all_reduce(partial)
                joined = communicator.all_reduce_norm(partial, residual, *norm)
                results[call][rank].copy_(torch.stack([total, *joined]))

    fork_ranks(num_ranks, run)
    assert two.capacity.max_chunks == 0 < one.capacity.max_chunks
    for call, (expected, results) in enumerate(zip(*found, strict=True)):
        for rank in range(num_ranks):
            assert torch.equal(results[rank], expected[rank]), (call, rank)
            assert torch.equal(results[rank][0], in_rank_order(parts[call])), (call, rank)
