"""The recurrent Triton kernels without a GPU.

Under Triton's interpreter they must be close to the CPU implementation and have the same bits in
any schedule. They must also compile for Hopper.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels.arguments import DeltaInputs, ScanInputs, SsdInputs
from pagespec.kernels.recurrent.recurrent_spec import CHUNK
from pagespec.kernels.recurrent.walk import StepRows
from tests.support.apart import run_apart

from . import cases
from .cases import Case, Request, Steps, run_whole

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's interpreter is off: the kernels are compiled here, not interpreted",
)
BF16 = torch.bfloat16
CASES: dict[str, Callable[[int], Case]] = {
    "short_conv": lambda n: cases.short_conv(n, channels=6),
    "short_conv_bf16": lambda n: cases.short_conv(n, channels=6, dtype=BF16),
    "short_conv_plain": lambda n: cases.short_conv(n, width=3, activation="", has_bias=False),
    "short_conv_gelu": lambda n: cases.short_conv(n, channels=7, width=2, activation="gelu"),
    "delta_rule": lambda n: cases.delta_rule(n, 2, 1, 8, 6),
    "delta_rule_bf16": lambda n: cases.delta_rule(n, 1, 1, 16, 4, dtype=BF16),
    "delta_rule_channels": lambda n: cases.delta_rule(n, 2, 2, 9, 7, per_channel=True),
    "delta_rule_few_keys": lambda n: cases.delta_rule(n, 1, 1, 3, 4),
    "delta_rule_tiles": lambda n: cases.delta_rule(n, 1, 1, 128, 40),
    "ssd_scan": lambda n: cases.ssd_scan(n, 2, 1, 6, 8),
    "ssd_scan_bf16": lambda n: cases.ssd_scan(n, 1, 1, 6, 16, dtype=BF16),
    "selective_scan": lambda n: cases.selective_scan(n, inner=70),
    "selective_scan_bf16": lambda n: cases.selective_scan(n, size=16, dtype=BF16),
}


def kernel_of(name: str) -> Callable[..., Tensor]:
    """The kernel's function."""
    from pagespec.kernels.recurrent import chunked, short_conv, walked

    return {
        "delta_rule": walked.delta_rule,
        "delta_rule in chunks": chunked.delta_rule,
        "short_conv": short_conv.short_conv,
        "selective_scan": walked.selective_scan,
        "ssd_scan in chunks": chunked.ssd_scan,
    }[name]


_INPUTS = {"delta_rule": DeltaInputs, "ssd_scan": SsdInputs, "selective_scan": ScanInputs}


@pytest.fixture(params=CASES)
def make_case(request: pytest.FixtureRequest) -> Callable[[int], Case]:
    torch.manual_seed(0)
    return CASES[request.param]


def by_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a case call the kernel in place of the op."""
    case.in_chunks = case.key >= 0
    function = kernel_of(case.name + " in chunks" * case.in_chunks)
    bundle: Any = _INPUTS.get(case.name)
    place = 3 if bundle is None else len(bundle._fields)  # of the states

    def call(*arguments: Any) -> Tensor:
        inputs, (states, *rest) = arguments[:place], arguments[place:]
        rows = StepRows(*rest[:6])
        return function(
            *(inputs if bundle is None else (bundle(*inputs),)), states, rows, *rest[6:]
        )

    monkeypatch.setattr(cases.ops, case.name, call)


@interpreted
def test_kernels_are_close_to_the_cpu(
    make_case: Callable[[int], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(2 * CHUNK)
    expected, expected_state = run_whole(case, 0, 2 * CHUNK)
    by_kernel(case, monkeypatch)
    outputs, slot = run_whole(case, 0, 2 * CHUNK)
    assert outputs.dtype == expected.dtype
    largest = expected.abs().max().item()
    limit = 1e-5 if expected.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(outputs, expected, rtol=0, atol=limit * largest)
    largest = expected_state.abs().max().item()
    torch.testing.assert_close(case.state(slot), expected_state, rtol=0, atol=1e-5 * largest)


@interpreted
@pytest.mark.parametrize("decay", [-200.0, -1e5, float("-inf")])
def test_a_strong_decay_costs_later_positions_no_precision(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = cases.delta_rule(2 * CHUNK, 2, 1, 8, 6)
    case.per_token[3][5] = decay
    expected, _ = run_whole(case, 0, 2 * CHUNK)
    by_kernel(case, monkeypatch)
    outputs, _ = run_whole(case, 0, 2 * CHUNK)
    largest = expected.abs().max().item()
    torch.testing.assert_close(outputs, expected, rtol=0, atol=2e-5 * largest)


@interpreted
@pytest.mark.parametrize(("size", "more"), [(16, 2), (64, 1)])
def test_each_part_of_each_row_has_a_program(size: int, more: int) -> None:
    """Of as many programs as there may have to be; rows may begin inside a chunk."""
    from .dealt_parts import deal

    rng = random.Random(0)
    lengths = [rng.choice([0, 0, 1, 1, 2, size - 1, size, size + 1, 5 * size]) for _ in range(300)]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    num_programs = int(starts[-1]) // size + more * len(lengths)
    out = torch.empty(num_programs, 2, dtype=torch.int32)
    deal[(num_programs,)](starts, out, len(lengths), size, more)
    found = [tuple(pair) for pair in out.tolist()]
    assert len(set(found)) == num_programs
    # A row that begins at the last position of a chunk is in one chunk more.
    most_inside = size - 1 if more == 2 else 0
    needed = {
        (row, i)
        for row, length in enumerate(lengths)
        for i in range(-(-(length + most_inside) // size) if length else 0)
    }
    assert needed <= set(found)


@interpreted
@pytest.mark.parametrize("name", ["short_conv", "short_conv_plain"])
def test_parts_of_a_row_give_its_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagespec.kernels.recurrent import short_conv

    torch.manual_seed(0)
    case = CASES[name](50)
    by_kernel(case, monkeypatch)
    expected, slot = run_whole(case, 0, 50)
    monkeypatch.setattr(short_conv, "_PART", 8)
    outputs, again = run_whole(case, 0, 50)
    assert torch.equal(outputs, expected)
    assert torch.equal(case.kept(again, 50, 64), case.kept(slot, 50, 64))


@interpreted
@pytest.mark.parametrize("interval", [4, 20, 32])
def test_kernels_give_the_bits_of_sequences_alone(
    make_case: Callable[[int], Case], interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the ops: cuts, rows beside each other, checkpoints, padding, rows without tokens."""
    rng = random.Random(0)
    lengths = [interval + 2, 2 * interval + 1, 3]
    case = make_case(sum(lengths))
    by_kernel(case, monkeypatch)
    tables = [[0, 1], [2, 2, 3], [4]]
    begins = [0, lengths[0], lengths[0] + lengths[1]]
    requests = [
        Request(begin, begin + length, table)
        for begin, length, table in zip(begins, lengths, tables, strict=True)
    ]
    steps = Steps(case, 5, interval)
    while left := [r for r in requests if r.done < r.last - r.first]:
        rng.shuffle(left)
        work = [
            (r, min(r.last - r.first - r.done, rng.choice([0, 1, 1, 2, interval]))) for r in left
        ]
        assert not steps.step(work, rng.choice([0, 2])).any()

    def assert_holds(slot: int, kept: Tensor, num_tokens: int) -> None:
        found = case.kept(steps.states[slot], num_tokens, interval)
        assert torch.equal(found, case.kept(kept, num_tokens, interval))

    for request, length in zip(requests, lengths, strict=True):
        outputs, slot = run_whole(case, request.first, request.last, interval)
        assert torch.equal(torch.cat(request.outputs), outputs)
        assert_holds(request.table[-1], slot, length)
    for slot, first, length in [(0, 0, interval), (2, begins[1], 2 * interval)]:
        assert_holds(slot, run_whole(case, first, first + length, interval)[1], length)


@interpreted
@pytest.mark.parametrize("interval", [8, CHUNK])
def test_kernels_do_not_keep_states_behind_draft_tokens(
    make_case: Callable[[int], Case], interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_kernels(num_tokens: int) -> Case:
        case = make_case(num_tokens)
        by_kernel(case, monkeypatch)
        return case

    cases.check_drafts(by_kernels, random.Random(1), interval)


@interpreted
def test_rows_share_a_checkpoint(
    make_case: Callable[[int], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(7)
    by_kernel(case, monkeypatch)
    outputs, slot = run_whole(case, 0, 7, 4)
    steps = Steps(case, 3, 4)
    owner = Request(0, 7, [0, 1])
    steps.step([(owner, 4)])
    kept = steps.states[0].clone()
    other = Request(0, 7, [0, 2], done=4)
    steps.step([(owner, 1), (other, 3)])
    steps.step([(owner, 2)])
    assert torch.equal(torch.cat(owner.outputs), outputs)
    assert torch.equal(other.outputs[0], outputs[4:])
    assert torch.equal(steps.states[0].nan_to_num(7), kept.nan_to_num(7))
    for mine in (1, 2):
        assert torch.equal(case.kept(steps.states[mine], 7, 4), case.kept(slot, 7, 4))


@interpreted
@pytest.mark.parametrize("name", ["delta_rule", "delta_rule_bf16", "ssd_scan", "ssd_scan_bf16"])
def test_all_kernels_of_chunks_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of prompts, of many rows and of few."""
    torch.manual_seed(0)
    case = CASES[name](60)
    by_kernel(case, monkeypatch)
    found = []
    for is_long, is_many in ((True, True), (False, True), (False, False)):
        cases.use_kernels_of(monkeypatch, has_long_rows=is_long, has_many_rows=is_many)
        steps = Steps(case, 3, 2 * CHUNK)
        rows = Request(0, 40, [0, 1]), Request(40, 60, [2])
        for first, second in ((5, 0), (1, 7), (30, 13), (4, 0)):
            steps.step([(rows[0], first), (rows[1], second)])
        found.append(
            (*(torch.cat(row.outputs) for row in rows), case.kept(steps.states[1], 40, 32))
        )
    for same in zip(*found, strict=True):
        assert torch.equal(same[0], same[1])
        assert torch.equal(same[0], same[2])


def test_they_compile_for_hopper_and_hardly_spill() -> None:
    built = json.loads(run_apart(str(Path(__file__).with_name("compile_kernels.py"))))
    assert len(built) == 18
    for name, report in built.items():
        # With fewer registers than it would take, what a chunk's end needs waits in memory.
        assert report["spilled"] <= (128 if "many rows" in name else 0), name
        assert report["registers"] <= 255, name
