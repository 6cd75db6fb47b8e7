"""Rows with draft tokens: the fields of a plan, and the samples that are accepted at settling."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.invariants import check_plan, check_state
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.logprob_output import add_logprobs
from pagespec.engine.logprobs import StepLogprobs
from pagespec.engine.outputs import CompletionOutput, RequestOutput
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.planner import even_shares
from pagespec.engine.request import Request
from pagespec.engine.runner import DraftObserver
from pagespec.engine.scheduler import Scheduler
from pagespec.errors import RequestError
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner, stream_alone

STOP = 9
PARAMS = SamplingParams()


class FixedDrafts:
    """A drafter that proposes the same draft tokens for every request."""

    def __init__(self, *drafts: int, most: int = 4) -> None:
        self.drafts, self.max_draft_tokens = drafts, most
        self.num_calls = 0

    def propose(self, _: Request) -> Sequence[int]:
        self.num_calls += 1
        return self.drafts


def scheduler_with(
    drafter: FixedDrafts | None,
    *,
    num_blocks: int = 20,
    block_size: int = 4,
    budget: int = 16,
    depth: int = 0,
    **states: int,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, **states),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        pipeline_depth=depth,
        drafter=drafter,
    )


def added(scheduler: Scheduler, name: str = "a", *, settled_only: bool = False, **given) -> Request:
    given = {"max_num_tokens": 12, "stop_token_ids": frozenset({STOP})} | given
    prompt = given.pop("prompt", [1, 2])
    request = Request(name, prompt, PARAMS, settled_only=settled_only, **given)
    scheduler.add(request)
    return request


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    check_state(scheduler)
    check_plan(scheduler, plan)
    return plan


def rows(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    return [(info.request_id, *rest) for info, *rest in plan.rows()]


def test_a_row_carries_drafts_and_samples_behind_each() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6, 7))
    request = added(scheduler)
    plan = planned(scheduler)
    assert rows(plan) == [("a", 0, 5, 4)]
    assert tuple(plan.token_ids) == (1, 2, 5, 6, 7)
    assert plan.drafts() == {0: (5, 6, 7)}
    assert (plan.num_sampled, plan.has_drafts, plan.is_decode_only) == (4, True, False)
    # Nothing counts them as dispatched.
    assert (request.num_computed, request.num_dispatched, request.num_total) == (0, 2, 3)


@pytest.mark.parametrize(
    ("samples", "taken", "counters"),
    [
        ((5, 6, 7, 8), [5, 6, 7, 8], 5),
        ((5, 6, 8, 8), [5, 6, 8], 4),
        ((5, 7, 7, 8), [5, 7], 3),  # the last draft is right, behind a wrong one
        ((6, 6, 7, 8), [6], 2),
    ],
)
def test_settling_takes_the_samples_up_to_the_first_wrong_draft(
    samples: tuple[int, ...], taken: list[int], counters: int
) -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6, 7))
    request = added(scheduler)
    assert scheduler.commit(planned(scheduler), samples) == []
    assert request.output_token_ids == taken
    assert (request.num_computed, request.num_dispatched) == (counters, counters)
    assert scheduler.last_accepted == [("a", len(taken) - 1)]
    check_state(scheduler)
    assert rows(planned(scheduler))[0][:2] == ("a", counters)  # from the last accepted on


STATES = {"num_state_slots": 5, "state_interval": 4}


def test_with_recurrent_layers_accepted_drafts_are_computed_again() -> None:
    drafter = FixedDrafts(5, 6, 7)
    scheduler = scheduler_with(drafter, **STATES)
    request = added(scheduler)
    plan = planned(scheduler)
    assert plan.state_tables == {0: (0,)}  # the last draft token would begin an interval
    scheduler.commit(plan, (5, 6, 8, 8))
    assert request.output_token_ids == [5, 6, 8]
    assert (request.num_computed, request.num_dispatched, request.num_total) == (2, 2, 5)
    check_state(scheduler)
    drafter.drafts = (3,)
    plan = planned(scheduler)
    assert rows(plan) == [("a", 2, 4, 2)]
    assert tuple(plan.token_ids) == (5, 6, 8, 3)
    assert plan.new_state_slots == {0: (1,)}
    assert scheduler.commit(plan, (4, 4)) == []
    assert (request.num_computed, request.num_dispatched, request.num_total) == (5, 5, 6)
    check_state(scheduler)
    assert rows(planned(scheduler)) == [("a", 5, 2, 2)]


def test_an_interval_may_begin_in_a_block_of_rejected_drafts() -> None:
    drafter = FixedDrafts(5, 6, 7)
    scheduler = scheduler_with(drafter, block_size=2, **STATES)
    request = added(scheduler, prompt=[1, 2, 3])
    scheduler.commit(planned(scheduler), (9 - 1, 0, 0, 0))
    assert (len(request.block_table), request.num_computed) == (3, 3)
    drafter.drafts = ()
    scheduler.commit(planned(scheduler), (1,))
    plan = planned(scheduler)  # position 4, for which the table has a block
    assert (rows(plan), plan.new_blocks) == ([("a", 4, 1, 1)], {})
    assert plan.new_state_slots == {0: (1,)}


def test_an_older_prompt_does_not_delay_accepted_drafts() -> None:
    drafter = FixedDrafts(5, 6)
    scheduler = scheduler_with(drafter, budget=6, **STATES)
    older = added(scheduler, "older", prompt=[1] * 20, max_num_tokens=22)
    scheduler.pause("older")
    request = added(scheduler)
    scheduler.commit(planned(scheduler), (5, 6, 7))
    assert request.num_total - request.num_computed == 3
    scheduler.resume("older")
    drafter.drafts = ()
    for end in (3, 4):  # one of the tokens in each step
        plan = planned(scheduler)
        assert rows(plan) == [("older", older.num_computed, 5, 0), ("a", end - 1, 1, 0)]
        scheduler.commit(plan, ())
        assert request.num_computed == end


@pytest.mark.parametrize("stop", ["token", "string", "length"])
def test_nothing_is_taken_behind_the_end(stop: str) -> None:
    """All drafts are right, and the request ends in the middle of them."""
    middle = STOP if stop == "token" else 6
    seen: list[int] = []

    def ends(token: int) -> bool:
        seen.append(token)
        return stop == "string" and token == 6

    scheduler = scheduler_with(FixedDrafts(5, middle, 7))
    limit = 4 if stop == "length" else 12
    request = added(scheduler, max_num_tokens=limit, on_token=ends)
    plan = planned(scheduler)
    samples = (5, middle, 7, 8)[: plan.num_sampled]
    assert scheduler.commit(plan, samples) == [request]
    assert request.output_token_ids == [5, middle]
    assert request.finish_reason == ("length" if stop == "length" else "stop")
    assert seen == ([5] if stop == "token" else [5, 6])
    assert scheduler.last_accepted == [("a", 1)]
    check_state(scheduler)


def test_no_sample_can_exceed_the_longest_form() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6, 7))
    added(scheduler, max_num_tokens=4)
    assert rows(planned(scheduler)) == [("a", 0, 3, 2)]
    scheduler = scheduler_with(FixedDrafts(5, 6, 7))
    added(scheduler, max_num_tokens=3)
    assert rows(planned(scheduler)) == [("a", 0, 2, 1)]


def test_drafts_take_what_is_left_of_the_budget() -> None:
    """After every row, also of younger requests. Each row gets as many; one more of the oldest."""
    scheduler = scheduler_with(FixedDrafts(5, 6, 7), budget=8)
    added(scheduler, "a")
    added(scheduler, "b", prompt=[3, 4, 5])
    assert rows(planned(scheduler)) == [("a", 0, 4, 3), ("b", 0, 4, 2)]
    scheduler = scheduler_with(FixedDrafts(5, 6, 7), budget=8)
    added(scheduler, "a")
    added(scheduler, "b", prompt=[3] * 8)
    assert rows(planned(scheduler)) == [("a", 0, 2, 1), ("b", 0, 6, 0)]


def test_a_limit_of_samples_is_divided_among_the_rows() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6, 7), budget=40)
    scheduler.max_num_samples = 8
    for name, length in zip("abc", (20, 4, 20), strict=True):
        added(scheduler, name, max_num_tokens=length)
    # 5 draft tokens: a and c want 3, b has room for 1.
    assert [row[-1] - 1 for row in rows(planned(scheduler))] == [2, 1, 2]
    scheduler = scheduler_with(FixedDrafts(5, 6, 7), budget=40)
    scheduler.max_num_samples = 2
    for name in "abc":
        added(scheduler, name)
    assert [row[-1] for row in rows(planned(scheduler))] == [1, 1, 1]  # rows alone have no limit


def test_even_shares_are_those_of_turns() -> None:
    """Each number in turn grows by one until nothing is left."""
    rng = random.Random(0)
    for _ in range(300):
        wanted = [rng.randint(1, 6) for _ in range(rng.randint(0, 6))]
        most = rng.randint(0, 30)
        taken = [0] * len(wanted)
        for length in range(6):
            for i, number in enumerate(wanted):
                taken[i] += number > length and sum(taken) < most
        assert even_shares(wanted, most) == taken


def test_drafts_take_no_block_that_another_request_is_short_of() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6, 7), num_blocks=4, block_size=2)
    added(scheduler, "a", max_num_tokens=8)
    scheduler.commit(planned(scheduler), (0,) * 4)
    added(scheduler, "b", prompt=[3] * 6, max_num_tokens=8)  # finds too few, and closes the step
    num_free = scheduler.blocks.num_available
    assert num_free
    plan = planned(scheduler)
    assert [row[0] for row in rows(plan)] == ["a"]
    assert scheduler.blocks.num_available == num_free


def test_blocks_of_wrong_drafts_are_filled_by_the_next_tokens() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6, 7), block_size=1)
    request = added(scheduler, prompt=[1], max_num_tokens=9)
    scheduler.commit(planned(scheduler), (0,) * 4)
    assert len(request.block_table) == 4
    plan = planned(scheduler)  # one own and three drafts from position 1 on: one block more
    assert rows(plan) == [("a", 1, 4, 4)]
    assert [len(blocks) for blocks in plan.new_blocks.values()] == [1]


def test_a_request_with_drafts_in_flight_has_no_row_until_they_are_settled() -> None:
    drafter = FixedDrafts(5, 6, 7)
    scheduler = scheduler_with(drafter, depth=1)
    first, second = added(scheduler, "a"), added(scheduler, "b")
    plan = planned(scheduler)
    assert rows(plan) == [("a", 0, 5, 4), ("b", 0, 5, 4)]
    assert rows(planned(scheduler)) == []  # all samples are in flight
    scheduler.commit(plan, (5, 6, 7, 8, 5, 0, 0, 0))
    assert rows(planned(scheduler)) == [("a", 5, 4, 4), ("b", 3, 4, 4)]
    assert drafter.num_calls == 4
    assert first.waits_for_samples
    assert second.must_settle


def test_a_row_behind_an_unsettled_token_has_no_drafts() -> None:
    """Once its samples are settled, a request without drafts in flight is pipelined again."""
    drafter = FixedDrafts(5)
    scheduler = scheduler_with(drafter, depth=1)
    added(scheduler, "a")
    first = planned(scheduler)
    assert rows(first) == [("a", 0, 3, 2)]
    scheduler.commit(first, (5, 6))
    drafter.drafts = ()
    assert rows(planned(scheduler)) == [("a", 3, 1, 1)]
    drafter.drafts = (5,)
    plan = planned(scheduler)
    assert rows(plan) == [("a", 4, 1, 1)]
    assert tuple(plan.token_ids) == (-1,)
    assert drafter.num_calls == 2


def test_a_place_in_flight_counts_every_sample() -> None:
    """A row's token in flight is named behind all samples of the rows before it."""
    drafter = FixedDrafts(5, 6)
    drafter.propose = lambda request: (5, 6) if request.request_id == "a" else ()
    scheduler = scheduler_with(drafter, depth=1)
    added(scheduler, "a")
    added(scheduler, "b")
    first = planned(scheduler)
    assert rows(first) == [("a", 0, 4, 3), ("b", 0, 2, 1)]
    second = planned(scheduler)
    assert rows(second) == [("b", 2, 1, 1)]
    assert tuple(second.token_ids) == (-4,)


def test_a_chunk_has_no_drafts() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6), budget=4)
    added(scheduler, prompt=[1] * 6)
    assert rows(planned(scheduler)) == [("a", 0, 4, 0)]


def test_the_number_of_samples_is_checked() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6))
    added(scheduler)
    plan = planned(scheduler)
    with pytest.raises(ValueError, match="1 tokens for 3 samples"):
        scheduler.commit(plan, (5,))
    scheduler.commit(plan, (5, 6, 7))


def test_drafts_of_an_aborted_request_are_dropped() -> None:
    scheduler = scheduler_with(FixedDrafts(5, 6))
    request = added(scheduler)
    plan = planned(scheduler)
    scheduler.abort("a")
    assert scheduler.commit(plan, (5, 6, 7)) == []
    assert request.output_token_ids == []
    assert scheduler.last_accepted == [("a", 0)]
    assert scheduler.draft_counts.num_drafts == request.num_drafted == 0
    check_state(scheduler)


class ObservingDrafts(FixedDrafts, DraftObserver):
    def __init__(self, *drafts: int) -> None:
        super().__init__(*drafts)
        self.noted: list[tuple[str, int, int]] = []

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.noted.append((request.request_id, num_drafts, num_accepted))


@pytest.mark.parametrize(
    ("samples", "num_accepted"),
    [((5, 6, 7), 2), ((5, 1, 7), 1), ((1, 6, 7), 0), ((5, STOP, 7), 1)],
)
def test_an_observer_receives_the_counts_of_each_row(
    samples: tuple[int, ...], num_accepted: int
) -> None:
    drafter = ObservingDrafts(5, 6)
    scheduler = scheduler_with(drafter)
    request = added(scheduler)
    scheduler.commit(planned(scheduler), samples)
    assert drafter.noted == [("a", 2, num_accepted)]
    assert (request.num_drafted, request.num_accepted) == (2, num_accepted)
    counts = scheduler.draft_counts
    assert (counts.num_drafts, counts.num_draft_tokens) == (1, 2)
    assert counts.num_accepted_tokens == sum(counts.accepted_per_position) == num_accepted


def test_what_cannot_compute_drafts_refuses_them_by_name() -> None:
    runner = ContentRunner(num_blocks=4, block_size=4, vocab_size=4)
    scheduler = scheduler_with(FixedDrafts(5))
    with pytest.raises(ValueError, match=r"drafter.max_draft_tokens = 4 .* runner.* = 0"):
        Engine(scheduler, runner)


# Whole engines ------------------------------------------------------------------------------------


class Rows:
    """Log-probabilities that are no sums of powers of two."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def logprob(self, index: int) -> float:
        return self.row(index, 0)[0]

    def row(self, index: int, num_top: int) -> tuple[float, int, list[int], list[float]]:
        return -1 / (3 + self._token_ids[index]), 1, list(range(num_top)), [0.0] * num_top


class RowsRunner(ContentRunner):
    """Gives a row for each sample of the requests that want some."""

    def dispatch(self, plan: StepPlan) -> object:
        return plan, super().dispatch(plan)

    def collect(self, handle: object) -> StepResult:
        plan, own = handle  # type: ignore[misc]
        token_ids = super().collect(own).token_ids
        tokens, kept = iter(token_ids), []
        for info, _, _, num_samples in plan.rows():
            samples = list(itertools.islice(tokens, num_samples))
            kept += samples if info.sampling_params.logprobs is not None else []
        return StepResult(token_ids, StepLogprobs(Rows(kept), Rows([])))


class FromStreams:
    """Proposes what each request will sample, with one token in ``wrong_every`` wrong."""

    def __init__(self, wrong_every: int, most: int) -> None:
        self._wrong_every, self.max_draft_tokens = wrong_every, most

    def propose(self, request: Request) -> list[int]:
        done = len(request.output_token_ids)
        alone = stream_alone(
            request.token_ids[: request.num_prompt_tokens],
            request.max_num_tokens,
            seed=request.seed,
            vocab_size=5,
        )
        return [
            token + TOKEN_STRIDE * ((done + i) % self._wrong_every == 0)
            for i, token in enumerate(alone[done:])
        ]


def ending(at: int) -> Callable[[int], bool]:
    count = itertools.count(1)
    return lambda _: next(count) == at


def outputs_of(drafter: FromStreams | None, depth: int) -> tuple[list[tuple[object, ...]], int]:
    """All that callers see of some requests, and the number of steps."""
    scheduler = Scheduler(
        BlockManager(24, 3),
        max_num_seqs=4,
        max_num_batched_tokens=12,
        pipeline_depth=depth,
        drafter=drafter,
    )
    runner = RowsRunner(
        num_blocks=24, block_size=3, vocab_size=5, pipeline_depth=depth, max_draft_tokens=8
    )
    engine = Engine(scheduler, runner, check_invariants=True)
    requests = [
        Request(
            str(i),
            [TOKEN_STRIDE * (i % 3)] * (1 + i),
            SamplingParams(logprobs=2) if i % 2 == 0 else PARAMS,
            max_num_tokens=14 + i,
            on_token=ending(3 + i) if i % 3 == 0 else None,
            seed=i,
            settled_only=i == 4,
        )
        for i in range(8)
    ]
    for request in requests:
        engine.add(request)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    told = []
    for request in requests:
        answer = CompletionOutput(0, "", request.output_token_ids)
        output = RequestOutput("", None, [], None, [answer])
        add_logprobs(output, [request], None)
        told.append((answer.token_ids, answer.finish_reason, answer.cumulative_logprob))
        told.append(None if answer.logprobs is None else list(answer.logprobs))
    return told, num_steps


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("wrong_every", "most"), [(100, 3), (3, 4), (2, 1), (1, 5), (100, 8)])
def test_outputs_and_log_probabilities_do_not_depend_on_drafts(
    depth: int, wrong_every: int, most: int
) -> None:
    """To the bit: a sum that was trimmed is added up anew in its order."""
    plain, num_plain = outputs_of(None, depth)
    drafted, num_steps = outputs_of(FromStreams(wrong_every, most), depth)
    assert drafted == plain
    if wrong_every == 100:
        assert num_steps < num_plain


@pytest.mark.parametrize("prompt_lengths", [[4] * 8, [1, 9, 3, 12, 5, 2, 8, 6]])
def test_a_pipeline_does_not_divide_drafting_requests(prompt_lengths: list[int]) -> None:
    """With the pipeline, steps are as many and as large as without."""

    def steps_of(depth: int) -> list[int]:
        scheduler = Scheduler(
            BlockManager(200, 4),
            max_num_seqs=8,
            max_num_batched_tokens=40,
            pipeline_depth=depth,
            drafter=FromStreams(1000, 3),
        )
        sizes: list[int] = []

        class Counting(ContentRunner):
            def dispatch(self, plan: StepPlan) -> object:
                sizes.append(len(plan))
                return super().dispatch(plan)

        runner = Counting(
            num_blocks=200, block_size=4, vocab_size=5, pipeline_depth=depth, max_draft_tokens=3
        )
        engine = Engine(scheduler, runner, check_invariants=True)
        for i, length in enumerate(prompt_lengths):
            prompt = [TOKEN_STRIDE * (i % 3)] * length
            engine.add(Request(str(i), prompt, PARAMS, max_num_tokens=length + 40, seed=i))
        while engine.has_work:
            engine.step()
        assert engine.num_exposed_steps == (len(sizes) - 1 if depth else 0)
        return sizes

    sizes = steps_of(0)
    assert steps_of(1) == steps_of(2) == sizes
    assert len(sizes) <= 14


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sample_that_its_own_edits_ban_ends_its_request_alone(place: int) -> None:
    """At its first sample, or behind accepted draft tokens."""
    edits = LogitEdits.of(SamplingParams(allowed_token_ids=[256, 512]))

    class Dead(ContentRunner):
        def collect(self, handle: object) -> StepResult:
            token_ids = list(super().collect(handle).token_ids)
            if len(token_ids) > 3:
                token_ids[:3] = [256, 256, 256]
                token_ids[place] = 0
            return StepResult(token_ids)

    drafter = FixedDrafts(256, 256, 256, most=3)
    if place < 2:
        drafter = FixedDrafts(*(0 if i == place else 256 for i in range(3)), most=3)
    scheduler = scheduler_with(drafter)
    engine = Engine(scheduler, Dead(num_blocks=20, block_size=4, vocab_size=3, max_draft_tokens=3))
    banned = Request("banned", [0], PARAMS, max_num_tokens=12, edits=edits)
    other = Request("other", [0], PARAMS, max_num_tokens=3)
    engine.add(banned)
    engine.add(other)
    while engine.has_work:
        engine.step()
    assert banned.finish_reason == "error"
    assert len(banned.output_token_ids) == place  # the sample is not taken, nor any behind it
    assert isinstance(engine.error(banned), RequestError)
    assert "no token to sample" in str(engine.error(banned))
    assert other.finish_reason == "length"


class Failing(ContentRunner):
    """Samples 256 throughout; in its second step the row has a sample that fails."""

    def __init__(self, index: int) -> None:
        super().__init__(num_blocks=20, block_size=4, vocab_size=3, max_draft_tokens=3)
        self._index = index

    def collect(self, handle: object) -> StepResult:
        token_ids = [256] * len(super().collect(handle).token_ids)
        if self.num_steps != 2:
            return StepResult(token_ids)
        return StepResult(token_ids, failures={"a": "no more"}, failed_samples={"a": self._index})


def served_with(runner: ContentRunner, *drafts: int, **given) -> tuple[Request, str]:
    """The request, and its error."""
    scheduler = scheduler_with(FixedDrafts(*drafts, most=3))
    engine = Engine(scheduler, runner, check_invariants=True)
    request = Request("a", [0], PARAMS, max_num_tokens=12, **given)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request, str(engine.error(request) or "")


@pytest.mark.parametrize("index", range(4))
def test_a_sample_that_fails_ends_its_request_if_it_is_reached(index: int) -> None:
    """The samples before it are taken. Behind a wrong draft token it is not reached."""
    request, error = served_with(Failing(index), 256, 256, 256)
    assert (request.finish_reason, len(request.output_token_ids)) == ("error", 4 + index)
    assert error.endswith("no more")
    drafts = [256] * 3
    if index:
        drafts[index - 1] = 512
        request, error = served_with(Failing(index), *drafts)
        assert (request.finish_reason, error) == ("length", "")


@pytest.mark.parametrize("last", range(5, 9))
def test_a_failure_behind_the_end_of_the_text_is_none(last: int) -> None:
    request, error = served_with(Failing(3), 256, 256, 256, on_token=ending(last))
    assert request.finish_reason == ("stop" if last < 8 else "error")
    assert len(request.output_token_ids) == min(last, 7)
    assert bool(error) == (last == 8)


@pytest.mark.parametrize("place", range(1, 12))
def test_a_text_that_cannot_be_read_ends_the_request_there(place: int) -> None:
    """Also at its last token, and in the middle of accepted draft tokens."""
    for drafts in ((256, 256, 256), (512, 256)):
        count = itertools.count(1)

        def reads(_: int, count: Iterator[int] = count) -> bool:
            if next(count) == place:
                raise UnicodeError("no text")
            return False

        request, error = served_with(Failing(9), *drafts, on_token=reads)
        assert request.finish_reason == "error"
        assert len(request.output_token_ids) == place
        assert error.endswith("its text could not be read: no text")
