"""Writes the step trace: all inputs and decisions of the scheduler, one JSON object per line.
``pagespec trace check`` replays it against the specification.

=========  =====================================================================================
event      fields besides ``t`` (seconds since the trace began)
=========  =====================================================================================
start      version, and the scheduler's settings
add        id, prompt (token ids), max_num_tokens, stop_token_ids, has_stop_strings, salt (hex),
           priority; since version 3 reads_cache, needs_history, siblings (ids); since version 5
           settled_only; since version 7 owner (a number); since version 9 segments ``[length,
           content hash (hex)]`` of the prompt, null for a token segment
plan       step, rows ``[id, start, num_tokens, sampled]``, preempted ids, pool; since version 2
           tables and new_blocks ``[id, block ids]``, released ids; since version 3 prefixes
           ``[id, token ids]`` and copies (see ``StepPlan``); since version 4 askers (per preempted
           request, the id of the request that gained its blocks or place), hits ``[id, number of
           tokens that its admission found in blocks]``, evicted (number of blocks), refused ``[id,
           reason]`` (see ``planner``) and times: start of planning, end of planning, return of the
           runner's ``dispatch``; since version 5 rows are columns or null, see below; since version
           7 budget (token budget of the step); since version 8 drafts ``[id, draft tokens]``, which
           are the last of the row's tokens, and rows with ``num_samples`` instead of ``sampled``;
           with recurrent layers, state_tables and new_state_slots ``[id, slots]``, like tables and
           new_blocks
result     step, token_ids (the samples, in row order), finished ``[id, reason]``, pool; since
           version 4 times: start of waiting for the result, its arrival, end of the commit; since
           version 8 accepted ``[id, number of draft tokens]`` of each row with draft tokens
abort      id, reason
pause      id
resume     id
reset      pool; since version 4: the prefix cache was reset, with nothing in flight
fail       pool; an operation failed or was interrupted, and all live requests ended. The event of
           that operation may be missing
=========  =====================================================================================

``pool`` is the number of blocks ``[free, cached, owned]`` after the event. For models with
recurrent layers (since version 6), ``state_pool`` gives the same counts of state slots.
``times`` are seconds since the trace began. A plan is written after its dispatch, so that the
device does not wait for it.

``rows`` are ``{ids, starts, unusual}``: ids and starts of all rows, and ``[row, num_tokens,
num_samples]`` of each row that does not compute one position and sample one token (``num_tokens``
includes draft tokens). Null means the rows of the previous plan (with no failure since), each at
its next position with one sampled token. Most steps are such steps; writing their rows was the
largest cost of a trace.
"""

from __future__ import annotations

import json
import os
import stat
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from operator import sub
from typing import Any

from .ledger import Ledger
from .plan import Blocks, StepPlan
from .planner import PlanAccount
from .request import Request
from .runner import Drafter, DraftObserver
from .scheduler import Scheduler

TRACE_VERSION = 10


class TraceWriter:
    """Appends events to a file; a line is complete when its event is over. It makes the scheduler
    record the reasons for its plans.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], scheduler: Scheduler) -> None:
        # Unbuffered: the trace of a crashed run is complete up to its last event.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._num_bytes = 0
        self._scheduler = scheduler
        self._last_plan: StepPlan | None = None  # the last one written since the last failure
        self._account = scheduler.account = PlanAccount()
        self._owners: dict[str, int] = {}  # a trace contains numbers instead of names
        self._begin = time.perf_counter()
        blocks, policy = scheduler.blocks, asdict(scheduler.policy)
        self.write(
            "start",
            version=TRACE_VERSION,
            num_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            enable_prefix_caching=blocks.enable_prefix_caching,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            pipeline_depth=scheduler.pipeline_depth,
            policy=policy.pop("name"),
            **policy,
            max_draft_tokens=0 if scheduler.drafter is None else scheduler.drafter.max_draft_tokens,
            max_wanted_drafts=_max_wanted_drafts(scheduler.drafter),
            num_state_slots=blocks.states.num_slots if blocks.states is not None else 0,
            state_interval=blocks.states.interval if blocks.states is not None else 0,
        )

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with these fields."""
        line = json.dumps({"event": event, "t": self._now(), **fields}).encode() + b"\n"
        num_written = 0
        while num_written < len(line):  # a pipe or a full disk may accept only a part
            num_written += self._file.write(line[num_written:])
        self._num_bytes += num_written

    def _now(self) -> float:
        return self._since_start(time.perf_counter())

    def _since_start(self, clock: float) -> float:
        return round(clock - self._begin, 6)

    def _pools(self) -> dict[str, list[int]]:
        blocks = self._scheduler.blocks
        pools = {"pool": _counts(blocks)}
        if blocks.states is not None:
            pools["state_pool"] = _counts(blocks.states)
        return pools

    def _states(self, plan: StepPlan) -> dict[str, list[tuple[str, Blocks]]]:
        if self._scheduler.blocks.states is None:
            return {}
        return {
            "state_tables": self._by_id(plan, plan.state_tables),
            "new_state_slots": self._by_id(plan, plan.new_state_slots),
        }

    def add(self, request: Request, siblings: Sequence[Request] = ()) -> None:
        self.write(
            "add",
            id=request.request_id,
            prompt=request.token_ids[: request.num_prompt_tokens],
            max_num_tokens=request.max_num_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            has_stop_strings=request.on_token is not None,
            salt=request.cache_salt.hex(),
            priority=request.priority,
            owner=self._owners.setdefault(request.owner, len(self._owners)),
            reads_cache=request.reads_cache,
            needs_history=request.info.needs_history,
            settled_only=request.settled_only,
            siblings=[sibling.request_id for sibling in siblings],
            segments=[
                (length, None if content_hash is None else content_hash.hex())
                for length, content_hash, _ in request.info.segments
            ],
        )

    def plan(self, plan: StepPlan, began: float, planned: float) -> None:
        """Write a step, planned between these two clock readings and just dispatched."""
        times = [self._since_start(began), self._since_start(planned), self._now()]
        account = self._account
        hits = [
            (plan.requests[row].request_id, plan.starts[row])
            for row in plan.tables
            if plan.starts[row]
        ]
        self.write(
            "plan",
            times=times,
            step=plan.step,
            budget=self._scheduler.last_budget,
            rows=self._rows(plan),
            preempted=[r.request_id for r in plan.preempted],
            tables=self._by_id(plan, plan.tables),
            new_blocks=self._by_id(plan, plan.new_blocks),
            prefixes=self._by_id(plan, plan.prefixes),
            copies=plan.copies,
            drafts=self._by_id(plan, plan.drafts()) if plan.has_drafts else [],
            wanted=[(plan.requests[row].request_id, n) for row, n in plan.wanted_drafts.items()],
            released=plan.released,
            askers=account.preempted_for,
            hits=hits,
            evicted=account.num_evicted,
            refused=account.refused,
            **self._states(plan),
            **self._pools(),
        )
        self._last_plan = plan

    def _rows(self, plan: StepPlan) -> dict[str, Any] | None:
        is_usual = plan.num_tokens.count(1) == len(plan) and all(plan.num_samples)
        if is_usual and self._is_continued(plan):
            return None
        unusual = []
        if not is_usual:
            counts = enumerate(zip(plan.num_tokens, plan.num_samples, strict=True))
            unusual = [(row, n, samples) for row, (n, samples) in counts if n != 1 or not samples]
        ids = [request.request_id for request in plan.requests]
        return {"ids": ids, "starts": plan.starts, "unusual": unusual}

    def _is_continued(self, plan: StepPlan) -> bool:
        """Whether the rows are those of the previous plan at their next positions. Positions are
        compared, so that a wrong position is written, not hidden."""
        last = self._last_plan
        return (
            last is not None
            and plan.requests == last.requests
            # No sums, which would create a large integer per row.
            and tuple(map(sub, plan.starts, last.starts)) == last.num_tokens
        )

    @staticmethod
    def _by_id(plan: StepPlan, rows: dict[int, Blocks]) -> list[tuple[str, Blocks]]:
        return [(plan.requests[row].request_id, ids) for row, ids in rows.items()]

    def result(
        self,
        plan: StepPlan,
        token_ids: Sequence[int],
        finished: Sequence[Request],
        awaited: float,
        collected: float,
    ) -> None:
        """Write a result: the wait for it began and ended at these clock readings, and it was just
        committed."""
        self.write(
            "result",
            times=[self._since_start(awaited), self._since_start(collected), self._now()],
            step=plan.step,
            token_ids=list(token_ids),
            accepted=self._scheduler.last_accepted if plan.has_drafts else [],
            finished=[[r.request_id, r.finish_reason] for r in finished],
            **self._pools(),
        )

    def reset(self) -> None:
        self.write("reset", **self._pools())

    def fail(self) -> None:
        """Write that the scheduler was reset. A partially written event is cut off."""
        self._last_plan = None
        if self._is_regular:
            self._file.truncate(self._num_bytes)
            self._file.seek(self._num_bytes)
        self.write("fail", **self._pools())


def _max_wanted_drafts(drafter: Drafter | None) -> int:
    return drafter.max_wanted_drafts if isinstance(drafter, DraftObserver) else 0


def _counts(ledger: Ledger) -> list[int]:
    num_free, num_cached = len(ledger.free), len(ledger.lru)
    return [num_free, num_cached, len(ledger.keys) - num_free - num_cached]
