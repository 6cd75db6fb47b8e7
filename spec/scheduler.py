"""The scheduler: one deterministic walk over all requests, in rank order, makes a plan."""

from __future__ import annotations

from .pool import ceil_div
from .shares import Shares
from .state import Drafts, Plan, PlanRow, Request, Wishes


class Scheduler(Shares):
    # ------------------------------------------------------------------ the walk
    def schedule(self, budget: int = 0, offer: Drafts = (), wishes: Wishes = ()) -> Plan:
        """Decide one step of at most ``budget`` tokens (0: the scope's), with draft tokens of
        ``offer`` and tokens to draft of ``wishes`` if they fit. Mutates pool, tables and counters;
        contents and flight change only in ``dispatch``. The fields set here are used for this plan
        only."""
        budget = budget or self.scope.budget
        self.budget_left = budget
        self.rows: list[PlanRow] = []
        self.preempted: list[int] = []
        self.preempted_for: list[int] = []
        self.admitted: list[tuple[int, tuple[int, ...]]] = []
        self.held: list[int] = []
        self.displaced_ones: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.forked: list[tuple[int, int]] = []
        self.refused: list[tuple[int, str]] = []
        self.closed_by: int | None = None
        self.admission_open = True
        known = {r: len(self.requests[r].table) for r in self.running}
        known_states = {r: len(self.requests[r].states) for r in self.running}
        self.to_come = self.walk_order(self.running)
        candidates = self.walk_order(self.waiting)
        self.new_turns = []
        while self.to_come or candidates:
            if candidates and (not self.to_come or self.is_older(candidates[0], self.to_come[0])):
                waiter = candidates.pop(0)
                if self.admit(waiter):
                    self.serve(waiter)
                    for r in self.new_turns:  # the owner's next request, whose turn begins now
                        self.enter(candidates, r)
                    self.new_turns = []
                else:
                    self.admission_open = False
            else:
                self.serve(self.to_come.pop(0))
        if offer:
            self.draft(dict(offer))
        if wishes:
            self.want(dict(wishes))
        return Plan(
            tuple(self.rows),
            tuple(self.preempted),
            tuple(self.preempted_for),
            tuple(self.admitted),
            tuple(self.held),
            self.closed_by,
            self.whole_tables(),
            self.growth(known),
            tuple(sorted(self.left)),
            self.history_before(),
            tuple(self.copies),
            tuple(self.forked),
            tuple(self.refused),
            self.whole_state_tables(),
            self.growth_of_states(known_states),
            budget,
            tuple(self.displaced_ones),
        )

    # ------------------------------------------------------------------ drafts
    def draft(self, offer: dict[int, tuple[int, ...]]) -> None:
        """S56: after the walk, rows that may carry drafts get them, within the remaining budget
        and from blocks that no request needs."""
        offered = [offer.get(row.request, ())[: self.draft_room(row)] for row in self.rows]
        lengths = self.shares_of_drafts([len(drafts) for drafts in offered])
        for i, row in enumerate(self.rows):
            drafts = offered[i][: lengths[i]]
            wanted = ceil_div(row.end + len(drafts), self.block_size)
            wanted -= len(self.requests[row.request].table)
            if drafts and wanted > 0 and self.may_take_for_drafts():
                self.allocate(row.request, min(wanted, self.num_available()))
            slots = len(self.requests[row.request].table) * self.block_size
            drafts = drafts[: max(0, slots - row.end)]
            self.rows[i] = row._replace(num_samples=row.num_samples + len(drafts), drafts=drafts)
            self.budget_left -= len(drafts)

    def draft_room(self, row: PlanRow) -> int:
        """Maximum number of draft tokens of a row. Only a row that samples after settled tokens has
        drafts (S56). A sample after the last draft may not exceed the request's maximum length."""
        request = self.requests[row.request]
        if not (row.num_samples and self.follows_settled(row)):
            return 0
        room = request.limit - 1 - row.end
        return max(0, min(self.scope.max_drafts, room))

    def num_drafts_left(self) -> int:
        """How many draft tokens the step may have."""
        num_left = self.budget_left
        if self.scope.max_samples:
            num_samples = sum(row.num_samples for row in self.rows)
            num_left = min(num_left, self.scope.max_samples - num_samples)
        return max(0, num_left)

    def shares_of_drafts(self, wanted: list[int]) -> list[int]:
        """S63: if the step has too little room, each row in turn, oldest first, gets one more draft
        token, until none is left."""
        lengths, num_left = [0] * len(wanted), self.num_drafts_left()
        for length in range(max(wanted, default=0)):
            for i, most in enumerate(wanted):
                if most > length and num_left:
                    lengths[i] += 1
                    num_left -= 1
        return lengths

    def follows_settled(self, row: PlanRow) -> bool:
        return row.start + row.n == len(self.requests[row.request].tokens)

    def want(self, wishes: dict[int, int]) -> None:
        """S56, S64: after the drafts of all rows, numbers of tokens that the runner drafts behind
        rows. Drafting writes positions behind the row, so it gets slots in blocks that no request
        needs."""
        for i, row in enumerate(self.rows):
            wanted = min(wishes.get(row.request, 0), self.want_room(row))
            blocks = ceil_div(row.end + wanted, self.block_size)
            blocks -= len(self.requests[row.request].table)
            if wanted and blocks > 0 and self.may_take_for_drafts():
                self.allocate(row.request, min(blocks, self.num_available()))
            self.rows[i] = row._replace(wanted=max(0, min(wanted, self.num_slots_behind(row))))

    def want_room(self, row: PlanRow) -> int:
        """Maximum number of tokens to draft behind a row. They follow its sample. The next row
        samples once more after them, and that sample may not exceed the maximum length."""
        if not row.num_samples:
            return 0
        room = self.requests[row.request].limit - 2 - row.end
        return max(0, min(self.scope.max_wanted, room))

    def num_slots_behind(self, row: PlanRow) -> int:
        """Slots of the request behind the positions that its row computes."""
        return len(self.requests[row.request].table) * self.block_size - row.end

    def may_take_for_drafts(self) -> bool:
        return self.closed_by is None and not self.preempted

    # ------------------------------------------------------------------ the runner's part of a plan
    def whole_tables(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """S32: the table of each request admitted in this step, hits and new blocks alike."""
        return tuple((r, self.requests[r].table) for r, _ in self.admitted)

    def growth(self, known: dict[int, int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """S32: blocks added to the tables of other rows. ``known``: the lengths before."""
        grown = ((row.request, known.get(row.request)) for row in self.rows)
        return tuple(
            (r, self.requests[r].table[length:])
            for r, length in grown
            if length is not None and len(self.requests[r].table) > length
        )

    def whole_state_tables(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """S51: like ``whole_tables``."""
        if not self.scope.num_states:
            return ()
        return tuple((r, self.requests[r].states) for r, _ in self.admitted)

    def growth_of_states(self, known: dict[int, int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """S51: like ``growth``."""
        grown = ((row.request, known.get(row.request)) for row in self.rows)
        return tuple(
            (r, self.requests[r].states[length:])
            for r, length in grown
            if length is not None and len(self.requests[r].states) > length
        )

    def history_before(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """S39: the tokens that an admitted request with a history does not compute; all settled."""
        starts = {row.request: row.start for row in self.rows}
        return tuple(
            (r, self.requests[r].tokens[: starts[r]])
            for r, _ in self.admitted
            if self.requests[r].needs_history and r in starts
        )

    def leave_running(self, r: int) -> None:
        self.running.remove(r)
        self.left.append(r)

    def walk_order(self, queue: list[int]) -> list[int]:
        return list(queue)

    def is_older(self, a: int, b: int) -> bool:
        return self.requests[a].rank < self.requests[b].rank

    def close(self, r: int) -> None:
        """From here on, no request younger than r allocates a block in this step."""
        if self.closed_by is None:
            self.closed_by = r

    def refuse(self, r: int, reason: str) -> None:
        """Record why r has no row."""
        self.refused.append((r, reason))

    # ------------------------------------------------------------------ budget
    def num_wanted(self, r: int) -> int:
        request = self.requests[r]
        if request.total >= request.limit:  # its last token is being sampled: nothing follows
            return 0
        return 0 if self.must_settle(r) else request.total - request.dispatched

    def must_settle(self, r: int) -> bool:
        """S42: the token to compute is still being sampled."""
        request = self.requests[r]
        is_settled_only = request.settled_only or self.has_drafts_in_flight(r)
        return is_settled_only and request.total > len(request.tokens)

    def has_drafts_in_flight(self, r: int) -> bool:
        """Its next row starts where the accepted drafts end, which the settle decides."""
        return any(row.request == r and row.drafts for step in self.flight for row in step)

    def num_reserved(self) -> int:
        """One token for each decode that comes later in this walk (L6)."""
        return sum(self.is_decode(r) for r in self.to_come)

    def is_decode(self, r: int) -> bool:
        """Whether one token is reserved for the request. With recurrent states a decode may have
        several tokens to compute: those of accepted drafts, and the last one."""
        wanted = self.num_wanted(r)
        return wanted == 1 or (wanted > 1 and self.computes_again(self.requests[r]))

    def computes_again(self, request: Request) -> bool:
        """Whether the request is past its prompt, in a model where accepted drafts are computed
        again."""
        drafts_again = bool(self.scope.num_states and self.scope.max_drafts)
        return drafts_again and request.dispatched >= request.num_prompt

    def within_budget(self, wanted: int) -> int:
        if wanted == 1 and self.budget_left > 0:
            return 1
        return min(wanted, self.budget_left - self.num_reserved())

    def is_sampled(self, request: Request, start: int, n: int) -> bool:
        """S19"""
        return start + n == request.total

    # ------------------------------------------------------------------ serving a running request
    def serve(self, r: int) -> None:
        if r in self.held:
            self.refuse(r, "held")
            return
        request = self.requests[r]
        wanted = self.within_budget(self.num_wanted(r))
        if wanted <= 0:
            self.refuse(r, self.reason_for_none(r))
            return
        n = self.fit(r, wanted)
        if n <= 0:
            self.refuse(r, "blocks" if self.closed_by == r else "closed")
            return
        blocks = ceil_div(request.dispatched + n, self.block_size)
        self.allocate(r, blocks - len(request.table))
        self.grow_states(r, request.dispatched + n)
        self.add_row(r, n)

    def reason_for_none(self, r: int) -> str:
        request = self.requests[r]
        if self.num_wanted(r):
            return "budget"
        return "ending" if request.total >= request.limit else "unsettled"

    def fit(self, r: int, wanted: int) -> int:
        """How many of the wanted tokens have a slot or can get one."""
        request = self.requests[r]
        slots = len(request.table) * self.block_size - request.dispatched
        if wanted <= slots:
            return wanted
        if self.closed_by is not None:
            return slots
        n = min(wanted, slots + self.num_available() * self.block_size)
        if n == 0 and self.make_room(r, 1, ()):
            n = min(wanted, self.num_available() * self.block_size)
        if n < wanted:
            self.close(r)
        return n

    def add_row(self, r: int, n: int) -> None:
        request = self.requests[r]
        sampled = self.is_sampled(request, request.dispatched, n)
        self.rows.append(PlanRow(r, request.dispatched, n, int(sampled)))
        self.budget_left -= n
        self.update(r, dispatched=request.dispatched + n, total=request.total + sampled)

    # ------------------------------------------------------------------ admission
    def may_admit(self, r: int) -> bool:
        return not self.obstacle(r)

    def obstacle(self, r: int) -> str:
        """No waiting request overtakes an older one that was refused. None is admitted after a
        preemption or a shortage of blocks. A resumed request must drain first."""
        if not self.admission_open:
            return "behind"
        if self.closed_by is not None:
            return "closed"
        if self.preempted:
            return "preempting"
        if self.is_full() and self.displaced(r) is None:
            return "full"
        if self.requests[r].in_flight:
            return "draining"
        return "" if self.budget_left - self.num_reserved() >= 1 else "budget"

    def admit(self, r: int) -> bool:
        if not self.may_admit(r):
            self.refuse(r, self.obstacle(r))
            return False
        request = self.requests[r]
        displaced = self.displaced(r) if self.is_full() else None
        hits = self.look_up(r)
        if not self.has_slot_beside(r, hits):
            self.refuse(r, "state slots")
            return False
        length = len(hits) * self.block_size
        source = self.find_source(r, length)
        if source is not None:
            length, table = self.num_shared(request), self.requests[source].table
            hits = table[: length // self.block_size]
            partly_filled = table[len(hits) : ceil_div(length, self.block_size)]
        # All its present tokens must fit, although blocks are allocated on demand: otherwise it
        # would be admitted and then stop half-way.
        needed = ceil_div(len(request.tokens), self.block_size) - len(hits)
        shortage = needed - (self.num_available() - sum(b in self.lru for b in hits))
        if (shortage > 0 or displaced is not None) and not self.make_room(
            r, shortage, hits, displaced
        ):
            self.close(r)
            self.refuse(r, "blocks" if shortage > 0 else "full")
            return False
        self.acquire(r, hits)
        if source is not None:
            self.fork(r, source, partly_filled)
        self.update(r, computed=length, dispatched=length, published=len(hits))
        self.enter(self.running, r)
        self.note_admission(r)
        self.waiting.remove(r)
        self.take_turns(request.owner)
        self.admitted.append((r, hits))
        return True

    def is_full(self) -> bool:
        return len(self.running) >= self.scope.cap

    def displaced(self, r: int) -> int | None:
        """Under "fair", the running request whose place r may take when all places are taken: the
        youngest of another owner, if it is younger than r."""
        if not self.is_fair:
            return None
        return next((v for v in self.victim_order(r) if self.may_displace(r, v)), None)

    def may_displace(self, r: int, victim: int) -> bool:
        return self.requests[victim].owner != self.requests[r].owner

    # ------------------------------------------------------------------ siblings
    def group(self, r: int) -> int:
        """The leader of r's group, or r itself if it is not a sibling."""
        leader = self.requests[r].leader
        return r if leader < 0 else leader

    def num_shared(self, request: Request) -> int:
        """Tokens that siblings share: all of the prompt but the last, which each computes."""
        return request.num_prompt - 1

    def has_shared(self, request: Request) -> bool:
        return request.computed >= self.num_shared(request)

    def may_give(self, r: int, other: int) -> bool:
        """Only an older request is a source: the admission of r preempts only younger ones."""
        return self.is_older(other, r)

    def find_source(self, r: int, length: int) -> int | None:
        """The oldest running request of r's group that has settled the shared tokens, if they are
        more than the ``length`` tokens that r finds in the cache. None with recurrent states, which
        are not copied."""
        request = self.requests[r]
        if self.scope.num_states or not request.reads_cache or self.num_shared(request) <= length:
            return None
        for other in self.running:
            if (
                self.group(other) == self.group(r)
                and self.may_give(r, other)
                and self.has_shared(self.requests[other])
            ):
                return other
        return None

    def fork(self, r: int, source: int, partly_filled: tuple[int, ...]) -> None:
        """S33: whole blocks are shared; a partly filled one is copied to a block of r."""
        self.forked.append((r, source))
        for block in partly_filled:
            self.allocate(r, 1)
            self.copies.append((block, self.requests[r].table[-1]))

    # ------------------------------------------------------------------ preemption
    def make_room(
        self, preemptor: int, shortage: int, hits: tuple[int, ...], displaced: int | None = None
    ) -> bool:
        """Preempt ``displaced``, and younger running requests until ``shortage`` more blocks are
        available, or preempt none. Victims with a step in flight are held instead: they drain
        while the preemptor waits."""
        chosen = self.choose_victims(preemptor, shortage, hits, displaced)
        if not chosen:
            return False
        if any(self.requests[v].in_flight for v in chosen):
            self.held += chosen
            return False
        self.displaced_ones += [v for v in chosen if v == displaced]
        for victim in chosen:
            self.preempt(victim)
            self.preempted_for.append(preemptor)
        return True

    def victim_order(self, preemptor: int) -> list[int]:
        """L3: only younger requests, the youngest first."""
        return [v for v in reversed(self.running) if self.is_older(preemptor, v)]

    def choose_victims(
        self, preemptor: int, shortage: int, hits: tuple[int, ...], displaced: int | None = None
    ) -> list[int]:
        refs, gained, chosen = list(self.refs), set(), []
        order = self.victim_order(preemptor)
        if displaced is not None:
            order = [displaced, *(v for v in order if v != displaced)]
        for victim in order:
            chosen.append(victim)
            for block in self.requests[victim].table:
                refs[block] -= 1
                if refs[block] == 0 and block not in hits:
                    gained.add(block)
            if len(gained) >= shortage:
                useful = self.useful(chosen, gained)
                return [v for v in chosen if v in useful or v == displaced]
        return []

    def useful(self, chosen: list[int], gained: set[int]) -> list[int]:
        """S21: a request that frees no block is not preempted."""
        return [v for v in chosen if gained.intersection(self.requests[v].table)]

    def preempt(self, victim: int) -> None:
        self.send_back(victim)
        if victim in self.to_come:
            self.to_come.remove(victim)
        self.preempted.append(victim)

    def send_back(self, r: int) -> None:
        """S20: from running to waiting, at its rank, with nothing computed."""
        self.take_back(r)
        self.leave_running(r)
        self.enter(self.waiting, r)

    def take_back(self, r: int) -> None:
        """Release all its blocks. It keeps tokens, rank and seed, and recomputes the rest."""
        self.release(r)
        request = self.requests[r]
        self.update(r, computed=0, dispatched=0, published=0, total=len(request.tokens))
        self.mark_stale(r)

    def mark_stale(self, r: int) -> None:
        """History for S29: results in flight for r no longer belong to r."""
        self.flight = [
            tuple(row._replace(stale=True) if row.request == r else row for row in step)
            for step in self.flight
        ]
