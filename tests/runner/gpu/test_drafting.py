"""Draft tokens with a second model on the GPU runner, whose kernels are interpreted. A model that
drafts for itself is right about every token if its KV, positions and noise are those of the
target."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec import SamplingParams
from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.step_inputs import KVCaches, StepInputs
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.drafting.drafters import ModelDrafter
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.structured.forced import ForcedDrafter
from tests.runner import both_runners
from tests.runner.test_model_drafts import CONFIG, FREE, NUM_DRAFTS, DraftModel, captured_llama
from tests.runner.test_structured import captured as structured_captured
from tests.runner.test_structured import mixed_requests
from tests.support.models import VOCAB_SIZE

pytestmark = [
    pytest.mark.skipif("gpu" not in both_runners.RUNNERS, reason="TRITON_INTERPRET is not 1"),
    pytest.mark.usefixtures("small_chunks"),
]

BLOCK_SIZE, NUM_OUTPUTS = both_runners.BLOCK_SIZE, 8
# Blocks, budget, requests at once, and whether steps overlap.
WORLDS = {
    "roomy": (90, 64, 6, False),
    "chunks": (90, 10, 6, False),
    "preempting": (12, 12, 4, False),
    "overlap": (24, 32, 4, True),
}


@pytest.fixture(scope="module")
def target() -> CapturedModel:
    return captured_llama(1)


@pytest.fixture(scope="module")
def other() -> CapturedModel:
    return captured_llama(2)


class ShiftedOracle:
    """A drafter that reads the token at p + 1 and the target's hidden state at p, and looks up what
    follows both. Its KV is the token itself. Its own hidden state is the number of tokens of a row
    up to the position.

    Args:
        answers: prompts with outputs.
        states: the target's hidden states by the tokens up to them, of all runs.
    """

    needs_hidden = True

    def __init__(self, answers: Sequence[list[int]], states: dict[Any, bytes]) -> None:
        self._after = {tuple(a[1:end]): a[end] for a in answers for end in range(2, len(a))}
        self._starts = {tuple(a[1:end]) for a in answers for end in range(2, len(a))}
        self._states = states
        self.num_compared = self.num_next = 0

    def allocate_kv(self, num_blocks: int, block_size: int) -> KVCaches:
        return [(torch.full((num_blocks + 1, block_size), -1),)]

    def bind(self, kv_caches: KVCaches) -> Any:
        ((cache,),) = kv_caches

        def forward(inputs: StepInputs, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
            assert hidden is not None
            assert len(hidden) == inputs.input_ids.shape[1]
            cache.view(-1)[inputs.slot_mapping] = inputs.input_ids[0]
            is_next = hidden.shape[1] == 1
            own = torch.zeros(len(hidden), 1)
            known: dict[int, tuple[int, ...]] = {}
            starts = inputs.query_starts.tolist()
            for i, row in enumerate(inputs.table_rows.tolist()):
                for token in range(starts[i], starts[i + 1]):
                    position = int(inputs.position_ids[0, token])
                    blocks = inputs.block_tables[row].long()
                    read = tuple(cache[blocks].view(-1)[: position + 1].tolist())
                    if read not in self._starts:  # of a padding row, or behind a wrong draft token
                        continue
                    known[token], own[token] = read, len(read)
                    if not position:  # of a row that wants no more tokens
                        continue
                    if is_next:
                        assert hidden[token] == len(read) - 1
                        self.num_next += 1
                    else:
                        bits = hidden[token].numpy().tobytes()
                        self.num_compared += read[:-1] in self._states
                        assert self._states.setdefault(read[:-1], bits) == bits
            logits = torch.zeros(len(inputs.logits_to_keep), VOCAB_SIZE)
            for i, token in enumerate(inputs.logits_to_keep.tolist()):
                right = self._after.get(known.get(token, ()))
                if right is not None:
                    logits[i, right] = 1e6
            return logits, own

        return forward

    def bind_fill(self, kv_caches: KVCaches) -> Any:
        return self.bind(kv_caches)


def make_requests(temperature: float, *, has_edits: bool = False) -> list[Request]:
    """Prompts of unlike lengths; some begin with the same blocks."""
    rng = random.Random(5)
    start = [rng.randrange(VOCAB_SIZE) for _ in range(9)]
    requests = []
    for i in range(6):
        asked: dict[str, Any] = {"temperature": temperature, "max_tokens": NUM_OUTPUTS}
        if has_edits and i % 3 == 2:
            asked |= {"repetition_penalty": 1.4, "logprobs": 1}
        if has_edits and i % 3 == 1:
            asked |= {"top_k": 5}
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
) -> tuple[list[list[int]], Scheduler]:
    """The outputs of the requests, and the scheduler."""
    num_blocks, budget, max_num_seqs, overlap = WORLDS[world]
    settings = {} if model is None else {"draft_model": model}
    runner = both_runners.make_runner(
        target,
        "gpu",
        num_blocks,
        max_num_seqs=max(max_num_seqs, min(budget, max_num_seqs * (1 + NUM_DRAFTS))),
        max_num_blocks=16,
        max_num_tokens=budget,
        overlap=overlap,
        **settings,
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
    return [r.output_token_ids for r in (*requests, *siblings)], scheduler


@pytest.mark.parametrize(
    ("world", "temperature"),
    [
        pytest.param("roomy", 0.0, marks=pytest.mark.nightly),
        pytest.param("chunks", 0.8, marks=pytest.mark.nightly),
        ("preempting", 0.8),
        ("overlap", 0.8),
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    target: CapturedModel, world: str, temperature: float
) -> None:
    plain, _ = run(target, None, make_requests(temperature), world)
    drafted, scheduler = run(target, DraftModel(target), make_requests(temperature), world)
    assert drafted == plain
    counts = scheduler.draft_counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 10


def test_another_model_changes_no_output(target: CapturedModel, other: CapturedModel) -> None:
    plain, _ = run(target, None, make_requests(0.8, has_edits=True), "roomy")
    drafted, scheduler = run(target, DraftModel(other), make_requests(0.8, has_edits=True), "roomy")
    assert drafted == plain
    counts = scheduler.draft_counts
    assert counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_model_drafts_behind_constrained_and_edited_rows(overlap: bool) -> None:
    """Their samples are drawn behind the graph, some in the next dispatch."""
    model = structured_captured()
    outputs = []
    for is_drafted in (False, True):
        requests, _ = mixed_requests(4, 5, 7, share=0.6)
        settings = {"draft_model": DraftModel(model)} if is_drafted else {}
        runner = both_runners.make_runner(
            model, "gpu", 90, max_num_seqs=24, max_num_blocks=24, overlap=overlap, **settings
        )
        drafter = ForcedDrafter(runner.grammars, ModelDrafter(CONFIG, FREE)) if settings else None
        scheduler = Scheduler(
            BlockManager(90, BLOCK_SIZE),
            max_num_seqs=4,
            max_num_batched_tokens=24,
            pipeline_depth=runner.pipeline_depth,
            drafter=drafter,
        )
        engine = Engine(scheduler, runner, check_invariants=True)
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    assert scheduler.draft_counts.num_accepted_tokens > 3


def test_siblings_draft_from_copied_blocks(target: CapturedModel) -> None:
    def with_siblings() -> tuple[list[Request], list[Request]]:
        requests = make_requests(0.8)[:2]
        return requests, [requests[0].sibling(f"s{i}", 100 + i, None) for i in range(2)]

    requests, siblings = with_siblings()
    plain, _ = run(target, None, requests, "roomy", siblings)
    requests, siblings = with_siblings()
    drafted, scheduler = run(target, DraftModel(target), requests, "roomy", siblings)
    assert drafted == plain
    counts = scheduler.draft_counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


@pytest.mark.parametrize("world", ["preempting", pytest.param("chunks", marks=pytest.mark.nightly)])
def test_a_drafter_reads_the_next_tokens_and_the_hidden_states(
    target: CapturedModel, world: str
) -> None:
    plain, _ = run(target, None, make_requests(0.8), world)
    prompts = [request.token_ids for request in make_requests(0.8)]
    answers = [prompt + output for prompt, output in zip(prompts, plain, strict=True)]
    states: dict[Any, bytes] = {}
    for where in ("roomy", world):  # the target's hidden states have the same bits in both
        oracle = ShiftedOracle(answers, states)
        drafted, scheduler = run(target, oracle, make_requests(0.8), where)
        assert drafted == plain
        counts = scheduler.draft_counts
        assert counts.num_draft_tokens > 10
        assert counts.num_accepted_tokens > 0.8 * counts.num_draft_tokens
        assert oracle.num_next > 10
    assert oracle.num_compared > 20
