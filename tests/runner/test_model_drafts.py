"""Draft tokens with a second model on a CPU. A model that drafts for itself is right about every
token if its KV, positions and noise are those of the target."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec import SamplingParams
from pagespec.compile.captured_model import CapturedModel, capture_model
from pagespec.compile.kv_cache import allocate_kv_caches
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.step_inputs import NO_STATES, KVCaches, StepInputs
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.drafting.drafters import ModelDrafter
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.runner.cpu.runner import ModelRunner
from pagespec.runner.draft_model import Draw
from tests.support.captures import graph_cache
from tests.support.models import VOCAB_SIZE, tiny_model

BLOCK_SIZE, NUM_OUTPUTS, NUM_DRAFTS = 4, 14, 3
FREE = StepCosts([(1, 1.0), (10_000, 1.0)])
CONFIG = SpeculativeConfig(method="draft_model", num_speculative_tokens=NUM_DRAFTS)
# Blocks, budget, requests at once, and whether steps overlap.
WORLDS = {
    "roomy": (90, 64, 6, False),
    "overlap": (90, 64, 6, True),
    "chunks": (90, 9, 6, False),
    "preempting": (12, 12, 4, False),
    "preempting with overlap": (12, 12, 4, True),
    "few blocks": (8, 16, 2, False),
}


def captured_llama(num_hidden_layers: int) -> CapturedModel:
    loaded = load_model(tiny_model("llama", num_hidden_layers=num_hidden_layers))
    return capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


@pytest.fixture(scope="module")
def target() -> CapturedModel:
    return captured_llama(2)


@pytest.fixture(scope="module")
def other() -> CapturedModel:
    return captured_llama(1)


class DraftModel:
    """An ordinary model as a drafter."""

    needs_hidden = False

    def __init__(self, captured: CapturedModel) -> None:
        self._captured = captured

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVCaches:
        loaded = self._captured.loaded
        caches = allocate_kv_caches(
            self._captured.specs, num_blocks, block_size, loaded.dtype, loaded.device
        )
        for cache in (cache for call in caches for cache in call):
            cache.fill_(float("nan"))  # what is read before it is written spoils every token
        return caches

    def bind(self, kv_caches: KVCaches) -> Draw:
        run = self._captured.bind(kv_caches, NO_STATES)
        return lambda inputs, _: (run(inputs)[0], None)

    def bind_fill(self, kv_caches: KVCaches) -> Any:
        """For the runner on a GPU."""
        run = self._captured.bind_without_head(kv_caches, NO_STATES)
        return lambda inputs, _: run(inputs)


class ShiftedOracle:
    """A drafter that reads the token at p + 1 and the target's hidden state at p, and looks up what
    follows. Its KV is the token itself, so that it reads exactly what its slots hold.

    Args:
        answers: prompts with outputs.
        is_right: the probability of a right token.
        states: hidden states by the tokens before them, shared by several runs.
    """

    needs_hidden = True

    def __init__(
        self, answers: Sequence[list[int]], is_right: float, states: dict[Any, bytes]
    ) -> None:
        self._after = {tuple(a[1:end]): a[end] for a in answers for end in range(2, len(a))}
        self._is_right, self._states = is_right, states
        self._rng = random.Random(1)

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVCaches:
        return [(torch.full((num_blocks + 1, block_size), -1),)]

    def bind(self, kv_caches: KVCaches) -> Draw:
        ((cache,),) = kv_caches

        def forward(inputs: StepInputs, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
            assert hidden is not None
            assert len(hidden) == inputs.input_ids.shape[1]
            cache.view(-1)[inputs.slot_mapping] = inputs.input_ids[0]
            is_first = hidden.shape[1] > 1
            known: dict[int, tuple[int, ...]] = {}
            ranges = pairwise(inputs.query_starts.tolist())
            for row, (begin, end) in zip(inputs.table_rows.tolist(), ranges, strict=True):
                for token in range(begin, end):
                    position = int(inputs.position_ids[0, token])
                    blocks = inputs.block_tables[row].long()
                    read = cache[blocks].view(-1)[: position + 1].tolist()
                    assert -1 not in read, "a slot is read before it is written"
                    known[token] = tuple(read)
                    if is_first and position > 1:  # the first token is in no slot
                        bits = hidden[token].numpy().tobytes()
                        assert self._states.setdefault(known[token][:-1], bits) == bits
            logits = torch.zeros(len(inputs.logits_to_keep), VOCAB_SIZE)
            for i, token in enumerate(inputs.logits_to_keep.tolist()):
                right = self._after.get(known.get(token, ()))
                wrong = self._rng.randrange(VOCAB_SIZE)
                is_right = right is not None and self._rng.random() < self._is_right
                logits[i, right if is_right else wrong] = 1e6
            return logits, torch.zeros(len(hidden), 1)

        return forward


def make_requests(temperature: float, *, has_edits: bool = False) -> list[Request]:
    """Prompts of unlike lengths; some begin with the same blocks."""
    rng = random.Random(5)
    start = [rng.randrange(VOCAB_SIZE) for _ in range(9)]
    requests = []
    for i in range(8):
        asked: dict[str, Any] = {"temperature": temperature, "max_tokens": NUM_OUTPUTS}
        if i == 3:
            asked["top_k"] = 5
        if has_edits and i % 3 == 2:
            asked |= {"repetition_penalty": 1.4, "logprobs": 1}
        params = SamplingParams(**asked)
        prompt = start[: 9 * (i % 2)] + [rng.randrange(VOCAB_SIZE) for _ in range(1 + 2 * (i % 5))]
        requests.append(
            Request(
                str(i),
                prompt,
                params,
                max_num_tokens=len(prompt) + NUM_OUTPUTS,
                seed=i,
                edits=LogitEdits.of(params),
            )
        )
    return requests


def run(
    target: CapturedModel,
    model: Any,
    requests: Sequence[Request],
    world: str,
    siblings: Sequence[Request] = (),
) -> tuple[list[list[int]], Scheduler, int]:
    """The outputs of the requests, the scheduler, and the number of steps."""
    num_blocks, budget, max_num_seqs, overlap = WORLDS[world]
    num_steps = 0

    def count(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1

    runner = ModelRunner(
        target,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        overlap=overlap,
        draft_model=model,
        on_logits=count,
    )
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        pipeline_depth=runner.pipeline_depth,
        drafter=None if model is None else ModelDrafter(CONFIG, FREE),
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    for request in requests:
        engine.add(request, siblings=siblings if request is requests[0] else ())
    while engine.has_work:
        engine.step()
    return [r.output_token_ids for r in (*requests, *siblings)], scheduler, num_steps


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
def test_a_model_that_drafts_for_itself_is_always_right(
    target: CapturedModel, world: str, temperature: float
) -> None:
    plain, _, num_plain_steps = run(target, None, make_requests(temperature), world)
    drafted, scheduler, num_steps = run(
        target, DraftModel(target), make_requests(temperature), world
    )
    assert drafted == plain
    counts = scheduler.draft_counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 20
    assert num_steps < num_plain_steps


def test_the_worlds_have_hits_and_preemptions(target: CapturedModel) -> None:
    for world in ("preempting", "preempting with overlap"):
        requests = make_requests(0.8)
        run(target, DraftModel(target), requests, world)
        assert sum(r.num_preemptions for r in requests) > 2
        assert sum(r.num_cached_tokens for r in requests) > 0


@pytest.mark.parametrize("world", WORLDS)
def test_another_model_changes_no_output(
    target: CapturedModel, other: CapturedModel, world: str
) -> None:
    for temperature in (0.0, 1.2):
        plain, _, _ = run(target, None, make_requests(temperature, has_edits=True), world)
        drafted, scheduler, _ = run(
            target, DraftModel(other), make_requests(temperature, has_edits=True), world
        )
        assert drafted == plain
        counts = scheduler.draft_counts
        assert counts.num_accepted_tokens < counts.num_draft_tokens


def test_siblings_draft_from_copied_blocks(target: CapturedModel) -> None:
    def with_siblings() -> tuple[list[Request], list[Request]]:
        requests = make_requests(0.8)[:2]
        return requests, [requests[0].sibling(f"s{i}", 100 + i, None) for i in range(3)]

    requests, siblings = with_siblings()
    plain, _, _ = run(target, None, requests, "roomy", siblings)
    requests, siblings = with_siblings()
    drafted, scheduler, _ = run(target, DraftModel(target), requests, "roomy", siblings)
    assert drafted == plain
    counts = scheduler.draft_counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("is_right", [1.0, 0.5])
def test_a_drafter_reads_the_next_tokens_and_the_hidden_states(
    target: CapturedModel, world: str, is_right: float
) -> None:
    plain, _, _ = run(target, None, make_requests(0.8), "roomy")
    prompts = [request.token_ids for request in make_requests(0.8)]
    answers = [prompt + output for prompt, output in zip(prompts, plain, strict=True)]
    oracle = ShiftedOracle(answers, is_right, STATES)
    drafted, scheduler, _ = run(target, oracle, make_requests(0.8), world)
    assert drafted == plain
    counts = scheduler.draft_counts
    assert counts.num_draft_tokens > 20
    if is_right == 1.0:
        assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens


STATES: dict[Any, bytes] = {}


def test_a_plan_wants_no_more_tokens_than_the_request_may_have(target: CapturedModel) -> None:
    plans: list[StepPlan] = []

    class Watched(ModelRunner):
        def dispatch(self, plan: StepPlan) -> Any:
            plans.append(plan)
            return super().dispatch(plan)

    runner = Watched(target, block_size=4, num_blocks=20, draft_model=DraftModel(target))
    scheduler = Scheduler(
        BlockManager(20, 4),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        drafter=ModelDrafter(CONFIG, FREE),
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    params = SamplingParams(temperature=0.0)
    engine.add(Request("a", [1, 2, 3], params, max_num_tokens=11))
    while engine.has_work:
        engine.step()
    # 3 tokens, then the sample; drafts behind it; 8 outputs in all.
    assert [dict(plan.wanted_drafts) for plan in plans] == [{0: 3}, {0: 2}, {}]
    assert [plan.num_samples for plan in plans] == [(1,), (4,), (3,)]
