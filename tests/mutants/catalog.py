"""Named mutants: the real bugs of docs/real_bugs.md as small patches of our own code.

Each replaces one text that occurs exactly once in one file. `row` is the row there; every row has
a mutant.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCKS = "engine/block_manager.py"
_PLANNER = "engine/planner.py"
_SCHEDULER = "engine/scheduler.py"
_PLAN = "engine/plan.py"
_QUEUES = "engine/queues.py"
_VICTIMS = "engine/preemption.py"
_REQUEST = "engine/request.py"
_CORE = "engine/core.py"
_SIBLINGS = "engine/siblings.py"
_ROW_TOKENS = "engine/row_tokens.py"
_STATES = "engine/state_slots.py"
_SHARES = "engine/shares.py"
_SEGMENTS = "engine/segments.py"
_RING = "runner/pinned_ring.py"


@dataclass(frozen=True)
class Mutant:
    row: int
    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(1, "evicted block keeps its index entry", _BLOCKS, "        del self.index[key]\n", ""),
    Mutant(
        2,
        "hit covers the whole prompt",
        _BLOCKS,
        "(len(request.token_ids) - 1) // self.block_size",
        "len(request.token_ids) // self.block_size",
    ),
    Mutant(
        3,
        "whoever has outputs is taken for decoding",
        _PLANNER,
        "is_sampled = start + num_tokens == request.num_total\n",
        "is_sampled = (\n            start + num_tokens == request.num_total\n"
        "            or len(request.token_ids) > request.num_prompt_tokens\n        )\n",
    ),
    Mutant(
        4,
        "published before settled",
        _BLOCKS,
        "num_full_blocks = request.num_computed // self.block_size",
        "num_full_blocks = request.num_dispatched // self.block_size",
    ),
    Mutant(
        5,
        "dispatched count not set to the hits",
        _QUEUES,
        "request.num_computed = request.num_dispatched = num_tokens",
        "request.num_computed = num_tokens",
    ),
    Mutant(
        6,
        "blocks for the whole sequence, not for computed + scheduled",
        _PLANNER,
        "blocks.num_blocks_for(request.num_dispatched + num_tokens)",
        "blocks.num_blocks_for(request.num_total)",
    ),
    Mutant(
        7,
        "a token is sampled at a chunk boundary",
        _PLANNER,
        "is_sampled = start + num_tokens == request.num_total\n",
        "is_sampled = start + num_tokens == request.num_total or num_tokens > 3\n",
    ),
    Mutant(
        8,
        "the chain of keys forgets its parent when it grows",
        _BLOCKS,
        "parent = keys[-1][0] if keys else root_key(request.cache_salt)",
        "parent = root_key(request.cache_salt)",
    ),
    Mutant(9, "position off by one", _PLANNER, "add_start(start)", "add_start(start + 1)"),
    Mutant(
        10,
        "a request that can never fit is admitted",
        _SCHEDULER,
        "if num_blocks > self.blocks.num_blocks:",
        "if num_blocks > self.blocks.num_blocks + 1:",
    ),
    Mutant(
        11,
        "equal blocks overwrite one index entry",
        _BLOCKS,
        "            if key not in self.index:\n",
        "            if True:\n",
    ),
    Mutant(
        12,
        "one block too many at an exact multiple",
        _BLOCKS,
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size + 1",
    ),
    Mutant(
        13,
        "only the root of a hit chain is counted",
        _BLOCKS,
        "        for block in hits:\n            if ref_counts",
        "        for block in hits[:1]:\n            if ref_counts",
    ),
    Mutant(
        14,
        "the last block of a hit chain is not counted",
        _BLOCKS,
        "        for block in hits:\n            if ref_counts",
        "        for block in hits[:-1]:\n            if ref_counts",
    ),
    Mutant(
        15,
        "a request keeps a view of its caller's list",
        _REQUEST,
        "self.token_ids = list(prompt_token_ids)",
        "self.token_ids = prompt_token_ids",
    ),
    Mutant(
        16,
        "blocks taken for tokens",
        _PLANNER,
        "return num_taken * blocks.block_size",
        "return num_taken",
    ),
    Mutant(
        17,
        "a block with one owner left goes to the free list",
        _BLOCKS,
        "            ref_counts[block] -= 1\n            if ref_counts[block] == 0:",
        "            ref_counts[block] -= 1\n            if ref_counts[block] <= 1:",
    ),
    Mutant(
        18,
        "a staging buffer is used again while the device may still read it",
        _RING,
        "            event.synchronize()\n",
        "            pass\n",
    ),
    Mutant(
        19,
        "the token budget is never used up",
        _PLANNER,
        "self._num_extra_tokens += num_tokens - 1",
        "pass",
    ),
    Mutant(
        19,
        "a token is delivered twice",
        _SCHEDULER,
        "            if token is not None:\n                request.token_ids.append(token)\n",
        "            if token is not None:\n                request.token_ids += [token, token]\n",
    ),
    Mutant(
        20,
        "an allocation touches blocks before it fails",
        _BLOCKS,
        "        if num_new_blocks > self.num_available_blocks:\n",
        "        if num_new_blocks > self.num_available_blocks:\n"
        "            if self.free_blocks:\n"
        "                self.ref_counts[self.free_blocks.pop()] = 1\n",
    ),
    Mutant(
        21,
        "acquired hits can still be evicted",
        _BLOCKS,
        "            if ref_counts[block] == 0:\n                del lru[block]\n",
        "",
    ),
    Mutant(
        22,
        "an owner that leaves un-caches a block others share",
        _BLOCKS,
        "            ref_counts[block] -= 1\n",
        "            ref_counts[block] -= 1\n"
        "            if ref_counts[block]:\n"
        "                self.index.pop(keys[block] or b'', None)\n",
    ),
    Mutant(
        23,
        "an evicted block keeps its key",
        _BLOCKS,
        "        del self.index[key]\n        self.keys[block] = None\n",
        "        del self.index[key]\n",
    ),
    Mutant(
        24,
        "the last chunk of k blocks is not sampled",
        _PLANNER,
        "is_sampled = start + num_tokens == request.num_total\n",
        "is_sampled = start + num_tokens == request.num_total and (\n"
        "            num_tokens == 1 or request.num_total % self._blocks.block_size\n        )\n",
    ),
    Mutant(
        25,
        "a victim stays in the plan",
        _PLANNER,
        "            elif request.state is RequestState.RUNNING and request not in held:\n",
        "            elif request not in held:\n",
    ),
    Mutant(
        25,
        "the eldest is preempted first",
        _VICTIMS,
        "    younger = (v for v in reversed(running) if v is not displaced)\n",
        "    younger = (v for v in running if v is not displaced and v.rank > asker.rank)\n",
    ),
    Mutant(
        26,
        "removal takes the neighbour",
        _QUEUES,
        "del queue[bisect_left(queue, request.rank, key=by_rank)]",
        "del queue[bisect_left(queue, request.rank, key=by_rank) - 1]",
    ),
    Mutant(
        27,
        "a preempted request goes to the back of the queue",
        _QUEUES,
        "        request.num_preemptions += 1\n        self._wait(request)",
        "        request.num_preemptions += 1\n        self._wait(request)\n"
        "        self.waiting.remove(request)\n        self.waiting.append(request)",
    ),
    Mutant(
        28,
        "a block enters the free list twice",
        _BLOCKS,
        "                    self.free_blocks.append(block)\n",
        "                    self.free_blocks += [block, block]\n",
    ),
    Mutant(
        29,
        "blocks are freed while a step in flight writes them",
        _QUEUES,
        "            self.draining.add(request)\n        else:\n",
        "            self.draining.add(request)\n        if True:\n",
    ),
    Mutant(
        30,
        "a victim in flight is preempted at once",
        _PLANNER,
        "if any(victim.num_in_flight for victim in victims):",
        "if False:",
    ),
    Mutant(
        31,
        "victims that free nothing are preempted too",
        _VICTIMS,
        "v is displaced or any(num_refs[block] == 0 for block in v.block_table)",
        "True",
    ),
    Mutant(
        32,
        "a paused request keeps its blocks",
        _QUEUES,
        "        else:\n            self._give_back(request)\n",
        "        elif state is not RequestState.PAUSED:\n            self._give_back(request)\n",
    ),
    Mutant(
        33,
        "admission stops one short of the cap",
        _PLANNER,
        "len(self._running) >= self._max_num_seqs",
        "len(self._running) >= self._max_num_seqs - 1",
    ),
    Mutant(
        33,
        "a younger request takes blocks its elder wanted",
        _PLANNER,
        "        if num_taken < num_wanted:\n            self._is_closed = True\n",
        "",
    ),
    Mutant(
        34,
        "the key ignores the salt",
        _BLOCKS,
        'b"pagespec prefix root:" + cache_salt',
        'b"pagespec prefix root:"',
    ),
    Mutant(
        35,
        "the key sees the low byte of a token",
        _BLOCKS,
        'tokens = array("i", token_ids).tobytes()',
        'tokens = array("i", [t & 255 for t in token_ids]).tobytes()',
    ),
    Mutant(
        36,
        "a released cached block is in no queue",
        _BLOCKS,
        "                    self.lru_blocks[block] = None\n",
        "                    pass\n",
    ),
    Mutant(
        37,
        "the result of a step reaches a request that ended",
        _SCHEDULER,
        "        if request.state is not RequestState.FINISHED:\n            if token",
        "        if True:\n            if token",
    ),
    Mutant(
        38,
        "cached before its last owner let go",
        _BLOCKS,
        "            ref_counts[block] -= 1\n            if ref_counts[block] == 0:",
        "            if ref_counts[block] > 1:\n                ref_counts[block] -= 1\n"
        "            if ref_counts[block] <= 1:",
    ),
    Mutant(
        39,
        "a partial chunk is not counted as computed",
        _SCHEDULER,
        "        request.num_computed += num_tokens\n",
        "        request.num_computed += num_tokens if token is not None else num_tokens - 1\n",
    ),
    Mutant(
        40,
        "the cap limits a step and not the running set",
        _PLANNER,
        "len(self._running) >= self._max_num_seqs",
        "len(self._requests) >= self._max_num_seqs",
    ),
    # Row 0: found in this project; what a plan tells the runner (S32).
    Mutant(
        0,
        "hits are lost when an admitted row grows by one block",
        _PLANNER,
        "            tables[row] = tuple(request.block_table)\n"
        "            self._new_blocks.pop(row, None)\n",
        "            table = tuple(request.block_table)\n"
        "            added = self._new_blocks.pop(row, ())\n"
        "            tables[row] = added if len(added) == 1 else table\n",
    ),
    Mutant(
        0,
        "an admitted row is told its hits and then its growth as if it were known",
        _PLANNER,
        "            self._new_blocks.pop(row, None)\n",
        "",
    ),
    Mutant(
        0,
        "a plan keeps the live block table",
        _PLANNER,
        "            tables[row] = tuple(request.block_table)\n",
        "            tables[row] = request.block_table\n",
    ),
    Mutant(
        0,
        "the runner is not told who was paused",
        _QUEUES,
        "        if queue is self.running:\n",
        "        if queue is self.running and state is not RequestState.PAUSED:\n",
    ),
    Mutant(
        0,
        "who left is told in one plan more",
        _SCHEDULER,
        "            self.queues.released.clear()\n",
        "            del self.queues.released[:-1]\n",
    ),
    Mutant(
        0,
        "a token in flight is looked up in the oldest step",
        _ROW_TOKENS,
        "_places_in_flight(reversed(in_flight))",
        "_places_in_flight(in_flight)",
    ),
    Mutant(
        0,
        "a row is taken for its place among the sampled",
        _PLANNER,
        "feeds_itself = age == 0 and plan.is_decode_only and is_usual\n",
        "feeds_itself = age == 0 and is_usual\n",
    ),
    Mutant(
        0,
        "a place among the running ones is kept while victims leave from before it",
        _PLANNER,
        "                    position = bisect_left(running, head.rank, key=by_rank)\n",
        "                    position = min(end, len(running))\n",
    ),
    # Row 0, too: a request that does not read the cache (S38), and one whose history is told (S39).
    Mutant(
        0,
        "a request that is not to read the cache reads it",
        _BLOCKS,
        "if not (self.enable_prefix_caching and request.reads_cache):",
        "if not self.enable_prefix_caching:",
    ),
    Mutant(
        0,
        "a request that came back reads the cache",
        _BLOCKS,
        "(self.enable_prefix_caching and request.reads_cache):",
        "(self.enable_prefix_caching and (request.reads_cache or request.num_admissions)):",
    ),
    Mutant(
        0,
        "a request that does not read the cache does not publish either",
        _BLOCKS,
        "        if self.enable_prefix_caching:\n            self._publish_blocks(request)\n",
        "        if self.enable_prefix_caching and request.reads_cache:\n"
        "            self._publish_blocks(request)\n",
    ),
    Mutant(
        0,
        "a history ends with the prompt",
        _PLANNER,
        "request.token_ids[: self._starts[row]]",
        "request.token_ids[: min(self._starts[row], request.num_prompt_tokens)]",
    ),
    Mutant(
        0,
        "a history is told at the first admission only",
        _PLANNER,
        "            if request.info.needs_history:\n",
        "            if request.info.needs_history and request.num_admissions == 1:\n",
    ),
    Mutant(
        0,
        "no history is told where nothing was cached",
        _PLANNER,
        "            if request.info.needs_history:\n",
        "            if request.info.needs_history and self._starts[row]:\n",
    ),
    # Row 0, too: settled-only requests (S42).
    Mutant(
        0,
        "an unsettled token of a settled-only request is computed",
        _PLANNER,
        "not (held or (request.settled_only and total != len(request.token_ids)))",
        "not held",
    ),
    Mutant(
        0,
        "a token of the budget is kept for who has to settle first",
        _PLANNER,
        "            and not other.must_settle\n",
        "",
    ),
    # Row 0, too: siblings that share a prompt (S33, S40).
    Mutant(
        0,
        "a copy is not told",
        _PLANNER,
        "            self._copies.append((source.block_table[len(hits)], copy))\n",
        "",
    ),
    Mutant(
        0,
        "a copy goes the wrong way",
        _PLANNER,
        "self._copies.append((source.block_table[len(hits)], copy))",
        "self._copies.append((copy, source.block_table[len(hits)]))",
    ),
    Mutant(
        0,
        "a block that is filled in part is shared",
        _PLANNER,
        "            hits = source.block_table[: num_tokens // blocks.block_size]\n",
        "            hits = source.block_table[: blocks.num_blocks_for(num_tokens)]\n",
    ),
    Mutant(
        0,
        "a sibling takes the whole prompt for computed",
        _REQUEST,
        "return self.num_prompt_tokens - 1",
        "return self.num_prompt_tokens",
    ),
    Mutant(
        0,
        "a sibling takes what is in flight for computed",
        _SIBLINGS,
        "if is_alike and other.num_computed >= num_shared:",
        "if is_alike and other.num_dispatched >= num_shared:",
    ),
    Mutant(
        0,
        "a request shares blocks of a younger one, which it may preempt",
        _PLANNER,
        "find_source(self._running[:position], request, num_tokens)",
        "find_source(self._running, request, num_tokens)",
    ),
    Mutant(
        0,
        "a prompt is shared with the siblings of another",
        _SIBLINGS,
        "is_alike = other is request.leader or other.leader is request.leader",
        "is_alike = True",
    ),
    Mutant(
        0,
        "siblings wait for a leader that was given up",
        _QUEUES,
        "        self.let_siblings_wait(request)\n\n    def end_drain",
        "\n    def end_drain",
    ),
    Mutant(
        0,
        "siblings are let go before the prompt has settled",
        _SCHEDULER,
        "if self.queues.pending and request.num_computed >= request.num_prompt_tokens:",
        "if self.queues.pending:",
    ),
    Mutant(
        0,
        "a prompt of one token is not seen to be computed",
        _QUEUES,
        "if request.on_token is None and request not in self.pending:",
        "if request.on_token is None:",
    ),
    Mutant(
        0,
        "a sibling that is given up is let go by its leader",
        _QUEUES,
        "            siblings.remove(request)\n",
        "            pass\n",
    ),
    Mutant(
        0,
        "siblings go behind whoever waits",
        _QUEUES,
        "            self._join_waiting(sibling)\n",
        "            self._join_waiting(sibling)\n"
        "            if sibling in self.waiting:\n"
        "                self.waiting.remove(sibling)\n"
        "                self.waiting.append(sibling)\n",
    ),
    Mutant(
        0,
        "siblings forget the salt",
        _REQUEST,
        "            cache_salt=info.cache_salt,\n",
        "",
    ),
    # Row 0, too: the prefix cache is reset while requests are served (S41).
    Mutant(
        0,
        "a reset leaves the prefix cache",
        _SCHEDULER,
        "            self.queues.preempt(request)\n        self.blocks.reset()\n",
        "            self.queues.preempt(request)\n",
    ),
    Mutant(
        0,
        "a reset leaves running requests what they have computed",
        _SCHEDULER,
        "            self.queues.preempt(request)\n        self.blocks.reset()\n",
        "            pass\n        blocks = self.blocks\n        blocks.index.clear()\n"
        "        blocks.keys = [None] * blocks.num_blocks\n"
        "        blocks.free_blocks += blocks.lru_blocks\n        blocks.lru_blocks.clear()\n",
    ),
    Mutant(
        0,
        "a reset does not wait for the steps in flight",
        _SCHEDULER,
        '            raise RuntimeError(f"{len(self.in_flight)} steps are in flight; '
        'commit them first")\n',
        "            self.in_flight.clear()\n",
    ),
    Mutant(
        0,
        "a reset does not settle the steps in flight",
        _CORE,
        "        finished = self._settle()\n",
        "        finished: list[Request] = []\n",
    ),
    # Row 0, too: state slots (S43 to S52).
    Mutant(
        0,
        "a state is given up while the step behind it is in flight",
        _STATES,
        "end = (request.num_computed - 1) // self.interval",
        "end = (request.num_dispatched - 1) // self.interval",
    ),
    Mutant(
        0,
        "a state takes another slot where there is none",
        _STATES,
        "has_own = bool(table) and self.keys[table[-1]] is None",
        "has_own = bool(table) and not self.enable_prefix_caching",
    ),
    Mutant(
        0,
        "the newest checkpoint is evicted first",
        _STATES,
        "self.lru_slots.popitem(last=False)",
        "self.lru_slots.popitem()",
    ),
    Mutant(
        0,
        "an evicted checkpoint keeps its index entry",
        _STATES,
        "        del self.index[key]\n",
        "",
    ),
    Mutant(
        0,
        "admitted without a state slot",
        _STATES,
        "        return num_left >= 1\n",
        "        return num_left >= 0\n",
    ),
    Mutant(
        0,
        "found is the first checkpoint instead of the last",
        _STATES,
        "range(len(block_keys) // size * size, 0, -size)",
        "range(size, len(block_keys) + 1, size)",
    ),
    Mutant(
        0,
        "blocks are hits beyond the last checkpoint",
        _BLOCKS,
        "            del hits[self.states.longest(request.block_keys[: len(hits)]) :]\n",
        "            pass\n",
    ),
    Mutant(
        0,
        "the slots of a released request stay its own",
        _BLOCKS,
        "            self.states.release(request)\n",
        "            request.state_table, request.num_past_states = [], 0\n",
    ),
    Mutant(
        0,
        "the growth of a state table is not told",
        _PLANNER,
        "            self._new_state_slots[len(self._requests)] = slots\n",
        "            pass\n",
    ),
    Mutant(
        0,
        "a sibling is forked without its state",
        _PLANNER,
        "if request.leader is not None and blocks.states is None:\n",
        "if request.leader is not None:\n",
    ),
    Mutant(
        0,
        "a commit passes over the end of an interval",
        _QUEUES,
        "                next_event = min(next_event, next_past)\n",
        "",
    ),
    Mutant(
        0,
        "a reset of the prefix cache keeps the checkpoints",
        _BLOCKS,
        "            self.states.reset()\n",
        "            pass\n",
    ),
    Mutant(
        0,
        "a turn costs nothing",
        _SHARES,
        "            owner.account += request.charge\n",
        "",
    ),
    Mutant(
        0,
        "an idle owner saves up credit without end",
        _SHARES,
        "start = max(self._clock - policy.credit, owner.account, owner.last_start)",
        "start = max(1, owner.account, owner.last_start)",
    ),
    Mutant(
        0,
        "the youngest of an owner has the next turn",
        _SHARES,
        "return owner.queued.pop(0)",
        "return owner.queued.pop()",
    ),
    Mutant(
        0,
        "what was charged in vain is not given back",
        _SHARES,
        "        owner.account += cost - request.charge\n",
        "",
    ),
    Mutant(
        0,
        "no turn is taken when the head of an owner leaves",
        _QUEUES,
        "        if state is not RequestState.WAITING:\n"
        "            self._take_turn(request.owner)\n",
        "",
    ),
    Mutant(
        27,
        "the place of a request of the same owner is taken",
        _PLANNER,
        "                if other.owner != request.owner:\n                    return other\n",
        "                return other\n",
    ),
    Mutant(
        19,
        "the budget of a step is that of every step",
        _SCHEDULER,
        "            budget,\n            self.num_steps,\n",
        "            self.max_num_batched_tokens,\n            self.num_steps,\n",
    ),
    Mutant(
        0,
        "every draft token is accepted",
        _PLAN,
        "                    if draft != sample:\n                        break\n",
        "",
    ),
    Mutant(
        0,
        "a right draft token is wasted",
        _PLAN,
        "samples = samples[: num_right + 1]",
        "samples = samples[:1]",
    ),
    Mutant(
        0,
        "samples are taken behind the end of the request",
        _SCHEDULER,
        "            if reason is not None:\n                break\n            if is_dead_end",
        "            if is_dead_end",
    ),
    Mutant(
        0,
        "an accepted draft token is computed again",
        _SCHEDULER,
        "            request.num_computed += 1\n            request.num_dispatched += 1\n",
        "            request.num_dispatched += 1\n",
    ),
    Mutant(
        0,
        "a dead end behind an accepted draft token is passed over",
        _SCHEDULER,
        "                self.failures[request.request_id] = DEAD_END\n",
        "                pass\n",
    ),
    Mutant(
        0,
        "draft tokens take a block that another request is short of",
        _PLANNER,
        " and not (self._is_closed or self._preempted)",
        "",
    ),
    Mutant(
        0,
        "a sample behind draft tokens exceeds the longest form",
        _PLANNER,
        "request.max_num_tokens - 1 - end, drafter",
        "request.max_num_tokens - end, drafter",
    ),
    Mutant(
        19,
        "draft tokens do not count in the budget",
        _PLANNER,
        "                self._num_extra_tokens += len(drafts)\n",
        "",
    ),
    Mutant(
        0,
        "draft tokens of a request that need not be settled",
        _PLANNER,
        "if not request.settled_only or end != len(request.token_ids):",
        "if end != len(request.token_ids):",
    ),
    Mutant(
        0,
        "blocks of draft tokens are not told",
        _PLANNER,
        "self._new_blocks[row] = self._new_blocks.get(row, ()) + new",
        "del new",
    ),
    Mutant(
        0,
        "a row counts for one sample of a step in flight",
        _ROW_TOKENS,
        "num_places += num_samples",
        "num_places += 1",
    ),
    Mutant(
        0,
        "log-probabilities behind the end of the request are kept",
        _CORE,
        "            trim_logprobs(step)\n",
        "            pass\n",
    ),
    Mutant(
        34,
        "a key of placeholders alone",
        _BLOCKS,
        "                chunk += content_key(contents, first, first + size)\n",
        "",
    ),
    Mutant(
        34,
        "a key without the hash of its content",
        _SEGMENTS,
        "parts.append(head + content.content_hash)",
        "parts.append(head)",
    ),
    Mutant(
        34,
        "a key without the offset in its content",
        _SEGMENTS,
        "count, offset = min(end, content.end) - first, first - content.begin",
        "count, offset = min(end, content.end) - first, 0",
    ),
    Mutant(
        34,
        "a key does not say how far its content goes",
        _SEGMENTS,
        'struct.pack("<4q", first - begin, count, offset,',
        'struct.pack("<4q", first - begin, 0, offset,',
    ),
    Mutant(
        34,
        "a key does not say where in the block its content begins",
        _SEGMENTS,
        'struct.pack("<4q", first - begin, count,',
        'struct.pack("<4q", 0, count,',
    ),
    Mutant(
        34,
        "a key sees the first content of its block alone",
        _SEGMENTS,
        "        parts.append(head + content.content_hash)\n",
        "        return head + content.content_hash\n",
    ),
    Mutant(
        34,
        "content counts from the first block whose key is new",
        _BLOCKS,
        "first = len(keys) * size",
        "first = begin // num_bytes * size",
    ),
    Mutant(
        0,
        "a key names the content behind its block",
        _SEGMENTS,
        "        if content.begin >= end:\n            break\n",
        "        if content.begin > end:\n            break\n",
    ),
    Mutant(
        0,
        "a sibling has tokens alone",
        _REQUEST,
        "            segments=info.segments,\n",
        "",
    ),
    Mutant(
        0,
        "segments need not cover the prompt",
        _SEGMENTS,
        "    if total != num_tokens:\n",
        "    if total > num_tokens:\n",
    ),
    Mutant(
        0,
        "an engine admits content that its runner does not compute",
        _CORE,
        "        if not self._takes_contents:\n",
        "        if False:\n",
    ),
]
