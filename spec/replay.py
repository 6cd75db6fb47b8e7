"""Replays a real engine's step trace against the specification.

The trace (``pagespec.engine.trace`` describes the format) contains the engine's inputs, its plans
and the results. The inputs are given to the specification's machine; the plans and finished
requests must equal the machine's, row by row, including block counts. The verdict names the first
event that differs, with the property that it violates. A plan that violates no other property but
differs from the specified one violates S31, since a plan is a function of the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice, zip_longest
from typing import Any, NamedTuple

from .events import TraceError, read_events, shortened
from .replay_machine import ReplayMachine
from .replay_states import differing_pool, differing_states
from .state import Plan, Scope, Segment, Template

__all__ = ["TraceError", "Verdict", "check"]


class Verdict(NamedTuple):
    """``property_id`` is "" if the whole trace was accepted; otherwise ``line`` is the first one
    that differs."""

    num_steps: int
    num_requests: int
    num_preemptions: int
    num_hit_blocks: int
    line: int = 0
    step: int | None = None
    property_id: str = ""
    detail: str = ""


class _Refused(Exception):
    def __init__(self, property_id: str, detail: str) -> None:
        super().__init__(detail)
        self.property_id = property_id


class Replay:
    """Applies events one by one; raises ``_Refused`` at the first one that is not allowed."""

    def __init__(self, start: dict[str, Any]) -> None:
        scope = Scope(
            "trace",
            (),
            num_blocks=start["num_blocks"],
            block_size=start["block_size"],
            budget=start["max_num_batched_tokens"],
            cap=start["max_num_seqs"],
            max_model_len=1 << 62,
            depth=start["pipeline_depth"],
            policy=start["policy"],
            overtaking=start["max_overtakes"],
            ageing=start["arrivals_per_priority"],
            cost_unit=start["tokens_per_arrival"],
            caching=start["enable_prefix_caching"],
        )
        if start["version"] >= 6:
            num_states, interval = start["num_state_slots"], start["state_interval"]
            scope = scope._replace(num_states=num_states, interval=interval)
        self.has_owners = self.has_budgets = start["version"] >= 7
        if self.has_owners and start["policy"] == "fair":
            scope = scope._replace(
                credit=start["credit"], ticks=start["ticks_per_token"], reply=start["reply_tokens"]
            )
        scope = scope._replace(
            max_drafts=start.get("max_draft_tokens", 0),
            max_wanted=start.get("max_wanted_drafts", 0),
        )
        self.machine = ReplayMachine(scope)
        self.numbers: dict[str, int] = {}
        self.salts: dict[str, int] = {}
        self.contents: dict[str, int] = {}  # a number from 1 on for each content hash
        self.num_steps = self.num_preemptions = self.num_hit_blocks = 0
        self.steps_in_flight: list[int] = []
        self.next_step: int | None = 0  # None: any later one, since a failure may hide a plan
        self.has_tables = start["version"] >= 2
        self.has_prefixes = start["version"] >= 3
        self.has_account = start["version"] >= 4
        self.has_settled_only = start["version"] >= 5
        self.has_segments = start["version"] >= 9
        self.tables: dict[int, list[int]] = {}  # of the running requests, from the plans alone

    def apply(self, event: dict[str, Any]) -> None:
        getattr(self, f"_on_{event['event']}")(event)

    def _number(self, event: dict[str, Any]) -> int:
        if event["id"] not in self.numbers:
            raise _Refused("S23", f"request {event['id']} was never added")
        return self.numbers[event["id"]]

    def _on_add(self, event: dict[str, Any]) -> None:
        machine, number = self.machine, len(self.machine.requests)
        salt = self.salts.setdefault(event["salt"], len(self.salts))
        prompt = tuple(event["prompt"])
        limit = event["max_num_tokens"]
        template = Template(prompt, limit - len(prompt), salt, event["priority"])
        names = [event["id"]]
        if self.has_prefixes:
            names += event["siblings"]
            template = template._replace(
                reads_cache=event["reads_cache"], needs_history=event["needs_history"], n=len(names)
            )
        if self.has_settled_only:
            template = template._replace(settled_only=event["settled_only"])
        if self.has_owners:
            template = template._replace(owner=event["owner"])
        if self.has_segments:
            segments = tuple(
                Segment(
                    length, content and self.contents.setdefault(content, len(self.contents) + 1)
                )
                for length, content in event["segments"]
            )
            if not machine.covers(prompt, segments):
                total = sum(segment.length for segment in segments)
                raise _Refused(
                    "S59", f"segments of {total} positions for a prompt of {len(prompt)}"
                )
            template = template._replace(segments=segments)
        machine.stop_ids += [frozenset(event["stop_token_ids"])] * len(names)
        machine.watches_text += [event["has_stop_strings"]] * len(names)
        machine.add(template)
        if len(machine.requests) == number:
            raise _Refused("S30", f"request {event['id']} can never fit, and was admitted")
        self.numbers.update(zip(names, count(number)))

    def _on_plan(self, event: dict[str, Any]) -> None:
        machine = self.machine
        if len(machine.flight) > machine.scope.depth:
            raise _Refused("S28", f"planned while {len(machine.flight)} steps are in flight")
        if self.next_step not in (None, event["step"]):
            raise _Refused("S24", f"step {event['step']} where step {self.next_step} is next")
        numbers = self.numbers
        drafts = {numbers.get(name, -1): tuple(ids) for name, ids in event.get("drafts", ())}
        rows = [
            (r, start, num_tokens - len(drafts.get(r, ())), num_samples)
            for r, start, num_tokens, num_samples in (
                (numbers.get(name, -1), *rest) for name, *rest in event["rows"]
            )
        ]
        preempted = [self.numbers.get(name, -1) for name in event["preempted"]]
        budget = event["budget"] if self.has_budgets else machine.scope.budget
        self._check_rows(rows, drafts, preempted, budget)
        num_keys = len(machine.index)
        wanted = {numbers.get(name, -1): n for name, n in event.get("wanted", ())}
        made = machine.schedule(budget, tuple(drafts.items()), tuple(wanted.items()))
        own_rows = [row[:3] for row in rows]  # S19 covers their samples
        if [row[:3] for row in made.rows] != own_rows or list(made.preempted) != preempted:
            raise _Refused(
                "S31",
                f"planned rows {_short(own_rows)}, preempted {preempted}; the specification plans "
                f"{_short([row[:3] for row in made.rows])}, preempts {list(made.preempted)}",
            )
        carried = {row.request: row.drafts for row in made.rows if row.drafts}
        if carried != drafts:
            raise _Refused(
                "S56",
                f"drafts {shortened(str(drafts), 80)}, the specification carries "
                f"{shortened(str(carried), 80)}",
            )
        granted = {row.request: row.wanted for row in made.rows if row.wanted}
        if granted != wanted:
            raise _Refused("S64", f"tokens to draft {wanted}, the specification has {granted}")
        if self.has_tables:
            self._take_tables(event)
        if self.has_prefixes:
            self._check_prefixes(event, made)
            if list(map(tuple, event["copies"])) != list(made.copies):
                raise _Refused(
                    "S33", f"copies {event['copies']}, the specification {list(made.copies)}"
                )
        if machine.scope.num_states:
            broken = differing_states(event, made, self.numbers)
            if broken is not None:
                raise _Refused(*broken)
        if self.has_account:
            self._check_account(event, made, num_keys - len(machine.index))
        machine.dispatch(made, ())
        self.num_steps += 1
        self.steps_in_flight.append(event["step"])
        self.next_step = event["step"] + 1
        self.num_preemptions += len(made.preempted)
        self.num_hit_blocks += sum(len(hits) for _, hits in made.admitted)
        self._check_pool(event)

    def _take_tables(self, event: dict[str, Any]) -> None:
        """S32: the tables in the plans add up to the tables of the running requests."""
        numbers, tables = self.numbers, self.tables
        for name in event["released"]:
            if tables.pop(numbers.get(name, -1), None) is None:
                raise _Refused("S32", f"request {name} is released, and no plan has its table")
        for name, blocks in event["tables"]:
            if numbers.get(name, -1) in tables:
                raise _Refused("S32", f"request {name} is admitted, and was not released before")
            tables[numbers.get(name, -1)] = list(blocks)
        for name, blocks in event["new_blocks"]:
            if numbers.get(name, -1) not in tables:
                raise _Refused("S32", f"request {name} grows, and no plan has its table")
            tables[numbers[name]] += blocks
        requests = self.machine.requests
        if tables.keys() != set(self.machine.running):
            raise _Refused("S32", f"plans have the tables of {sorted(tables)}, others are running")
        for r, table in tables.items():
            if tuple(table) != requests[r].table:
                raise _Refused(
                    "S32",
                    f"request {r} has blocks {shortened(str(table), 80)} in plans, its table is "
                    f"{shortened(str(list(requests[r].table)), 80)}",
                )

    def _check_prefixes(self, event: dict[str, Any], made: Plan) -> None:
        """S39: a plan has every token that an admitted row does not compute."""
        recorded = [(self.numbers.get(name, -1), tuple(ids)) for name, ids in event["prefixes"]]
        for (r, ids), (expected_r, expected) in zip_longest(
            recorded, made.prefixes, fillvalue=(None, ())
        ):
            if (r, ids) != (expected_r, expected):
                raise _Refused(
                    "S39",
                    f"request {r} gets {len(ids)} tokens before its row, the specification "
                    f"gives request {expected_r} {len(expected)}",
                )

    def _check_account(self, event: dict[str, Any], made: Plan, num_evicted: int) -> None:
        """S31: the reasons of a plan are a function of the state, like the plan itself."""
        starts = {row.request: row.start for row in made.rows}
        expected = {
            "askers": list(made.preempted_for),
            "hits": [(r, starts[r]) for r, _ in made.admitted if starts[r]],
            "evicted": num_evicted,
            "refused": [(r, reason) for r, reason in made.refused if reason != "behind"],
        }
        numbers = self.numbers
        recorded = {
            "askers": [numbers.get(name, -1) for name in event["askers"]],
            "hits": [(numbers.get(name, -1), n) for name, n in event["hits"]],
            "evicted": event["evicted"],
            "refused": [(numbers.get(name, -1), reason) for name, reason in event["refused"]],
        }
        for field, value in expected.items():
            if recorded[field] != value:
                raise _Refused(
                    "S5" if field == "evicted" else "S31",
                    f"{field} {shortened(str(recorded[field]), 80)}, the specification has "
                    f"{shortened(str(value), 80)}",
                )

    def _check_rows(
        self,
        rows: list[tuple[Any, ...]],
        drafts: dict[int, tuple[int, ...]],
        preempted: list[int],
        budget: int,
    ) -> None:
        """Checks of a plan that do not depend on the pool. ``rows``: (request, start, number of its
        own tokens, number of samples); ``drafts``: its draft tokens, by request."""
        machine = self.machine
        if not drafts.keys() <= {row[0] for row in rows}:
            raise _Refused("S56", f"drafts of {sorted(drafts)}, which have not all a row")
        total = sum(row[2] for row in rows) + sum(map(len, drafts.values()))
        if total > budget:
            raise _Refused("S18", f"{total} tokens in a step of at most {budget}")
        if not max(1, len(machine.running)) <= budget <= machine.scope.budget:
            limit = f"{len(machine.running)} to {machine.scope.budget}"
            raise _Refused("S18", f"a budget of {budget} tokens, not of {limit}")
        if len(rows) > machine.scope.cap or any(row[2] < 1 for row in rows):
            raise _Refused("S18", f"{len(rows)} rows in a step of at most {machine.scope.cap}")
        both = {row[0] for row in rows}.intersection(preempted)
        if both:
            raise _Refused("S20", f"requests {sorted(both)} are preempted and in the plan")
        for r, start, n, num_samples in rows:
            if r in machine.pending:
                raise _Refused("S40", f"request {r} is scheduled before its leader's prompt")
            if r < 0 or machine.requests[r].reason or r in machine.paused:
                raise _Refused("S27", f"request {r} is not there to be scheduled")
            request = machine.requests[r]
            if r in machine.running and start != request.dispatched:
                raise _Refused(
                    "S17", f"request {r} is computed from {start}, it has {request.dispatched}"
                )
            if start + n > request.total:
                raise _Refused("S17", f"request {r} is computed to {start + n} of {request.total}")
            is_settled_only = request.settled_only or machine.has_drafts_in_flight(r)
            if is_settled_only and start + n > len(request.tokens):
                raise _Refused("S42", f"request {r} is computed to {start + n}, which is unsettled")
            expected = 1 + len(drafts.get(r, ())) if start + n == request.total else 0
            if num_samples != expected:
                raise _Refused(
                    "S19",
                    f"request {r} samples {num_samples} tokens at {start + n}, not {expected}",
                )

    def _on_result(self, event: dict[str, Any]) -> None:
        machine = self.machine
        if not machine.flight:
            raise _Refused("S24", "a result of no step")
        if event["step"] != self.steps_in_flight[0]:
            raise _Refused("S24", f"step {event['step']} ends before {self.steps_in_flight[0]}")
        tokens = list(event["token_ids"])
        step = machine.flight[0]
        if len(tokens) != sum(len(row.samples) for row in step):
            raise _Refused("S19", f"{len(tokens)} tokens for {len(step)} rows")
        recorded = iter(tokens)
        machine.flight[0] = tuple(
            row._replace(samples=tuple(islice(recorded, len(row.samples)))) for row in step
        )
        traced_ends = [(self.numbers.get(name, -1), reason) for name, reason in event["finished"]]
        machine.traced_reasons = dict(traced_ends)
        traced_accepted = [(self.numbers.get(name, -1), n) for name, n in event.get("accepted", ())]
        machine.traced_accepted = dict(traced_accepted)
        live = [row.request for row in step if not machine.requests[row.request].reason]
        before = {row.request: len(machine.requests[row.request].tokens) for row in step}
        machine.settle()
        self.steps_in_flight.pop(0)
        accepted = [
            (
                row.request,
                max(0, len(machine.requests[row.request].tokens) - before[row.request] - 1),
            )
            for row in step
            if row.drafts
        ]
        if accepted != traced_accepted:
            raise _Refused(
                "S58", f"accepted drafts {traced_accepted}, the specification accepts {accepted}"
            )
        ends = [(r, machine.requests[r].reason) for r in live if machine.requests[r].reason]
        if ends != traced_ends:
            raise _Refused("S25", f"finished {traced_ends}, the specification finishes {ends}")
        self._check_pool(event)

    def _on_abort(self, event: dict[str, Any]) -> None:
        self.machine.abort(self._number(event))

    def _on_pause(self, event: dict[str, Any]) -> None:
        r = self._number(event)
        m = self.machine
        if r in (*m.waiting, *m.running, *m.pending, *m.queued):
            m.pause(r)

    def _on_resume(self, event: dict[str, Any]) -> None:
        r = self._number(event)
        if r in self.machine.paused:
            self.machine.resume(r)

    def _on_reset(self, event: dict[str, Any]) -> None:
        machine = self.machine
        if not machine.may_reset():
            raise _Refused("S41", f"a reset while {len(machine.flight)} steps are in flight")
        self.num_preemptions += len(machine.running)
        machine.reset_cache()
        if list(event["pool"]) != [len(machine.free), 0, 0]:
            raise _Refused("S41", f"free, cached, owned blocks {event['pool']} after a reset")
        self._check_states("S41", event)

    def _on_fail(self, event: dict[str, Any]) -> None:
        """The event of the operation that failed may be missing, whatever it did."""
        machine = self.machine
        machine.fail()
        self.tables.clear()
        self.steps_in_flight.clear()
        self.next_step = None
        if list(event["pool"]) != [len(machine.free), 0, 0]:
            raise _Refused("S37", f"free, cached, owned blocks {event['pool']} after a failure")
        self._check_states("S37", event)

    def _check_pool(self, event: dict[str, Any]) -> None:
        machine = self.machine
        num_free, num_cached = len(machine.free), len(machine.lru)
        pool = [num_free, num_cached, len(machine.refs) - num_free - num_cached]
        if pool != list(event["pool"]):
            raise _Refused(
                "S2", f"free, cached, owned blocks {event['pool']}, the specification has {pool}"
            )
        self._check_states("S43", event)

    def _check_states(self, property_id: str, event: dict[str, Any]) -> None:
        difference = differing_pool(event, self.machine)
        if difference:
            raise _Refused(property_id, difference)


def _short(rows: list[tuple[Any, ...]]) -> str:
    text = str(rows)
    return shortened(text, 160)


def check(lines: Iterable[str]) -> Verdict:
    """Replay a trace.

    Raises:
        TraceError: it is not a trace; a trace that violates a property gives a Verdict instead.
    """
    events = read_events(lines)
    replay = Replay(next(events)[1])
    broken: dict[str, Any] = {}
    for line, event in events:
        try:
            replay.apply(event)
        except _Refused as refusal:
            broken = {
                "line": line,
                "step": event.get("step"),
                "property_id": refusal.property_id,
                "detail": str(refusal),
            }
            break
    return Verdict(
        replay.num_steps,
        len(replay.machine.requests),
        replay.num_preemptions,
        replay.num_hit_blocks,
        **broken,
    )
