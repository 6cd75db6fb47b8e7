"""Replay step traces against the specification.

Genuine traces must be accepted. A trace with one altered line must be rejected with the property
that the line violates.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pagespec.engine.pace import StepPace
from pagespec.engine.plan import StepPlan
from pagespec.engine.queues import Queues
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from spec import replay
from spec.events import read_events
from spec.state import REFUSALS
from tests.support.content_runner import TOKEN_STRIDE
from tests.support.scenario import Scenario
from tests.support.traces import in_full, write_trace

NUM_SCENARIOS = 60


def written_by(scenario: Scenario) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        scenario.engine = scenario.new_engine(trace=path)
        scenario.run()
        return path.read_text().splitlines()


# A scenario is the same each time it is run, and its checks take most of a test's time.
@functools.cache
def _trace_of(seed: int, has_states: bool | None) -> tuple[str, ...]:
    return tuple(written_by(Scenario(seed, has_states=has_states)))


def trace_of(seed: int, *, has_states: bool | None = None) -> list[str]:
    return list(_trace_of(seed, has_states))


@functools.cache
def trace_in_full(seed: int) -> tuple[str, ...]:
    """Written as by a version without states and settled-only requests."""
    scenario = Scenario(
        seed, has_states=False, may_be_fair=False, has_drafts=False, has_contents=False
    )
    scenario.has_settled_only = False
    return tuple(in_full(written_by(scenario)))


def test_traces_of_random_runs_are_accepted() -> None:
    verdicts = [replay.check(trace_of(s)) for s in range(NUM_SCENARIOS)]
    assert [v for v in verdicts if v.property_id] == []
    assert sum(v.num_preemptions for v in verdicts) > 10
    assert sum(v.num_hit_blocks for v in verdicts) > 10


def test_the_rows_of_every_plan_can_be_read_again() -> None:
    """Includes plans that only record that the previous plan's rows continue; most plans do."""
    num_plans = num_short = 0
    for seed in range(NUM_SCENARIOS):
        scenario, made = Scenario(seed), []
        dispatch = scenario.runner.dispatch

        def recorded(plan: StepPlan, dispatch=dispatch, made=made) -> object:
            handle = dispatch(plan)
            rows = [[r.request_id, start, n, sampled] for r, start, n, sampled in plan.rows()]
            made.append((plan.step, rows))
            return handle

        scenario.runner.dispatch = recorded  # type: ignore[method-assign]
        lines = written_by(scenario)
        plans = [event for _, event in read_events(lines) if event["event"] == "plan"]
        assert [(plan["step"], plan["rows"]) for plan in plans] == made
        num_plans += len(plans)
        num_short += sum('"rows": null' in line for line in lines)
    assert num_plans > num_short > num_plans / 8


@pytest.mark.parametrize(
    ("how", "property_ids"),
    [
        ("same", {"S17", "S18", "S19", "S20", "S27", "S31", "S42", "S56"}),
        ("start", {"S17", "S19", "S31"}),
        ("unusual", {"S18"}),
    ],
)
def test_wrong_rows_are_rejected(how: str, property_ids: set[str]) -> None:
    num_altered = 0
    for seed in range(NUM_SCENARIOS // 3):
        lines = trace_of(seed)
        events = [json.loads(line) for line in lines]
        places = [i for i, event in enumerate(events) if event.get("rows")]
        if len(places) < 2 or any(event["event"] == "fail" for event in events[: places[1]]):
            continue
        i = places[1]
        rows = events[i]["rows"]
        if how == "same":
            rows = None
        elif how == "start":
            rows["starts"][-1] += 1
        else:
            rows["unusual"].append([0, 1_000_000, 1])
        lines[i] = json.dumps({**events[i], "rows": rows})
        verdict = replay.check(lines)
        assert (verdict.property_id in property_ids, verdict.line) == (True, i + 1), verdict
        num_altered += 1
    assert num_altered > 5


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {"ids": ["a"], "starts": [0]},
        {"ids": ["a"], "starts": [], "unusual": []},
        {"ids": ["a"], "starts": [-1], "unusual": []},
        {"ids": [1], "starts": [0], "unusual": []},
        {"ids": ["a"], "starts": [0], "unusual": [[1, 1, 1]]},
        {"ids": ["a"], "starts": [0], "unusual": [[0, 1, True]]},
        [["a", 0, 1, True]],
    ],
    ids=str,
)
def test_rows_that_cannot_be_read_make_it_no_trace(rows: object) -> None:
    """Neither the first plan nor the first one after a failure can continue earlier rows."""
    lines, failed = failed_trace()
    for after in (0, failed):
        i = next(i for i, line in enumerate(lines) if i > after and '"event": "plan"' in line)
        altered = json.dumps({**json.loads(lines[i]), "rows": rows})
        with pytest.raises(replay.TraceError, match=f"^line {i + 1}"):
            replay.check([*lines[:i], altered, *lines[i + 1 :]])


def test_every_reason_to_refuse_occurs_and_is_recorded_in_order() -> None:
    """Times increase, and the times inside an event are before the next event."""
    seen: set[str] = set()
    for seed in range(NUM_SCENARIOS):
        clock = 0.0
        for line in trace_of(seed):
            event = json.loads(line)
            seen.update(reason for _, reason in event.get("refused", ()))
            for seconds in (*event.get("times", ()), event["t"]):
                assert seconds >= clock
                clock = seconds
    assert seen >= {*REFUSALS} - {"behind", "draining"}  # the last needs a resumption at once


def alter(event: dict, how: str) -> bool:
    """Alter a plan or result in place; return False if it has no such field."""
    rows = event.get("rows", [])
    if how == "start" and rows:
        rows[0][1] += 1
    elif how == "sampled" and rows:
        rows[-1][3] = not rows[-1][3]
    elif how == "missing row" and len(rows) > 1:
        rows.pop()
    elif how == "victim" and event.get("preempted"):
        event["preempted"][0] = rows[0][0]
    elif how == "finished" and event.get("finished"):
        event["finished"].pop()
    elif how == "pool" and "pool" in event:
        event["pool"][0] += 1
    elif how == "token" and event.get("token_ids"):
        event["token_ids"].append(0)
    elif how == "hits" and any(len(blocks) > 1 for _, blocks in event.get("tables", ())):
        next(blocks for _, blocks in event["tables"] if len(blocks) > 1).pop(0)
    elif how == "growth" and event.get("new_blocks"):
        event["new_blocks"].pop()
    elif how == "prefix" and any(ids for _, ids in event.get("prefixes", ())):
        next(ids for _, ids in event["prefixes"] if ids).pop()
    elif how == "copies" and event.get("copies"):
        event["copies"][0].reverse()
    elif how == "released" and event.get("released"):
        event["released"].pop()
    elif how == "asker" and event.get("askers"):
        event["askers"].pop()
    elif how == "hit" and event.get("hits"):
        event["hits"][0][1] += 1
    elif how == "evicted" and event.get("evicted"):
        event["evicted"] -= 1
    elif how == "refused" and event.get("refused"):
        reason = event["refused"][0][1]
        event["refused"][0][1] = "budget" if reason != "budget" else "blocks"
    elif how == "unrefused" and event.get("refused"):
        event["refused"].pop()
    elif how == "step" and "step" in event:
        event["step"] += 1
    else:
        return False
    return True


@pytest.mark.parametrize(
    ("how", "property_ids"),
    [
        ("start", {"S17", "S19", "S31"}),
        ("sampled", {"S19"}),
        ("missing row", {"S31"}),
        ("victim", {"S20"}),
        ("finished", {"S25"}),
        ("pool", {"S2"}),
        ("token", {"S19"}),
        ("hits", {"S32"}),
        ("growth", {"S32"}),
        ("released", {"S32"}),
        ("prefix", {"S39"}),
        ("copies", {"S33"}),
        ("asker", {"S31"}),
        ("hit", {"S31"}),
        ("evicted", {"S5"}),
        ("refused", {"S31"}),
        ("unrefused", {"S31"}),
        ("step", {"S24"}),
    ],
)
def test_an_altered_line_is_refused(how: str, property_ids: set[str]) -> None:
    check_altered(trace_in_full, alter, how, property_ids)


def check_altered(
    trace: Callable[[int], Iterable[str]],
    alter: Callable[[Any, str], bool],
    how: str,
    property_ids: set[str],
) -> None:
    """The first alterable line of each scenario is rejected with one of the properties."""
    num_altered = 0
    for seed in range(NUM_SCENARIOS):
        lines = list(trace(seed))
        assert replay.check(lines).property_id == ""
        for i, line in enumerate(lines):
            event = json.loads(line)
            if alter(event, how):
                lines[i] = json.dumps(event)
                verdict = replay.check(lines)
                assert verdict.property_id in property_ids, verdict
                assert verdict.line == i + 1
                num_altered += 1
                break
    assert num_altered > 5


class AnyBudget(StepPace):
    """Chooses a random token budget for each step, within the allowed range."""

    def __init__(self, seed: int) -> None:
        super().__init__(1.0)
        self._rng = random.Random(seed)

    def budget(self, queues: Queues, max_num_tokens: int) -> int | None:
        fewest = max(1, len(queues.running))
        return self._rng.choice([None, self._rng.randint(fewest, max_num_tokens)])


def paced_trace(seed: int) -> list[str]:
    scenario = Scenario(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        scenario.engine = scenario.new_engine(pace=AnyBudget(seed), trace=path)
        scenario.run()
        return path.read_text().splitlines()


def test_steps_of_any_budget_are_accepted_and_recorded() -> None:
    """A wrong budget is rejected if it would change the plan."""
    num_refused, budgets = 0, set()
    for seed in range(25):
        lines = paced_trace(seed)
        assert replay.check(lines).property_id == ""
        for number, line in enumerate(lines):
            event = json.loads(line)
            if event["event"] == "plan":
                budgets.add(event["budget"])
                for wrong in (event["budget"] - 1, 10**6):
                    told = json.dumps(event | {"budget": wrong})
                    found = replay.check([*lines[:number], told, *lines[number + 1 :]])
                    assert found.property_id in ("", "S18", "S31") or wrong == 0
                    assert found.property_id == "S18" or wrong != 10**6
                    num_refused += bool(found.property_id) and wrong != 10**6
                break
    assert len(budgets) > 3
    assert num_refused > 5


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_a_trace_of_an_older_version_is_still_read(version: int) -> None:
    """Traces of older versions lack fields, and the check must not need them.

    Version 1 lacks block tables, version 2 histories and copies, version 3 reasons and times,
    version 4 settled-only requests, version 5 state slots, version 6 owners, version 7 draft
    tokens, version 8 segments, version 9 tokens to draft. Before version 5 a trace has every row of
    every plan; before version 8 it has whether a row is sampled.
    """
    removed = ["max_wanted_drafts", "wanted"]
    if version < 9:
        removed += ["segments"]
    if version < 8:
        removed += ["max_draft_tokens", "drafts", "accepted"]
    if version < 7:
        removed += ["credit", "ticks_per_token", "reply_tokens", "owner", "budget"]
    if version < 6:
        removed += ["num_state_slots", "state_interval"]
    if version < 5:
        removed += ["settled_only"]
    if version < 4:
        removed += ["askers", "hits", "evicted", "refused", "times"]
    if version < 3:
        removed += ["prefixes", "reads_cache", "needs_history", "siblings", "copies"]
    removed += ["tables", "new_blocks", "released"] if version == 1 else []
    # Without a reset of the cache, which came with version 4.
    scenario = Scenario(
        4,
        has_states=False,
        may_be_fair=version >= 7,
        has_drafts=version >= 8,
        has_contents=False,
        has_wishes=False,
    )
    scenario.has_settled_only = version >= 5
    if version < 3:
        scenario.reads_cache, scenario.max_n = 1.0, 1  # what an engine of that version served
    old = []
    lines = written_by(scenario)
    for line in lines if version >= 5 else in_full(lines):
        event = json.loads(line)
        if event["event"] == "start":
            event["version"] = version
        for field in removed:
            event.pop(field, None)
        if 5 <= version < 8 and event.get("rows"):
            for row in event["rows"]["unusual"]:
                row[2] = bool(row[2])
        old.append(json.dumps(event))
    verdict = replay.check(old)
    assert (verdict.property_id, verdict.num_steps > 5) == ("", True)


@functools.cache
def drafting_trace(seed: int) -> tuple[str, ...]:
    return tuple(written_by(Scenario(seed, has_states=seed % 3 == 0, has_drafts=True)))


def alter_drafts(event: dict[str, Any], how: str) -> bool:
    """Alter the draft tokens of a plan or result; return False if it has none."""
    if how == "accepted" and event.get("accepted"):
        event["accepted"][0][1] += 1
    elif how == "accepted by none" and event.get("accepted"):
        event["accepted"].pop()
    elif how == "one left out" and any(len(ids) > 1 for _, ids in event.get("drafts", ())):
        next(ids for _, ids in event["drafts"] if len(ids) > 1).pop()
    elif how == "of no row" and event.get("drafts"):
        event["drafts"].append(["unknown", [0]])
    elif how == "too many" and event.get("drafts"):
        name, ids = event["drafts"][0]
        row = event["rows"]["ids"].index(name)
        ids += [0] * 9
        for unusual in event["rows"]["unusual"]:
            if unusual[0] == row:
                unusual[1:] = [unusual[1] + 9, unusual[2] + 9]
    elif how == "sample" and any(n for _, n in event.get("accepted", ())):
        # A correct draft token is recorded as a wrong one.
        event["token_ids"] = [(token + TOKEN_STRIDE) for token in event["token_ids"]]
    else:
        return False
    return True


@pytest.mark.parametrize(
    ("how", "property_ids"),
    [
        ("accepted", {"S58"}),
        ("accepted by none", {"S58"}),
        ("one left out", {"S17", "S19"}),
        ("of no row", {"S56"}),
        ("too many", {"S18", "S56"}),
        ("sample", {"S25", "S58"}),
    ],
)
def test_wrong_draft_tokens_are_rejected(how: str, property_ids: set[str]) -> None:
    check_altered(drafting_trace, alter_drafts, how, property_ids)


@pytest.mark.parametrize("end", ["stop", "error"])
def test_a_stop_string_behind_an_accepted_draft_is_replayed(tmp_path: Path, end: str) -> None:
    """Only the engine sees text: the trace records after how many draft tokens it ended. The same
    holds for a text that cannot be read."""
    ends = set()
    for seed in range(30):
        scenario = Scenario(seed, has_states=seed % 3 == 0, has_drafts=True)
        seen: list[int] = []

        def ends_here(token: int, seen: list[int] = seen, last: int = 2 + seed % 4) -> bool:
            seen.append(token)
            if end == "error" and len(seen) == last:
                raise UnicodeError("no text")
            return len(seen) == last

        path = tmp_path / f"{seed}.jsonl"
        engine = scenario.new_engine(trace=path)
        limit = min(9, scenario.capacity)
        request = Request(
            "text",
            [0],
            SamplingParams(),
            max_num_tokens=limit,
            on_token=ends_here,
            settled_only=True,
        )
        engine.add(request)
        while engine.has_work:
            engine.step()
        lines = path.read_text().splitlines()
        assert replay.check(lines).property_id == ""
        result = next(e for e in map(json.loads, reversed(lines)) if e["event"] == "result")
        ends.update((request.finish_reason, n) for _, n in result["accepted"])
        assert seen == request.output_token_ids
    assert {reason for reason, n in ends if n} >= {end}


@functools.cache
def trace_with_contents(seed: int) -> tuple[str, ...]:
    return tuple(written_by(Scenario(seed, has_contents=True)))


def test_traces_with_content_segments_are_accepted() -> None:
    verdicts = [replay.check(trace_with_contents(seed)) for seed in range(NUM_SCENARIOS)]
    assert [v for v in verdicts if v.property_id] == []
    assert sum(v.num_hit_blocks for v in verdicts) > 10


@pytest.mark.parametrize("pipeline_depth", [0, 1])
@pytest.mark.parametrize("told", ["ff", None])
def test_a_hit_of_other_content_is_refused(
    tmp_path: Path, pipeline_depth: int, told: str | None
) -> None:
    """A request with a cache hit on an image, or a part of one, must have no such hit with another
    image or with tokens only."""
    path = tmp_path / "t.jsonl"
    lines = write_trace(path, pipeline_depth=pipeline_depth, has_contents=True)
    assert not replay.check(lines).property_id
    events = [json.loads(line) for line in lines]
    added = {event["id"]: i for i, event in enumerate(events) if event["event"] == "add"}
    hits = [hit for event in events for hit in event.get("hits", ())]
    first_hits = dict(reversed(hits))
    num_inside = 0
    for name, num_tokens in first_hits.items():
        event = events[added[name]]
        (before, _), (length, content), *rest = event["segments"]
        num_inside += before < num_tokens < before + length
        altered = {**event, "segments": [[before, None], [length, told], *rest]}
        i = added[name]
        verdict = replay.check([*lines[:i], json.dumps(altered), *lines[i + 1 :]])
        assert verdict.property_id in {"S2", "S5", "S17", "S31", "S32"}, (content, verdict)
    assert len(first_hits) >= num_inside >= 3


@pytest.mark.parametrize(
    "alter",
    [
        lambda told: [*told, [1, None]],
        lambda told: [[told[0][0] + 1, told[0][1]], *told[1:]],
        lambda told: [*told, [1, "ab"]],
    ],
)
def test_segments_that_are_not_the_prompt_are_refused(alter: Callable[[Any], Any]) -> None:
    lines = trace_of(0)
    event = json.loads(lines[1])
    altered = json.dumps({**event, "segments": alter(event["segments"])})
    verdict = replay.check([lines[0], altered, *lines[2:]])
    assert (verdict.property_id, verdict.line) == ("S59", 2)


@pytest.mark.parametrize(
    "told", [[], None, [[0, None]], [[1, ""]], [[1, "AB"]], [[1, "abc"]], [[1]], [[True, None]]]
)
def test_segments_that_cannot_be_read_make_it_no_trace(told: object) -> None:
    lines = trace_of(0)
    altered = json.dumps({**json.loads(lines[1]), "segments": told})
    with pytest.raises(replay.TraceError, match=r"^line 2: add has segments"):
        replay.check([lines[0], altered, *lines[2:]])


@pytest.mark.parametrize(
    ("field", "alter", "property_id"),
    [
        ("state_tables", lambda told: told[:-1], "S51"),
        ("new_state_slots", lambda told: [[name, [*ids[:-1], 99]] for name, ids in told], "S51"),
        ("state_pool", lambda told: [told[0] + 1, told[1], told[2] - 1], "S43"),
    ],
)
def test_wrong_states_are_rejected(
    field: str, alter: Callable[[Any], Any], property_id: str
) -> None:
    num_altered = 0
    for seed in range(12):
        lines = trace_of(seed, has_states=True)
        events = [json.loads(line) for line in lines]
        told = [i for i, e in enumerate(events) if e["event"] == "plan" and e[field]]
        if told:
            i = told[-1]
            altered = json.dumps({**events[i], field: alter(events[i][field])})
            verdict = replay.check([*lines[:i], altered, *lines[i + 1 :]])
            assert (verdict.property_id, verdict.line) == (property_id, i + 1)
            num_altered += 1
    assert num_altered > 5


def failed_trace() -> tuple[list[str], int]:
    """A trace with steps in flight at a failure, and the index of that event."""
    for seed in range(200):
        lines = trace_of(seed)
        events = [json.loads(line)["event"] for line in lines]
        if "fail" in events and "plan" in events[events.index("fail") + 1 :]:
            return lines, events.index("fail")
    raise AssertionError("no scenario fails and goes on")


def test_a_wrong_failure_event_is_rejected() -> None:
    lines, i = failed_trace()
    failure = json.loads(lines[i])
    failure["pool"] = [failure["pool"][0] - 1, 1, 0]
    verdict = replay.check([*lines[:i], json.dumps(failure), *lines[i + 1 :]])
    assert (verdict.property_id, verdict.line) == ("S37", i + 1)


def test_a_wrong_reset_is_rejected() -> None:
    """Wrong resets of the prefix cache: blocks that are not free afterwards, or steps in flight
    before it."""
    kinds = set()
    for seed in range(NUM_SCENARIOS):
        lines = trace_of(seed)
        events = [json.loads(line) for line in lines]
        names = [event["event"] for event in events]
        for how in ("pool", "too early") if "reset" in names else ():
            i = names.index("reset")
            reset = json.dumps({**events[i], "pool": [events[i]["pool"][0] - 1, 1, 0]})
            if how == "too early":
                if "result" not in names[:i]:
                    continue
                i = names.index("result")
                reset = json.dumps({**events[i], "event": "reset"})
            verdict = replay.check([*lines[:i], reset, *lines[i:]])
            assert (verdict.property_id, verdict.line) == ("S41", i + 1)
            kinds.add(how)
    assert kinds == {"pool", "too early"}


def test_a_step_from_before_a_failure_is_not_settled_after_it() -> None:
    lines, i = failed_trace()
    late = {
        "event": "result",
        "t": 1,
        "step": 0,
        "token_ids": [],
        "accepted": [],
        "finished": [],
        "times": [1, 1, 1],
        "pool": [0, 0, 0],
    }
    verdict = replay.check([*lines[: i + 1], json.dumps(late), *lines[i + 1 :]])
    assert (verdict.property_id, verdict.line) == ("S24", i + 2)


def test_a_request_from_before_a_failure_is_not_served_after_it() -> None:
    lines, i = failed_trace()
    plan = next(json.loads(line) for line in lines if '"event": "plan"' in line)
    verdict = replay.check([*lines[: i + 1], json.dumps(plan), *lines[i + 1 :]])
    assert (verdict.property_id, verdict.line) == ("S27", i + 2)


def test_a_failure_may_lack_the_event_of_its_own_operation() -> None:
    lines, i = failed_trace()
    assert not replay.check([*lines[: i - 1], *lines[i:]]).property_id


def test_a_trace_that_cannot_be_written_fails_one_operation_and_ends(tmp_path: Path) -> None:
    scenario = Scenario(1)
    path = tmp_path / "t.jsonl"
    engine = scenario.engine = scenario.new_engine(trace=path)
    scenario.add()
    engine.step()
    engine._trace._file.close()  # as good as a full disk
    with pytest.raises(ValueError, match="closed file"):
        scenario.add()
    scenario.add()
    scenario.finish()
    assert not replay.check(path.read_text().splitlines()).property_id


MISSHAPEN = [None, 1.5, {}, [[]], [None]]
ODD = [0, -1, 10**30, True, "x", [], ["x"], [-1]]


def test_a_misshapen_field_makes_it_no_trace() -> None:
    """A field of the right shape with an odd value gets a verdict, or makes the file an invalid
    trace."""
    seen: set[str] = set()
    for seed in range(NUM_SCENARIOS):
        lines = trace_of(seed)
        for i, line in enumerate(lines):
            event = json.loads(line)
            kind = event.pop("event")
            if kind in seen or event.get("rows") == [] or event.get("token_ids") == []:
                continue
            seen.add(kind)
            for field in event.keys() - {"reason"}:
                for value in (*MISSHAPEN, *ODD, "missing"):
                    changed = {"event": kind, **event, field: value}
                    if value == "missing":
                        del changed[field]
                    altered = [*lines[:i], json.dumps(changed), *lines[i + 1 :]]
                    is_misshapen = value == "missing" or value in MISSHAPEN
                    if is_misshapen and not (field == "t" and value == 1.5):
                        with pytest.raises(replay.TraceError, match=r"^line|^not"):
                            replay.check(altered)
                    else:
                        with contextlib.suppress(replay.TraceError):
                            replay.check(altered)
    assert seen == {"start", "add", "plan", "result", "abort", "pause", "resume", "reset", "fail"}


@pytest.mark.parametrize(
    "lines",
    [
        ["{}"],
        [],
        ["no json"],
        ["[]"],
        ['{"event": "start", "version": 99}'],
        ['{"event": "start", "version": 1}'],
        ["[" * 100_000],
        ['{"event": ' + "1" * 5000 + "}"],
    ],
    ids=lambda lines: repr(lines)[:30],
)
def test_what_is_no_trace_is_refused(lines: list[str]) -> None:
    with pytest.raises(replay.TraceError):
        replay.check(lines)


@pytest.mark.parametrize(
    "event", [{"event": "start", "version": 1}, {"event": "init__"}, {"event": ["add"]}, {}]
)
def test_an_unknown_event_makes_it_no_trace(event: dict) -> None:
    lines = trace_of(0)
    with pytest.raises(replay.TraceError, match=r"^line 2"):
        replay.check([lines[0], json.dumps(event), *lines[1:]])
