"""Structured output through both runners; the GPU runner's kernels are interpreted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pagespec import StructuredOutputs
from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from tests.runner import both_runners
from tests.runner.both_runners import BLOCK_SIZE, MAX_NUM_SEQS, RUNNERS
from tests.support.captures import graph_cache
from tests.support.models import tiny_model
from tests.support.structured import END, check_output, make_request, random_outputs, tokenizer

pytestmark = pytest.mark.usefixtures("small_chunks")


@cache
def captured() -> CapturedModel:
    loaded = load_model(tiny_model("llama", num_hidden_layers=1))
    loaded = replace(loaded, tokenizer=tokenizer(), eos_token_ids=frozenset({END}))
    return capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


def make_runner(kind: str, num_blocks: int, overlap: bool, max_num_seqs: int = MAX_NUM_SEQS) -> Any:
    return both_runners.make_runner(
        captured(),
        kind,
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_blocks=24,
        overlap=overlap,
    )


def serve(
    requests: list[Request],
    kind: str = "cpu",
    *,
    overlap: bool = True,
    num_blocks: int = 200,
    max_num_seqs: int = MAX_NUM_SEQS,
) -> Engine:
    runner = make_runner(kind, num_blocks, overlap, max_num_seqs)
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(24, max_num_seqs),
        pipeline_depth=runner.pipeline_depth,
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    for request in requests:
        engine.add(request)
    run_out(engine)
    return engine


def run_out(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def mixed_requests(
    seed: int, num_requests: int, max_tokens: int, share: float = 0.5
) -> tuple[list[Request], dict[str, Callable[[str], bool]]]:
    """Requests, a share of them constrained, and the checks of their texts."""
    rng = random.Random(seed)
    requests, checks = [], {}
    for number in range(num_requests):
        outputs = None
        if rng.random() < share:
            outputs, checks[str(number)] = random_outputs(rng)
        edits = rng.choice([{}, {"repetition_penalty": 1.3}])
        requests.append(make_request(str(number), outputs, rng, max_tokens, **edits))
    return requests, checks


def test_complete_answers_match_their_constraints() -> None:
    requests, checks = mixed_requests(0, 60, 60, share=0.9)
    serve(requests)
    complete = [
        check_output(request.output_token_ids, request.finish_reason, checks[request.request_id])
        for request in requests
        if request.request_id in checks
    ]
    assert sum(complete) > 0.8 * len(complete) > 30


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_tokens_are_those_of_the_request_alone(seed: int) -> None:
    alone = []
    for number in range(14):
        requests, _ = mixed_requests(seed, 14, 24)
        serve([requests[number]], overlap=False, max_num_seqs=1)
        alone.append(requests[number].output_token_ids)
    for overlap, num_blocks in ((False, 200), (True, 200), (True, 14)):
        requests, _ = mixed_requests(seed, 14, 24)
        serve(requests, overlap=overlap, num_blocks=num_blocks)
        assert [request.output_token_ids for request in requests] == alone
        has_preempted = any(
            request.num_preemptions and request.sampling_params.structured_outputs
            for request in requests
        )
        assert has_preempted == (num_blocks == 14)


def test_neighbours_are_those_of_a_run_without_schemas() -> None:
    requests, checks = mixed_requests(3, 12, 20)
    serve(requests)
    others, _ = mixed_requests(3, 12, 20)
    others = [request for request in others if request.request_id not in checks]
    serve(others)
    assert {r.request_id: r.output_token_ids for r in others} == {
        r.request_id: r.output_token_ids for r in requests if r.request_id not in checks
    }


@pytest.mark.skipif("gpu" not in RUNNERS, reason="kernels are not interpreted here")
@pytest.mark.parametrize(
    ("overlap", "num_blocks"), [(True, 14), pytest.param(False, 200, marks=pytest.mark.nightly)]
)
def test_on_a_gpu_masks_are_kept_the_same_way(overlap: bool, num_blocks: int) -> None:
    requests, checks = mixed_requests(4, 8, 12, share=0.6)
    serve(requests, "gpu", overlap=overlap, num_blocks=num_blocks)
    for request in requests:
        if request.request_id in checks:
            is_met = checks[request.request_id]
            check_output(request.output_token_ids, request.finish_reason, is_met)
    alone, _ = mixed_requests(4, 8, 12, share=0.6)
    greedy = [r for r in alone if r.sampling_params.temperature == 0]
    for request in greedy:
        serve([request], "cpu", overlap=False, max_num_seqs=1)
        (other,) = [r for r in requests if r.request_id == request.request_id]
        assert request.output_token_ids == other.output_token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_nothing_may_follow_ends_alone(overlap: bool) -> None:
    requests, _ = mixed_requests(5, 6, 16)
    alone, _ = mixed_requests(5, 6, 16)
    serve(alone)
    only_z = LogitEdits(allowed=(3 + ord("z"),))
    doomed = make_request("9", StructuredOutputs(regex="a+"), random.Random(0), 16)
    doomed.info = replace(doomed.info, edits=only_z)
    engine = serve([*requests[:2], doomed, *requests[2:]], overlap=overlap)
    assert doomed.finish_reason == "error"
    assert "structured_outputs" in str(engine.error(doomed))
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in alone]


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_failed_step_and_an_abort_the_runner_serves_again(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner("cpu", 200, overlap)
    scheduler = Scheduler(
        BlockManager(200, BLOCK_SIZE),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=24,
        pipeline_depth=int(overlap),
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    expected, _ = mixed_requests(6, 8, 16, share=0.7)
    serve(expected)
    for failing in ("dispatch", "masks", "settle"):
        requests, _ = mixed_requests(6, 8, 16, share=0.7)
        for request in requests:
            engine.add(request)
        for _ in range(6):
            engine.step()
        with monkeypatch.context() as patch:
            target = runner._packer if failing == "dispatch" else runner._matchers
            name = {"dispatch": "pack"}.get(failing, failing)
            patch.setattr(type(target), name, _interrupt)
            with pytest.raises(KeyboardInterrupt):
                run_out(engine)
        assert {r.finish_reason for r in requests} <= {"error", "stop", "length"}
        requests, _ = mixed_requests(6, 8, 16, share=0.7)
        for request in requests:
            engine.add(request)
        for _ in range(5):
            engine.step()
        engine.abort("0")
        run_out(engine)
        assert [r.output_token_ids for r in requests[1:]] == [
            r.output_token_ids for r in expected[1:]
        ]
        assert not runner._matchers.is_waiting()


def _interrupt(*_args: object, **_kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "seed", [8, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(9, 16))]
)
def test_whatever_is_done_to_them_tokens_are_those_of_undisturbed_requests(seed: int) -> None:
    """Pauses, resumptions and aborts in flight, resets of the prefix cache and preemptions; three
    continuations of one prompt are among the requests."""

    def requests() -> tuple[list[Request], list[Request]]:
        alone, _ = mixed_requests(seed, 8, 20, share=0.6)
        outputs, _ = random_outputs(random.Random(seed))
        leader = make_request("100", outputs, random.Random(seed), 20)
        return alone, [leader, *(leader.sibling(str(100 + i), i, None) for i in (1, 2))]

    alone, group = requests()
    serve(alone, overlap=False)
    for request in group:
        serve([request], overlap=False)
    expected = {r.request_id: (r.output_token_ids, r.finish_reason) for r in (*alone, *group)}

    rng = random.Random(seed)
    engine = serve([], num_blocks=14)
    alone, group = requests()
    for request in alone:
        engine.add(request)
    engine.add(group[0], siblings=group[1:])
    everybody = [*alone, *group]
    num_steps = 0
    while engine.has_work or engine.scheduler.requests:
        engine.step()
        num_steps += 1
        live = list(engine.scheduler.requests)
        if live and rng.random() < 0.3:
            engine.pause(rng.choice(live))
        if live and (rng.random() < 0.4 or not engine.has_work):
            engine.resume(rng.choice(live))
        if live and rng.random() < 0.02:
            engine.abort(rng.choice(live))
        if rng.random() < 0.05:
            engine.reset_prefix_cache()
        assert num_steps < 5000
    for request in everybody:
        outputs, reason = expected[request.request_id]
        got = request.output_token_ids
        assert got == outputs[: len(got)]
        assert request.finish_reason in (reason, "abort")
    assert engine.scheduler.queues.num_preemptions > 0
    assert engine.runner._matchers._texts.keys() <= {  # type: ignore[attr-defined]
        request.request_id for request in everybody
    }


def test_others_have_a_row_in_each_step_and_constrained_ones_in_every_second() -> None:
    requests, checks = mixed_requests(3, 8, 20)
    engine = serve([])
    sizes: list[tuple[int, int]] = []
    dispatch = engine.runner.dispatch

    def seen(plan: StepPlan) -> object:
        constrained = sum(r.sampling_params.structured_outputs is not None for r in plan.requests)
        sizes.append((len(plan) - constrained, constrained))
        return dispatch(plan)

    engine.runner.dispatch = seen  # type: ignore[method-assign]
    for request in requests[:5]:
        engine.add(request)
    for _ in range(12):
        engine.step()
    num_constrained = sum(request.request_id in checks for request in requests[:5])
    assert 0 < num_constrained < 5
    late = sizes[4:]
    assert {others for others, _ in late} == {5 - num_constrained}
    assert all(a + b <= num_constrained for (_, a), (_, b) in itertools.pairwise(late))


def test_ignored_ends_follow_a_complete_text() -> None:
    request = make_request("0", StructuredOutputs(choice=["ab"]), random.Random(0), 6)
    request.stop_token_ids = frozenset()
    serve([request])
    assert request.finish_reason == "length"
    assert request.output_token_ids[-3:] == [END] * 3


def test_many_constrained_rows_among_more() -> None:
    requests, checks = mixed_requests(7, 256, 6, share=0.25)
    serve(requests, max_num_seqs=256, num_blocks=256 * 8)
    assert 40 < len(checks) < 90
    complete = [
        check_output(request.output_token_ids, request.finish_reason, checks[request.request_id])
        for request in requests
        if request.request_id in checks
    ]
    assert any(complete)
