"""Rows with draft tokens: bit-identical tokens and log-probabilities, on both runners."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pagespec import SamplingParams
from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.step_fields import step_fields
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.logprob_output import add_logprobs
from pagespec.engine.outputs import CompletionOutput, RequestOutput
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.runner.cpu.runner import ModelRunner, StepHandle
from tests.runner import both_runners
from tests.support.captures import graph_cache
from tests.support.models import VOCAB_SIZE, tiny_model

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, NUM_OUTPUTS = 4, 60, 6, 12


@pytest.fixture(scope="module")
def captured(request: pytest.FixtureRequest) -> CapturedModel:
    """The model that a test names as its parameter."""
    loaded = load_model(tiny_model(request.param))
    specs = probe_model(loaded)
    fields = step_fields(has_drafts=True, is_recurrent=bool(loaded.recurrent))
    options = CaptureOptions(fields=fields)
    return capture_model(loaded, specs, options, graph_cache=graph_cache())


class Guesses:
    """A drafter that is right about a token with some probability.

    Args:
        answers: the outputs by request.
    """

    max_draft_tokens = 4

    def __init__(self, answers: dict[str, list[int]], is_right: float) -> None:
        self._answers, self._is_right = answers, is_right

    def propose(self, request: Request) -> Sequence[int]:
        done = len(request.output_token_ids)
        rng = random.Random(f"{request.request_id}, {done}")
        answer = self._answers[request.request_id][done:]
        return [t if rng.random() < self._is_right else rng.randrange(VOCAB_SIZE) for t in answer]


class StagingRunner(ModelRunner):
    """Sends each step as rank 0 of several ranks does."""

    def dispatch(self, plan: StepPlan) -> StepHandle:
        self._sample_constrained()
        arrays = self.stage(plan)
        assert sum(array.nbytes for array in arrays) <= self.max_staged_bytes
        return self.launch([array.copy() for array in arrays], plan)


def make_requests(num_requests: int) -> list[Request]:
    """Plain requests: some sample, some return log-probabilities, every third edits its logits."""
    rng = random.Random(5)
    requests = []
    for i in range(num_requests):
        asked: dict[str, Any] = {"temperature": (0.0, 0.8)[i % 2], "max_tokens": NUM_OUTPUTS}
        if i % 4 < 2:
            asked |= {"logprobs": 2, "prompt_logprobs": 1 if i % 4 == 1 else None}
        if i == 4:
            asked |= {"logprobs": 0, "logprob_token_ids": [9, 3]}
        if i % 3 == 2:
            asked |= ({"repetition_penalty": 1.4}, {"allowed_token_ids": [7, 8, 9]})[i % 2]
        params = SamplingParams(**asked)
        edits = LogitEdits.of(params)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(2 + 3 * i)]
        requests.append(
            Request(
                str(i),
                prompt,
                params,
                max_num_tokens=len(prompt) + NUM_OUTPUTS,
                seed=i,
                edits=edits,
            )
        )
    return requests


def make_runner(captured: CapturedModel, kind: str, budget: int, **settings: Any) -> Any:
    if kind == "gpu":
        num_samples = min(budget, MAX_NUM_SEQS * (1 + Guesses.max_draft_tokens))
        settings |= {"max_num_seqs": max(MAX_NUM_SEQS, num_samples), "max_num_blocks": 16}
        return both_runners.make_runner(
            captured, kind, NUM_BLOCKS, max_num_tokens=budget, **settings
        )
    return (StagingRunner if kind == "staged" else ModelRunner)(
        captured,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_tokens=budget,
        max_num_rows=MAX_NUM_SEQS,
        max_num_blocks=16,
        **settings,
    )


def run(
    captured: CapturedModel, drafter: Guesses | None, budget: int, *, overlap: bool, kind: str
) -> tuple[dict[str, Any], int]:
    """The results that callers see for each request, and the largest number of samples in a row."""
    most = 0

    def on_logits(plan: StepPlan, _: object) -> None:
        nonlocal most
        most = max(most, *plan.num_samples)

    states = {"num_state_slots": 12, "state_interval": 8} if captured.loaded.recurrent else {}
    runner = make_runner(captured, kind, budget, overlap=overlap, on_logits=on_logits, **states)
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, BLOCK_SIZE, **states),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=budget,
        pipeline_depth=runner.pipeline_depth,
        drafter=drafter,
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    # Six have each parameter; an interpreted step takes long.
    requests = make_requests(6 if kind == "gpu" else 8)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    found = {}
    for request in requests:
        answer = CompletionOutput(0, "", request.output_token_ids)
        output = RequestOutput(request.request_id, None, request.token_ids, None, [answer])
        add_logprobs(output, [request], None)
        rows = None if answer.logprobs is None else list(answer.logprobs)
        prompt_rows = output.prompt_logprobs and list(output.prompt_logprobs)
        found[request.request_id] = answer.token_ids, answer.cumulative_logprob, rows, prompt_rows
    return found, most


SERVED = [
    (budget, overlap, kind)
    for budget in (8, 64)
    for overlap, kind in ((False, "cpu"), (True, "cpu"), (False, "staged"))
]
if "gpu" in both_runners.RUNNERS:
    SERVED += [(8, False, "gpu"), (64, True, "gpu")]
_INTERPRETED = (8, False, "gpu")  # an interpreted step takes long
CASES = [
    pytest.param(arch, *how, marks=[pytest.mark.nightly] * (how == _INTERPRETED))
    for arch in ("llama", "lfm2")
    for how in SERVED
    # Models with recurrent layers run in one process: no rank sends them a step.
    if arch == "llama" or how[-1] != "staged"
]


@pytest.mark.parametrize(("captured", "budget", "overlap", "kind"), CASES, indirect=["captured"])
@pytest.mark.usefixtures("small_chunks")
def test_no_answer_depends_on_draft_tokens(
    captured: CapturedModel, budget: int, overlap: bool, kind: str
) -> None:
    """Rows that edit their logits are among them."""
    how: dict[str, Any] = {"overlap": overlap, "kind": kind}
    plain, most = run(captured, None, budget, **how)
    assert most == 1
    answers = {name: token_ids for name, (token_ids, *_) in plain.items()}
    for is_right in (0.6,) if kind == "gpu" else (1.0, 0.6, 0.0):
        drafted, most = run(captured, Guesses(answers, is_right), budget, **how)
        assert drafted == plain
        assert most == 1 + Guesses.max_draft_tokens or budget == 8


def test_recurrent_layers_take_drafts_only_with_the_field() -> None:
    """Without it they would keep the states of rejected draft tokens."""
    loaded = load_model(tiny_model("lfm2"))
    plain = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    states = {"num_state_slots": 12, "state_interval": 8}
    runner = ModelRunner(plain, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **states)
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, BLOCK_SIZE, **states),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64,
        drafter=Guesses({}, 1.0),
    )
    with pytest.raises(ValueError, match=r"max_draft_tokens = 4 must be at most .* = 0"):
        Engine(scheduler, runner)
