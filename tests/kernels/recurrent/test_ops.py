"""Recurrent ops give a token the same bits in any schedule and write states to their own slots."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import cases
from .cases import Case, Request, Steps, run_whole

BF16 = torch.bfloat16
CASES: dict[str, Callable[[int], Case]] = {
    "short_conv": cases.short_conv,
    "short_conv_bf16": lambda n: cases.short_conv(n, channels=24, dtype=BF16),
    "short_conv_plain": lambda n: cases.short_conv(n, width=3, activation="", has_bias=False),
    "short_conv_gelu": lambda n: cases.short_conv(n, channels=7, activation="gelu"),
    "delta_rule": cases.delta_rule,
    "delta_rule_odd": lambda n: cases.delta_rule(n, 3, 3, 9, 7),
    "delta_rule_bf16": lambda n: cases.delta_rule(n, dtype=BF16),
    "delta_rule_channels": lambda n: cases.delta_rule(n, per_channel=True),
    "delta_rule_large": lambda n: cases.delta_rule(n, 4, 2, 128, 128),
    "ssd_scan": cases.ssd_scan,
    "ssd_scan_bf16": lambda n: cases.ssd_scan(n, dtype=BF16),
    "ssd_scan_large": lambda n: cases.ssd_scan(n, 8, 1, 64, 128),
    "selective_scan": cases.selective_scan,
    "selective_scan_bf16": lambda n: cases.selective_scan(n, size=16, dtype=BF16),
    "selective_scan_large": lambda n: cases.selective_scan(n, 2112, 16),
}


@pytest.fixture(params=CASES)
def make_case(request: pytest.FixtureRequest) -> Callable[[int], Case]:
    torch.manual_seed(0)
    return CASES[request.param]


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("chunk", "num_threads"),
    [(1, 1), (2, 1), (7, 1), (64, 1), (1, 2), (7, 7)],
    indirect=["num_threads"],
)
@pytest.mark.usefixtures("num_threads")
def test_chunks_give_the_bits_of_the_whole(make_case: Callable[[int], Case], chunk: int) -> None:
    case = make_case(70)
    outputs, state = run_whole(case, 0, 70, 16)
    assert outputs.isfinite().all()
    steps = Steps(case, 1, 16)
    request = Request(0, 70, [0] * 5)  # one slot, in place
    while request.done < 70:
        steps.step([(request, min(chunk, 70 - request.done))])
    assert torch.equal(torch.cat(request.outputs), outputs)
    assert torch.equal(case.kept(steps.states[0], 70, 16), case.kept(state, 70, 16))


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_give_the_bits_of_sequences_alone(
    make_case: Callable[[int], Case], seed: int
) -> None:
    """Many rows, shuffled, with slots of their own for some intervals and padding behind."""
    rng = random.Random(seed)
    interval = rng.choice([4, 8, 16])
    lengths = [rng.randrange(1, 40) for _ in range(9)]
    case = make_case(sum(lengths))
    requests, begin, slot = [], 0, 0
    for length in lengths:
        table = []
        for i in range(-(-length // interval)):
            if i == 0 or rng.random() < 0.5:
                slot += 1
            table.append(slot - 1)
        requests.append(Request(begin, begin + length, table))
        begin += length
    steps = Steps(case, slot, interval)
    while left := [r for r in requests if r.done < r.last - r.first]:
        rng.shuffle(left)
        work = []
        for request in left[: rng.randrange(1, 10)]:
            most = request.last - request.first - request.done
            work.append((request, min(most, rng.choice([0, 1, 1, 1, 2, 5, 11]))))
        padding = steps.step(work, rng.choice([0, 0, 3]))
        assert not padding.any()
    for request in requests:
        length = request.last - request.first
        outputs, state = run_whole(case, request.first, request.last, interval)
        assert torch.equal(torch.cat(request.outputs), outputs)
        found = case.kept(steps.states[request.table[-1]], length, interval)
        assert torch.equal(found, case.kept(state, length, interval))
        # The checkpoints: the states at the ends of intervals whose slot differs from the next.
        for i, (slot, after) in enumerate(zip(request.table, request.table[1:], strict=False)):
            if slot != after:
                end = (i + 1) * interval
                _, state = run_whole(case, request.first, request.first + end, interval)
                found = case.kept(steps.states[slot], end, interval)
                assert torch.equal(found, case.kept(state, end, interval))


@pytest.mark.parametrize("seed", range(3))
def test_states_behind_draft_tokens_are_not_kept(
    make_case: Callable[[int], Case], seed: int
) -> None:
    rng = random.Random(seed)
    cases.check_drafts(make_case, rng, rng.choice([4, 16, 32]))


def test_a_prefix_is_restored_from_a_checkpoint_that_others_share(
    make_case: Callable[[int], Case],
) -> None:
    """Two rows go on from one checkpoint, in one step with a row of their own beside them."""
    case = make_case(16 + 5)
    outputs, _ = run_whole(case, 0, 21, 8)
    steps = Steps(case, 5, 8)
    owner = Request(0, 21, [0, 1, 2])
    steps.step([(owner, 16)])
    checkpoint = case.state(steps.states[1]).clone()
    null = len(steps.states) - 1
    first = Request(0, 21, [null, 1, 3], done=16)
    second = Request(0, 21, [null, 1, 4], done=16)
    steps.step([(first, 5), (owner, 2), (second, 1)])
    steps.step([(second, 4), (owner, 3)])
    assert torch.equal(first.outputs[0], outputs[16:])
    assert torch.equal(torch.cat(second.outputs), outputs[16:])
    assert torch.equal(torch.cat(owner.outputs), outputs)
    assert torch.equal(case.state(steps.states[1]), checkpoint)
    at_end = case.kept(steps.states[2], 21, 8)
    for slot in (3, 4):
        assert torch.equal(case.kept(steps.states[slot], 21, 8), at_end)


def test_rows_on_the_null_slot_and_rows_without_tokens_change_nothing(
    make_case: Callable[[int], Case],
) -> None:
    case = make_case(12)
    outputs, state = run_whole(case, 0, 6, 4)
    steps = Steps(case, 2, 4)
    steps.states.zero_()
    null = len(steps.states) - 1
    request, idle = Request(0, 6, [0, 0]), Request(6, 12, [1, 1])
    nobody = [Request(6, 12, [null, null]), Request(6, 12, [null, null], done=4)]
    steps.step([(idle, 0), (nobody[0], 3), (request, 5), (idle, 0), (nobody[1], 1)])
    steps.step([(nobody[0], 1), (nobody[1], 1), (request, 1), (idle, 0)])
    assert torch.equal(torch.cat(request.outputs), outputs)
    assert torch.equal(case.kept(steps.states[0], 6, 4), case.kept(state, 6, 4))
    assert not steps.states[1].any()


def test_a_step_of_no_tokens_gives_zeros(make_case: Callable[[int], Case]) -> None:
    steps = Steps(make_case(4), 1, 4)
    before = steps.states.clone()
    assert not steps.step([(Request(0, 4, [0]), 0)], num_padding=3).any()
    assert torch.equal(steps.states.nan_to_num(7), before.nan_to_num(7))


def test_strided_inputs_are_read_as_they_are(make_case: Callable[[int], Case]) -> None:
    case = make_case(9)
    outputs, _ = run_whole(case, 0, 9)
    case.per_token = [
        torch.stack((x, torch.zeros_like(x)), -1).flatten(-2)[..., ::2] for x in case.per_token
    ]
    given = case.call
    case.call = lambda tokens, *rest: given(
        [torch.stack((x, x), -1)[..., 0].mT.contiguous().mT for x in tokens], *rest
    )
    assert torch.equal(run_whole(case, 0, 9)[0], outputs)


def test_torch_compile_traces_the_ops_whole(make_case: Callable[[int], Case]) -> None:
    case = make_case(6)
    outputs, state = run_whole(case, 0, 6)
    case.call = torch.compile(case.call, fullgraph=True, backend="aot_eager")
    compiled_outputs, compiled_state = run_whole(case, 0, 6)
    assert torch.equal(compiled_outputs, outputs)
    assert torch.equal(compiled_state, state)


class Recorder(TorchDispatchMode):
    """Records the arguments of the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "pagespec":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def test_opcheck_accepts_the_schemas(make_case: Callable[[int], Case]) -> None:
    with Recorder() as recorder:
        run_whole(make_case(6), 0, 6)
    ((op, arguments),) = recorder.calls
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
