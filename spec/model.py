"""The actions of the model; ``actions(state, scope)`` is the next-state relation.

==========  ================================================================
Add         the environment sends a request; one that can never fit is refused
Schedule    one plan is made and dispatched (engine)
Settle      the oldest step in flight is committed (engine)
Abort       the user aborts a request, at any moment
Pause       a request is no longer scheduled and releases its blocks
Resume      a paused request continues, at its rank
ResetCache  the user resets the prefix cache; running requests restart, at their ranks
Fail        an operation raised or was interrupted: all live requests end, the pool is reset
==========  ================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice, product

from .pool import ceil_div
from .scheduler import Scheduler
from .state import (
    EMPTY,
    NEVER,
    STOP,
    Abort,
    Add,
    Drafts,
    Fail,
    Label,
    Pause,
    Plan,
    Request,
    ResetCache,
    Resume,
    Row,
    Schedule,
    Scope,
    Segment,
    Segments,
    Settle,
    Slots,
    State,
    Template,
    Wishes,
    names,
)


class Machine(Scheduler):
    # ------------------------------------------------------------------ arrival
    def fits(self, template: Template) -> bool:
        """S30: the last token is sampled but never computed, hence the - 1."""
        limit = self.scope.limit(template)
        blocks = ceil_div(limit - 1, self.block_size)
        return blocks <= self.scope.num_blocks and len(template.prompt) <= limit - 1

    def rank(self, number: int, template: Template) -> tuple[int, int]:
        """Assigned at arrival. A request that arrives more than K later has a larger rank (L5).
        Under "fair" the rank is assigned at the request's turn."""
        if self.is_fair:
            return NEVER, number
        delay = {
            "fcfs": 0,
            "shortest_first": self.scope.limit(template) // self.scope.cost_unit,
            "priority": template.priority * self.scope.ageing,
        }[self.scope.policy]
        return number + min(self.scope.overtaking, delay), number

    def covers(self, prompt: tuple[int, ...], segments: Segments) -> bool:
        """S59: no segment is empty, and the segments cover the prompt exactly."""
        lengths = [segment.length for segment in segments]
        return min(lengths) >= 1 and sum(lengths) == len(prompt)

    def add(self, template: Template) -> None:
        first, prompt = len(self.requests), template.prompt
        segments = template.segments or (Segment(len(prompt)),)
        if not self.fits(template) or not self.covers(prompt, segments):
            return
        for number in range(first, first + template.n):
            self.requests.append(
                Request(
                    prompt,
                    len(prompt),
                    self.scope.limit(template),
                    template.salt,
                    self.rank(number, template),
                    total=len(prompt),
                    # Only the leader has to compute the whole prompt.
                    reads_cache=template.reads_cache or number > first,
                    needs_history=template.needs_history,
                    settled_only=template.settled_only,
                    leader=first if number > first else -1,
                    owner=template.owner,
                    segments=segments,
                )
            )
        self.pending += range(first + 1, first + template.n)
        self.join_waiting(first)

    def release_siblings(self, leader: int) -> None:
        """Siblings start to wait only now, so that later arrivals do not wait for the leader's
        prompt. Siblings keep the ranks of their arrival."""
        for r in [r for r in self.pending if self.requests[r].leader == leader]:
            self.pending.remove(r)
            self.join_waiting(r)

    # ------------------------------------------------------------------ dispatch
    def dispatch(self, plan: Plan, tokens: tuple[int, ...]) -> None:
        """The step writes the KV of its positions now (steps run in order on one stream)."""
        samples = iter(tokens)
        known = [self.all_tokens(row.request) for row in plan.rows]
        known = [
            ids[: row.start + row.n] + row.drafts if row.drafts else ids
            for row, ids in zip(plan.rows, known, strict=True)
        ]
        self.copy_blocks(plan.copies)
        for row, ids in zip(plan.rows, known, strict=True):
            self.write(row.request, row.start, row.end - row.start, ids)
            self.write_states(row.request, row.start, row.n, ids)
        self.write_padding(sum(row.end - row.start for row in plan.rows))
        self.update_runner_view(plan)
        self.update_histories(plan, known)
        self.flight.append(
            tuple(
                Row(
                    row.request,
                    row.start,
                    row.n,
                    tuple(islice(samples, row.num_samples)),
                    self.requests[row.request].table,
                    states=self.requests[row.request].states,
                    drafts=row.drafts,
                    wanted=row.wanted,
                )
                for row in plan.rows
            )
        )

    def update_runner_view(self, plan: Plan) -> None:
        """Update the runner's tables, which follow from the plans alone, in order (S32, S51)."""
        for r in plan.released:
            self.view.pop(r, None)
            self.state_view.pop(r, None)
            self.histories.pop(r, None)
        self.view.update(plan.tables)
        self.state_view.update(plan.state_tables)
        for r, blocks in plan.added:
            self.view[r] = self.view.get(r, ()) + blocks
        for r, slots in plan.added_states:
            self.state_view[r] = self.state_view.get(r, ()) + slots
        self.left.clear()

    def update_histories(self, plan: Plan, known: list[tuple[int, ...]]) -> None:
        """The runner's histories (S39): a plan names the tokens of its rows, including those that
        exist only on the device. A row begins after the last accepted token, so it overwrites the
        rejected drafts of the previous row."""
        self.histories.update(plan.prefixes)
        for row, ids in zip(plan.rows, known, strict=True):
            if row.request in self.histories:
                kept = self.kept_history(self.histories[row.request], row.start)
                self.histories[row.request] = kept + ids[row.start : row.end]

    def kept_history(self, ids: tuple[int, ...], start: int) -> tuple[int, ...]:
        return ids[:start]

    def all_tokens(self, r: int) -> tuple[int, ...]:
        """Settled tokens and the first sample of each row in flight, which exists only on the
        device. Samples after drafts count only when they settle."""
        pending = tuple(
            token
            for step in self.flight
            for row in step
            if row.request == r
            for token in row.samples[:1]
        )
        return self.requests[r].tokens + pending

    def write(self, r: int, start: int, n: int, ids: tuple[int, ...]) -> None:
        request = self.requests[r]
        written = self.computed_names(request, start, ids)
        for position in range(start, start + n):
            block, slot = divmod(position, self.block_size)
            # Only a defect writes outside table or tokens; S10, S17 or S18 detect it.
            if block < len(request.table) and position < len(written):
                self.write_slot(request.table[block], slot, written[position])

    def computed_names(self, request: Request, _: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The prefixes that a row computes, wherever it starts: a row that starts inside a content
        segment continues at that offset."""
        return names(request, ids)

    def write_slot(self, block: int, slot: int, prefix: int) -> None:
        old = self.contents[block]
        self.contents[block] = (*old[:slot], prefix, *old[slot + 1 :])

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """In one launch, unordered: all sources are read before any write."""
        old = list(self.contents)
        for source, destination in copies:
            self.contents[destination] = old[source]

    def write_padding(self, num_tokens: int) -> None:
        """A graph of a fixed size computes the rows up to the next power of two; these write to
        the null block, which is not part of the pool."""

    # ------------------------------------------------------------------ settle
    def settle(self) -> None:
        for row in self.flight.pop(0):
            self.settle_row(row)

    def settle_row(self, row: Row) -> None:
        r = row.request
        self.update(r, computed=self.requests[r].computed + row.n)
        if self.requests[r].computed >= self.requests[r].num_prompt:
            self.release_siblings(r)
        if self.requests[r].reason:
            self.drop_result(row)
        else:
            self.apply_result(row)

    def drop_result(self, row: Row) -> None:
        self.release_if_drained(row.request)

    def apply_result(self, row: Row) -> None:
        r = row.request
        if row.samples:
            self.take_samples(r, row)
        self.publish(r)
        reason = self.finish_reason(r) if row.samples else ""
        if reason:
            self.finish(r, reason)
        elif r not in self.running:
            self.take_back_if_drained(r)

    def take_samples(self, r: int, row: Row) -> None:
        """Accept a prefix of the row's samples: the first, and each that follows an accepted draft,
        up to the end of the request. An accepted draft's position counts as computed from here on,
        unless there are recurrent states: those behind the row's own part are not kept, so the next
        row computes the position again."""
        self.append_token(r, row.samples[0])
        for draft, token in zip(row.drafts, row.samples[1:], strict=False):
            if self.has_ended(r) or not self.is_accepted(r, draft):
                return
            self.count_accepted(r)
            self.append_token(r, token)

    def is_accepted(self, r: int, draft: int) -> bool:
        """S58: a draft is accepted if and only if it equals the token sampled at its position."""
        return self.requests[r].tokens[-1] == draft

    def has_ended(self, r: int) -> bool:
        return bool(self.finish_reason(r))

    def count_accepted(self, r: int) -> None:
        """Drafts do not count before this."""
        request = self.requests[r]
        count = 0 if self.scope.num_states else 1
        computed, dispatched = request.computed + count, request.dispatched + count
        self.update(r, computed=computed, dispatched=dispatched, total=request.total + 1)

    def append_token(self, r: int, token: int) -> None:
        self.update(r, tokens=(*self.requests[r].tokens, token))

    def finish_reason(self, r: int) -> str:
        """ "stop" takes precedence over "length"."""
        request = self.requests[r]
        if request.tokens[-1] == STOP:
            return "stop"
        return "length" if len(request.tokens) >= request.limit else ""

    def finish(self, r: int, reason: str) -> None:
        self.settle_charge(r)
        self.leave(r)
        self.update(r, reason=reason)
        self.mark_stale(r)
        self.release_if_drained(r)

    def leave(self, r: int) -> None:
        if r in self.running:
            self.leave_running(r)
        for queue in (self.waiting, self.paused, self.pending, self.queued):
            if r in queue:
                queue.remove(r)
        self.release_siblings(r)  # they must not wait for a leader that left
        self.take_turns(self.requests[r].owner)

    def release_if_drained(self, r: int) -> None:
        """S28: blocks that a step in flight refers to stay owned until that step settles."""
        if self.requests[r].in_flight == 0:
            self.release(r)

    def take_back_if_drained(self, r: int) -> None:
        if self.requests[r].in_flight == 0:
            self.take_back(r)

    # ------------------------------------------------------------------ the user
    def abort(self, r: int) -> None:
        if not self.requests[r].reason:
            self.finish(r, "abort")

    def pause(self, r: int) -> None:
        """A paused request holds no block once drained: it must not starve the others."""
        self.leave(r)
        self.paused.append(r)
        self.paused.sort()
        self.take_back_if_drained(r)

    def resume(self, r: int) -> None:
        self.paused.remove(r)
        self.join_waiting(r)

    # ------------------------------------------------------------------ reset of the cache
    def may_reset(self) -> bool:
        """The engine settles everything first: no step may settle after the reset."""
        return not self.flight

    def reset_cache(self) -> None:
        """S41: with nothing in flight, only running requests own blocks. All are released, so that
        nothing computed under other weights is read or published."""
        self.send_back_running()
        self.forget_cache()

    def send_back_running(self) -> None:
        for r in list(self.running):
            self.send_back(r)

    def forget_cache(self) -> None:
        self.reset_pool()

    # ------------------------------------------------------------------ failure
    def fail(self) -> None:
        """S37: partially updated state is not read. Every live request ends, and the pool is reset:
        blocks that the steps in flight wrote are never found again."""
        for r, request in enumerate(self.requests):
            if not request.reason or request.table:
                self.update(r, reason=request.reason or "error", table=(), states=())
        self.waiting, self.running, self.paused, self.pending = [], [], [], []
        self.queued, self.clock, self.shares = [], self.scope.credit, {}
        self.forget_flight()
        self.reset_pool()
        self.view, self.left, self.histories = {}, [], {}  # the runner resets as well
        self.state_view = {}

    def forget_flight(self) -> None:
        self.flight = []


# --------------------------------------------------------------------------- the interface
@cache
def machine_class(defects: frozenset[str]) -> type[Machine]:
    """The machine class, with the rules of these defects replaced."""
    if not defects:
        return Machine
    from .defects import DEFECTS

    return type("Broken", (*(DEFECTS[name].rule for name in sorted(defects)), Machine), {})


def machine(state: State, scope: Scope) -> Machine:
    return machine_class(scope.defects)(state, scope)


def initial(scope: Scope) -> State:
    count = scope.num_blocks
    empty = (EMPTY,) * scope.block_size
    free = tuple(reversed(range(count)))  # block 0 on top
    pool = ((0,) * count, (None,) * count, (), free, (), (empty,) * count)
    num = scope.num_states
    unused = tuple(reversed(range(num)))
    slots = Slots((0,) * num, (None,) * num, (), unused, (), (EMPTY,) * num)
    sent: dict[str, tuple[()]] = {"view": (), "left": (), "histories": (), "state_view": ()}
    turns: dict[str, tuple[()]] = {"queued": (), "shares": ()}
    return State(
        (), (), (), (), (), *pool, pending=(), slots=slots, clock=scope.credit, **sent, **turns
    )


def can_schedule(state: State, scope: Scope) -> bool:
    return len(state.flight) <= scope.depth and bool(state.running or state.waiting)


def plan(
    state: State, scope: Scope, budget: int = 0, offer: Drafts = (), wishes: Wishes = ()
) -> tuple[Plan, State]:
    """The plan of a state, and the state in which the plan is made but not dispatched."""
    m = machine(state, scope)
    made = m.schedule(budget, offer, wishes)
    return made, m.freeze()


def dispatch(planned: State, made: Plan, tokens: tuple[int, ...], scope: Scope) -> State:
    m = machine(planned, scope)
    m.dispatch(made, tokens)
    return m.freeze()


def settle_label(state: State) -> Settle:
    return Settle(tuple(token for row in state.flight[0] for token in row.samples))


def step(state: State, label: Label, scope: Scope) -> State:
    """Apply one named action. A Schedule whose plan has no row leaves the state unchanged."""
    if isinstance(label, Schedule):
        made, planned = plan(state, scope, *label[1:])
        return dispatch(planned, made, label.tokens, scope) if made.rows else state
    m = machine(state, scope)
    if isinstance(label, Add):
        m.add(label.template)
    elif isinstance(label, Settle):
        m.settle()
    elif isinstance(label, Abort):
        m.abort(label.request)
    elif isinstance(label, Pause):
        m.pause(label.request)
    elif isinstance(label, ResetCache):
        m.reset_cache()
    elif isinstance(label, Fail):
        m.fail()
    else:
        m.resume(label.request)
    return m.freeze()


def engine_actions(state: State, scope: Scope) -> Iterator[tuple[Label, State, Plan | None]]:
    if state.flight:
        label = settle_label(state)
        yield label, step(state, label, scope), None
    if can_schedule(state, scope):
        for budget in (0, *(b for b in scope.budgets if is_enough(b, state))):
            made, planned = plan(state, scope, budget)
            if made.rows:
                yield from schedules(made, planned, Schedule((), budget), scope)
                for label in drafting_labels(made, budget, scope):
                    drafted, planned = plan(state, scope, *label[1:])
                    # Otherwise it equals that of a shorter label. S63 examines cuts.
                    if is_carried(drafted, label) or scope.max_samples:
                        yield from schedules(drafted, planned, label, scope)


def schedules(
    made: Plan, planned: State, label: Schedule, scope: Scope
) -> Iterator[tuple[Label, State, Plan]]:
    """The plan's dispatch, for all possible samples."""
    num_samples = sum(row.num_samples for row in made.rows)
    for tokens in product(scope.outputs, repeat=num_samples):
        yield label._replace(tokens=tokens), dispatch(planned, made, tokens, scope), made


def offers(made: Plan, scope: Scope) -> Iterator[Drafts]:
    """All offers that drafters may make for the rows of a plan: any tokens, but at least one."""
    if not scope.max_drafts:
        return
    drafting = [row.request for row in made.rows if row.num_samples]
    lengths = range(scope.max_drafts + 1)
    some = [drafts for n in lengths for drafts in product(scope.outputs, repeat=n)]
    for chosen in product(some, repeat=len(drafting)):
        offer = tuple((r, drafts) for r, drafts in zip(drafting, chosen, strict=True) if drafts)
        if offer:
            yield offer


def drafting_labels(made: Plan, budget: int, scope: Scope) -> Iterator[Schedule]:
    """All offers and wishes for the rows of a plan, except for neither."""
    wishes = tuple(all_wishes(made, scope))
    for offer in ((), *offers(made, scope)):
        for chosen in ((), *wishes):
            if offer or chosen:
                yield Schedule((), budget, offer, chosen)


def is_carried(made: Plan, label: Schedule) -> bool:
    """Whether a plan has all draft tokens of the offer and all tokens of the wishes."""
    offer, wishes = dict(label.offer), dict(label.wishes)
    return all(
        row.drafts == offer.get(row.request, ()) and row.wanted == wishes.get(row.request, 0)
        for row in made.rows
    )


def all_wishes(made: Plan, scope: Scope) -> Iterator[Wishes]:
    """All numbers of tokens that may be drafted behind the rows of a plan, at least one token."""
    if not scope.max_wanted:
        return
    rows = [row.request for row in made.rows]
    for chosen in product(range(scope.max_wanted + 1), repeat=len(rows)):
        wishes = tuple((r, wanted) for r, wanted in zip(rows, chosen, strict=True) if wanted)
        if wishes:
            yield wishes


def is_enough(budget: int, state: State) -> bool:
    """Each running request could have a token: a decode always has one (L6), and the oldest prompt
    advances next to any number of decodes (L4)."""
    return budget >= max(1, len(state.running))


def user_actions(state: State, scope: Scope) -> Iterator[tuple[Label, State, None]]:
    labels: list[Label] = []
    room = scope.num_requests - len(state.requests)
    labels += [Add(len(state.requests), t) for t in scope.templates if t.n <= room]
    if scope.abort:
        labels += [Abort(r) for r in range(len(state.requests))]
    if scope.pause:
        labels += [
            Pause(r) for r in (*state.waiting, *state.running, *state.pending, *state.queued)
        ]
        labels += [Resume(r) for r in state.paused]
    if scope.reset and machine(state, scope).may_reset():
        labels.append(ResetCache())
    if scope.fail:
        labels.append(Fail())
    for label in labels:
        yield label, step(state, label, scope), None


def actions(state: State, scope: Scope) -> Iterator[tuple[Label, State]]:
    """Every enabled action with its successor state."""
    for label, successor, _ in engine_actions(state, scope):
        yield label, successor
    for label, successor, _ in user_actions(state, scope):
        yield label, successor
