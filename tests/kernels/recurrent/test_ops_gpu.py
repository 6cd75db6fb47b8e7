"""The recurrent ops on a GPU (Triton kernels): the CPU's tests, and a comparison with the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import cases
from .cases import Case, Request, Steps, run_whole
from .test_ops import (  # noqa: F401 (the first is a fixture, the others run here again)
    make_case,
    test_a_prefix_is_restored_from_a_checkpoint_that_others_share,
    test_a_step_of_no_tokens_gives_zeros,
    test_random_schedules_give_the_bits_of_sequences_alone,
    test_rows_on_the_null_slot_and_rows_without_tokens_change_nothing,
    test_strided_inputs_are_read_as_they_are,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def real_cases(num_tokens: int) -> dict[str, Case]:
    """At the shapes of Qwen3-Next, Kimi Linear, Nemotron-H and Jamba."""
    torch.manual_seed(0)
    return {
        "short_conv": cases.short_conv(num_tokens, channels=8192, dtype=BF16),
        "delta_rule": cases.delta_rule(num_tokens, 32, 16, 128, 128, dtype=BF16),
        "channels": cases.delta_rule(num_tokens, 32, 32, 128, 128, BF16, per_channel=True),
        "ssd_scan": cases.ssd_scan(num_tokens, 128, 8, 64, 128, dtype=BF16),
        "selective_scan": cases.selective_scan(num_tokens, 8192, 16, dtype=BF16),
    }


@pytest.mark.parametrize("name", ["short_conv", "delta_rule", "channels", "ssd_scan",
                                  "selective_scan"])  # fmt: skip
def test_real_shapes_are_close_to_the_cpu_and_keep_their_bits(name: str) -> None:
    case = real_cases(320)[name]
    outputs, slot = run_whole(case, 0, 320, 64)
    steps = Steps(case, 1, 64)
    request = Request(0, 320, [0] * 5)
    for n in (1, 2, 7, 64, 1, 1, 100, 144):
        steps.step([(request, n)])
    assert torch.equal(torch.cat(request.outputs), outputs)
    state = case.state(slot)
    assert torch.equal(case.state(steps.states[0]), state)

    with torch.device("cpu"):
        torch.manual_seed(0)
        expected_case = real_cases(320)[name]
    expected_case.per_token = [x.cpu() for x in case.per_token]
    weights = zip(_closure(expected_case), _closure(case), strict=True)
    for mine, given in weights:
        mine.copy_(given)
    with torch.device("cpu"):
        expected, expected_state = run_whole(expected_case, 0, 320)
    largest = expected.abs().max().item()
    # Mamba-1 rounds to bfloat16 what it then adds to and multiplies in float32.
    is_exact = expected.dtype == torch.float32 and name != "selective_scan"
    limit = 1e-4 if is_exact else 2**-7
    torch.testing.assert_close(outputs.cpu(), expected, rtol=0, atol=limit * largest)
    largest = expected_state.abs().max().item()
    limit = 1e-4 if expected_state.dtype == torch.float32 else 0
    torch.testing.assert_close(state.cpu(), expected_state, rtol=0, atol=limit * largest)


def _closure(case: Case) -> list[torch.Tensor]:
    """The weights that a case's function holds."""
    cells = [cell.cell_contents for cell in case.call.__closure__ or ()]
    return [cell for cell in cells if isinstance(cell, torch.Tensor)]


@pytest.mark.parametrize("name", ["short_conv", "delta_rule", "ssd_scan", "selective_scan"])
def test_a_captured_step_gives_the_bits_of_a_launched_one(name: str) -> None:
    """Nothing in the ops waits for the GPU, and what is captured follows the metadata."""
    case = real_cases(8)[name]
    starts = torch.arange(5, dtype=torch.int32)
    contexts = torch.ones(4, dtype=torch.int32)
    tables = torch.arange(4, dtype=torch.int32)[:, None].repeat(1, 2)
    of_rows = torch.arange(4, dtype=torch.int32)
    states = torch.zeros(5, *case.slot_shape, dtype=case.state_dtype)
    tokens = [x[:4].clone() for x in case.per_token]

    def step() -> torch.Tensor:
        return case.call(tokens, states, starts, contexts, tables, of_rows, 4, None)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    contexts += 1
    for token, x in zip(tokens, case.per_token, strict=True):
        token.copy_(x[4:])
    before = states.clone()
    graph.replay()
    captured, after = out.clone(), states.clone()
    states.copy_(before)
    assert torch.equal(step(), captured)
    assert torch.equal(states, after)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", ["delta_rule", "ssd_scan"])
def test_all_ways_to_compute_a_chunk_give_the_same_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, token by token and in cuts, by the kernels of prompts, of many rows and of few."""
    torch.manual_seed(0)
    make = {
        "delta_rule": lambda n: cases.delta_rule(n, 4, 2, 128, 128, dtype=dtype),
        "ssd_scan": lambda n: cases.ssd_scan(n, 8, 2, 64, 128, dtype=dtype),
    }[name]
    case = make(150)
    outputs, slot = run_whole(case, 0, 150, 64)
    for is_long, is_many in ((True, True), (False, True), (False, False)):
        cases.use_kernels_of(monkeypatch, has_long_rows=is_long, has_many_rows=is_many)
        for cuts in ([150], [1] * 150, [30, 1, 1, 1, 16, 47, 54]):
            steps = Steps(case, 1, 64)
            request = Request(0, 150, [0] * 3)
            for n in cuts:
                steps.step([(request, n)])
            assert torch.equal(torch.cat(request.outputs), outputs)
            assert torch.equal(case.kept(steps.states[0], 150, 64), case.kept(slot, 150, 64))
