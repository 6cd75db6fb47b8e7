"""The mode of steps: with draft tokens, after settling, or pipelined without."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.drafting import mode as draft_mode
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import NUM_RATES, StepCosts, choose_numbers
from pagespec.engine.drafting.drafters import PredictionDrafter, make_drafter
from pagespec.engine.drafting.mode import Acceptance, DraftMode
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner, stream_alone

PARAMS = SamplingParams()
MOST = 4
# Flat up to 32 tokens, then each token costs as much.
COSTS = [(1, 1.0), (32, 1.0), (64, 2.0), (512, 16.0)]


def numbers_of(
    rates: Sequence[float], share: float = 1.0, most: int = MOST, **given: float
) -> tuple[int, ...]:
    """The numbers that are chosen for rows of these rates, by row."""
    shares = [0.0] * (NUM_RATES + 1)
    for rate in rates:
        shares[int(rate * NUM_RATES)] += share
    exposed_s = given.get("exposed_s", 0.0)
    costs = StepCosts(COSTS, drafting=[(1, given["draft_s"])] * 2 if "draft_s" in given else ())
    chosen = choose_numbers(costs, shares, len(rates), 0, most, exposed_s)
    return tuple(chosen[int(rate * NUM_RATES)] for rate in rates)


def test_numbers_follow_the_rate_of_each_row() -> None:
    high, low = numbers_of([0.95] * 6 + [0.2] * 6)[::11]
    assert high == MOST
    assert low < high
    assert set(numbers_of([0.02] * 20)) == {0}
    assert set(numbers_of([0.9])) == {MOST}


def test_exposed_time_and_drafting_count_as_costs() -> None:
    assert numbers_of([0.6]) > (0,)
    assert numbers_of([0.6], exposed_s=2.0) == (0,)
    assert numbers_of([0.6], draft_s=2.0) == (0,)
    assert 0 < numbers_of([0.6], draft_s=0.2)[0] < numbers_of([0.6])[0]  # a pass per draft token
    assert numbers_of([0.6], share=0.1, exposed_s=0.2) == (0,)  # rarely a proposal
    assert numbers_of([0.6], share=1.0, exposed_s=0.2) > (0,)


def test_choices_are_no_loss_by_the_table_and_near_the_best() -> None:
    """Compared with the same number for each row, of which the best is tried."""
    costs = StepCosts(COSTS)
    rng = random.Random(3)
    for _ in range(60):
        rates = [rng.random() for _ in range(rng.choice([1, 2, 5, 12, 24, 40]))]
        n = len(rates)

        def speed(chosen: Sequence[int], rates: list[float] = rates) -> float:
            gain = sum(
                sum(((int(r * NUM_RATES) + 0.5) / NUM_RATES) ** j for j in range(1, k + 1))
                for r, k in zip(rates, chosen, strict=True)
            )
            return (len(rates) + gain) / costs.of(len(rates) + sum(chosen))

        chosen = speed(numbers_of(rates))
        assert chosen >= speed([0] * n)
        uniform = max(speed([k] * n) for k in range(MOST + 1))
        assert chosen >= uniform / 1.03  # drafts must gain 2%


# Watching -----------------------------------------------------------------------------------------


def test_a_watched_proposal_counts_once_its_tokens_came() -> None:
    state = Acceptance(3, rate=0.5)
    state.watched = (7, 8, 9)
    known = [1, 2, 3]
    assert not state.note_watched(known)
    assert not state.note_watched([*known, 7])
    assert state.rate == 0.5
    assert state.note_watched([*known, 7, 8, 9])
    first = draft_mode._FIRST_WEIGHT
    assert state.rate == pytest.approx((0.5 * first + 3) / (first + 3))
    wrong = Acceptance(3, rate=0.5)
    wrong.watched = (7, 8, 9)
    assert wrong.note_watched([*known, 7, 1])
    assert wrong.rate == pytest.approx((0.5 * first + 1) / (first + 2))
    assert wrong.is_observed
    assert not wrong.watched


def test_the_acceptance_is_a_mean_in_which_old_draft_tokens_fade() -> None:
    state = Acceptance(0, rate=0.5)
    for _ in range(200):
        state.note(4, 4)
    assert state.rate > 0.999
    assert state.weight == draft_mode._MAX_WEIGHT
    for _ in range(10):
        state.note(2, 0)  # one of them is known to be wrong
    kept = draft_mode._MAX_WEIGHT / (draft_mode._MAX_WEIGHT + 1)
    assert state.rate == pytest.approx(kept**10, rel=1e-3)


def test_many_requests_are_watched_in_turns() -> None:
    calls: list[str] = []
    states: dict[str, Acceptance] = {}

    def state_of(request: Request) -> Acceptance:
        state = states.setdefault(request.request_id, Acceptance(0, rate=0.0))
        request.drafts = state
        return state

    def find(request: Request, _: int) -> tuple[int, ...]:
        calls.append(request.request_id)
        return ()

    mode = DraftMode(MOST, StepCosts([(1, 1.0), (1000, 1.0)]), state_of, find)
    requests = [Request(str(i), [1], PARAMS, max_num_tokens=99) for i in range(20)]
    for _ in range(20):
        for request in requests:
            request.token_ids.append(5)
        before = len(calls)
        assert not mode.wants_drafts(requests, 0)
        assert len(calls) - before == draft_mode._MAX_WATCHED
    assert {calls.count(str(i)) for i in range(20)} == {8}
    assert states["0"].share < 0.5


# Trials -------------------------------------------------------------------------------------------


def trial_steps(rate_of_trial: bool, num_steps: int, *, is_pipelined: bool) -> list[int]:
    """The steps with trials, of a drafter that cannot be watched and starts at a rate of 0."""
    state = Acceptance(0, rate=0.0)

    def state_of(request: Request) -> Acceptance:
        request.drafts = state
        return state

    mode = DraftMode(MOST, StepCosts([(1, 1.0), (1000, 300.0)]), state_of, None)
    request = Request("a", [1], PARAMS, max_num_tokens=99999)
    found = []
    for step in range(num_steps):
        is_settled = mode.wants_drafts([request], 0) if is_pipelined else True
        mode.begin([request] if is_settled else [], 1, is_settled)
        number = mode.number(request, state) if is_settled else 0
        if number:
            found.append(step)
            assert number == 1 or rate_of_trial
            state.note(number, number * rate_of_trial)
            mode.note(number, number * rate_of_trial)
        elif is_settled:
            assert not is_pipelined
    return found


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_trials_are_rarer_after_each_rejected_one(is_pipelined: bool) -> None:
    steps = trial_steps(False, 5000, is_pipelined=is_pipelined)
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert gaps[:6] == [64, 128, 256, 512, 1024, 1024]
    assert steps[0] == 31
    assert len(steps) == 8


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_accepted_trials_bring_drafting_back(is_pipelined: bool) -> None:
    steps = trial_steps(True, 200, is_pipelined=is_pipelined)
    assert steps[0] == 31
    assert steps == list(range(31, 200))


# Engines ------------------------------------------------------------------------------------------


def engine_with(costs: StepCosts, depth: int, num_requests: int, *, is_right: bool):
    """An engine whose requests have predictions: their answers, or other tokens."""
    config = SpeculativeConfig(method="prediction", num_speculative_tokens=MOST)
    drafter = make_drafter(config, costs)
    scheduler = Scheduler(
        BlockManager(400, 4),
        max_num_seqs=8,
        max_num_batched_tokens=80,
        pipeline_depth=depth,
        drafter=drafter,
    )
    plans: list[StepPlan] = []

    class Recording(ContentRunner):
        def dispatch(self, plan: StepPlan) -> object:
            plans.append(plan)
            return super().dispatch(plan)

    runner = Recording(
        num_blocks=400, block_size=4, vocab_size=5, pipeline_depth=depth, max_draft_tokens=MOST
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    requests = []
    for i in range(num_requests):
        prompt, length = [TOKEN_STRIDE * (i % 3)] * (2 + 3 * i), 2 + 3 * i + 60
        answer = stream_alone(prompt, length, seed=i, vocab_size=5)
        prediction = answer if is_right else [token + TOKEN_STRIDE * 50 for token in answer]
        requests.append(
            Request(str(i), prompt, PARAMS, max_num_tokens=length, seed=i, prediction=prediction)
        )
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    assert all(request.finish_reason == "length" for request in requests)
    return plans, engine, [request.output_token_ids for request in requests]


def test_a_pipelined_engine_drafts_if_that_pays_more_than_the_pipeline() -> None:
    plain, idle, answers = engine_with(StepCosts(COSTS, exposed_s=100.0), 1, 4, is_right=True)
    assert not any(plan.has_drafts for plan in plain)
    assert idle.num_exposed_steps == 0
    drafted, engine, same = engine_with(StepCosts(COSTS, exposed_s=0.1), 1, 4, is_right=True)
    assert same == answers
    assert len(drafted) < len(plain) / 2
    assert engine.num_exposed_steps == len(drafted) - 1
    assert engine.exposed_s > 0
    assert max(len(plan) for plan in drafted) == 4


def test_wrong_drafts_end_and_the_pipeline_is_used_again() -> None:
    plans, engine, _ = engine_with(StepCosts(COSTS, exposed_s=0.1), 1, 4, is_right=False)
    with_drafts = [plan.step for plan in plans if plan.has_drafts]
    assert with_drafts
    assert max(with_drafts) < 12
    assert engine.num_exposed_steps < 15
    assert len(plans) < 75


def test_a_drafter_is_forwarded_by_the_scheduler() -> None:
    """It is consulted only while a step without draft tokens is in flight."""
    drafter = make_drafter(SpeculativeConfig(method="prediction"), StepCosts(COSTS))
    assert isinstance(drafter, PredictionDrafter)
    scheduler = Scheduler(
        BlockManager(40, 4),
        max_num_seqs=8,
        max_num_batched_tokens=80,
        pipeline_depth=1,
        drafter=drafter,
    )
    scheduler.add(Request("a", [1, 2], PARAMS, max_num_tokens=40, prediction=[5, 6, 7, 8]))
    scheduler.add(Request("b", [1, 2], PARAMS, max_num_tokens=40))
    plan = scheduler.schedule()
    assert plan.drafts() == {0: (5, 6, 7, 8)}
    assert scheduler.should_settle_first()
    assert [info.request_id for info in scheduler.schedule().requests] == ["b"]
