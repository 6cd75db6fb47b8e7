"""Named mutants: the bugs of docs/real_bugs.md as patches of our own code.

`row` is the row of that page; every row has a mutant. Row 0 is a bug of our own or a seeded one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A patch (:func:`tests.mutants.syntax.patch`), its name, and the row of its bug."""

    row: int
    name: str
    where: str
    old: str
    new: str


MUTANTS = [
    Mutant(1, "evicted block keeps its index entry", "Ledger._evict", "del self.index[key]", ""),
    Mutant(
        2,
        "hit covers the whole prompt",
        "BlockManager.match",
        "len(request.token_ids) - 1",
        "len(request.token_ids)",
    ),
    Mutant(
        3,
        "a request with outputs counts as decoding",
        "Planner._serve_slowly",
        "start + num_tokens == request.num_total",
        "start + num_tokens == request.num_total or len(request.token_ids) > "
        "request.num_prompt_tokens",
    ),
    Mutant(
        4,
        "a block is published before it is settled",
        "BlockManager._publish_blocks",
        "request.num_computed",
        "request.num_dispatched",
    ),
    Mutant(
        5,
        "the dispatched count is not set to the hits",
        "Queues.admit",
        "request.num_computed = request.num_dispatched = num_tokens",
        "request.num_computed = num_tokens",
    ),
    Mutant(
        6,
        "blocks are allocated for the whole sequence, not for computed + scheduled",
        "Planner._take_blocks",
        "request.num_dispatched + num_tokens",
        "request.num_total",
    ),
    Mutant(
        7,
        "a token is sampled at a chunk boundary",
        "Planner._serve_slowly",
        "start + num_tokens == request.num_total",
        "start + num_tokens == request.num_total or num_tokens > 3",
    ),
    Mutant(
        8,
        "the chain of block keys loses its parent when it grows",
        "BlockManager._extend_keys",
        "keys[-1][0] if keys else root_key(request.cache_salt)",
        "root_key(request.cache_salt)",
    ),
    Mutant(9, "position off by one", "Planner._serve", "add_start(start)", "add_start(start + 1)"),
    Mutant(
        10,
        "a request that can never fit is admitted",
        "Scheduler.add",
        "num_blocks > self.blocks.num_blocks",
        "num_blocks > self.blocks.num_blocks + 1",
    ),
    Mutant(
        11,
        "equal blocks overwrite one index entry",
        "Ledger.offer",
        "key not in self.index",
        "True",
    ),
    Mutant(
        12,
        "one block too many is allocated at an exact multiple",
        "BlockManager.num_blocks_for",
        "-(-num_tokens // self.block_size)",
        "num_tokens // self.block_size + 1",
    ),
    Mutant(
        13,
        "only the root of a hit chain is counted",
        "BlockManager.acquire",
        "self.share(hits)",
        "self.share(hits[:1])",
    ),
    Mutant(
        14,
        "the last block of a hit chain is not counted",
        "BlockManager.acquire",
        "self.share(hits)",
        "self.share(hits[:-1])",
    ),
    Mutant(
        15,
        "a request keeps a view of its caller's list",
        "Request.__init__",
        "list(prompt_token_ids)",
        "prompt_token_ids",
    ),
    Mutant(
        16,
        "a number of blocks is used as a number of tokens",
        "Planner._take_blocks",
        "num_taken * blocks.block_size",
        "num_taken",
    ),
    Mutant(
        17,
        "a block with one owner left goes to the free list",
        "Ledger.drop",
        "ref_counts[item] == 0",
        "ref_counts[item] <= 1",
    ),
    Mutant(
        18,
        "a staging buffer is reused while the device may still read it",
        "PinnedRing.wait_for",
        "event.synchronize()",
        "pass",
    ),
    Mutant(
        19,
        "the token budget is never used up",
        "Planner._serve_slowly",
        "self._num_extra_tokens += num_tokens - 1",
        "pass",
    ),
    Mutant(
        19,
        "a token is delivered twice",
        "Scheduler._settle",
        "request.token_ids.append(token)",
        "request.token_ids += [token, token]",
    ),
    Mutant(
        20,
        "an allocation touches blocks before it fails",
        "BlockManager.allocate",
        "raise OutOfBlocksError(f'{num_new_blocks} of {self.num_available} blocks')",
        "if self.free:\n"
        "    self.ref_counts[self.free.pop()] = 1\n"
        "raise OutOfBlocksError(f'{num_new_blocks} of {self.num_available} "
        "blocks')",
    ),
    Mutant(
        21,
        "acquired hits can still be evicted",
        "Ledger.share",
        "if ref_counts[item] == 0:\n    del lru[item]",
        "",
    ),
    Mutant(
        22,
        "a released owner un-caches a block that others share",
        "Ledger.drop",
        "if ref_counts[item] == 0:\n"
        "    if keys[item] is None:\n"
        "        self.free.append(item)\n"
        "    else:\n"
        "        self.lru[item] = None",
        "if ref_counts[item]:\n"
        "    self.index.pop(keys[item] or b'', None)\n"
        "if ref_counts[item] == 0:\n"
        "    if keys[item] is None:\n"
        "        self.free.append(item)\n"
        "    else:\n"
        "        self.lru[item] = None",
    ),
    Mutant(23, "an evicted block keeps its key", "Ledger._evict", "self.keys[item] = None", ""),
    Mutant(
        24,
        "the last chunk of k blocks is not sampled",
        "Planner._serve_slowly",
        "start + num_tokens == request.num_total",
        "start + num_tokens == request.num_total and (num_tokens == 1 or "
        "request.num_total % self._blocks.block_size)",
    ),
    Mutant(
        25,
        "a preempted request stays in the plan",
        "Planner._serve",
        "request.state is RequestState.RUNNING",
        "True",
    ),
    Mutant(
        25,
        "the oldest request is preempted first",
        "choose_victims",
        "(v for v in reversed(running) if v is not displaced)",
        "(v for v in running if v is not displaced and v.rank > asker.rank)",
    ),
    Mutant(
        26,
        "a removal removes the neighbour in the queue",
        "Queues.withdraw",
        "bisect_left(queue, request.rank, key=by_rank)",
        "bisect_left(queue, request.rank, key=by_rank) - 1",
    ),
    Mutant(
        27,
        "a preempted request goes to the back of the queue",
        "Queues.preempt",
        "self._wait(request)",
        "self._wait(request)\nself.waiting.remove(request)\nself.waiting.append(request)",
    ),
    Mutant(
        28,
        "a block enters the free list twice",
        "Ledger.drop",
        "self.free.append(item)",
        "self.free += [item, item]",
    ),
    Mutant(
        29,
        "blocks are freed while a step in flight writes them",
        "Queues.withdraw",
        "if request.num_in_flight:\n"
        "    self.draining.add(request)\n"
        "else:\n"
        "    self._give_back(request)",
        "if request.num_in_flight:\n"
        "    self.draining.add(request)\n"
        "if True:\n"
        "    self._give_back(request)",
    ),
    Mutant(
        30,
        "a victim with steps in flight is preempted at once",
        "Planner._make_room",
        "any((victim.num_in_flight for victim in victims))",
        "False",
    ),
    Mutant(
        31,
        "victims that free nothing are preempted too",
        "choose_victims",
        "v is displaced or any((num_refs[block] == 0 for block in v.block_table))",
        "True",
    ),
    Mutant(
        32,
        "a paused request keeps its blocks",
        "Queues.withdraw",
        "self._give_back(request)",
        "if state is not RequestState.PAUSED:\n    self._give_back(request)",
    ),
    Mutant(
        33,
        "admission stops one short of the cap",
        "Planner._is_full",
        "self._max_num_seqs",
        "self._max_num_seqs - 1",
    ),
    Mutant(
        33,
        "a younger request takes blocks an older one needs",
        "Planner._take_blocks",
        "if num_taken < num_wanted:\n    self._is_closed = True",
        "",
    ),
    Mutant(
        34,
        "the key ignores the salt",
        "root_key",
        "b'pagespec prefix root:' + cache_salt",
        "b'pagespec prefix root:'",
    ),
    Mutant(
        35,
        "the key covers only the low byte of a token",
        "BlockManager._extend_keys",
        "array('i', token_ids)",
        "array('i', [t & 255 for t in token_ids])",
    ),
    Mutant(
        36,
        "a released cached block is in no queue",
        "Ledger.drop",
        "self.lru[item] = None",
        "pass",
    ),
    Mutant(
        37,
        "the result of a step reaches a request that ended",
        "Scheduler._settle",
        "request.state is not RequestState.FINISHED",
        "True",
    ),
    Mutant(
        38,
        "a block is cached before its last owner releases it",
        "Ledger.drop",
        "ref_counts[item] -= 1\n"
        "if ref_counts[item] == 0:\n"
        "    if keys[item] is None:\n"
        "        self.free.append(item)\n"
        "    else:\n"
        "        self.lru[item] = None",
        "if ref_counts[item] > 1:\n"
        "    ref_counts[item] -= 1\n"
        "if ref_counts[item] <= 1:\n"
        "    if keys[item] is None:\n"
        "        self.free.append(item)\n"
        "    else:\n"
        "        self.lru[item] = None",
    ),
    Mutant(
        39,
        "a partial chunk is not counted as computed",
        "Scheduler._settle",
        "num_tokens",
        "num_tokens if token is not None else num_tokens - 1",
    ),
    Mutant(
        40,
        "the cap limits a step and not the running set",
        "Planner._is_full",
        "self._running",
        "self._requests",
    ),
    Mutant(
        0,
        "hits are lost when an admitted row grows by one block",
        "Planner._freeze",
        "tables[row] = tuple(request.block_table)\nself._new_blocks.pop(row, None)",
        "table = tuple(request.block_table)\n"
        "added = self._new_blocks.pop(row, ())\n"
        "tables[row] = added if len(added) == 1 else table",
    ),
    Mutant(
        0,
        "an admitted row's plan has its growth again, besides the whole table",
        "Planner._freeze",
        "self._new_blocks.pop(row, None)",
        "",
    ),
    Mutant(
        0,
        "a plan keeps the live block table",
        "Planner._freeze",
        "tuple(request.block_table)",
        "request.block_table",
    ),
    Mutant(
        0,
        "a plan does not release paused requests",
        "Queues.withdraw",
        "queue is self.running",
        "queue is self.running and state is not RequestState.PAUSED",
    ),
    Mutant(
        0,
        "a plan releases a request again that the plan before released",
        "Scheduler.schedule",
        "self.queues.released.clear()",
        "del self.queues.released[:-1]",
    ),
    Mutant(
        0,
        "a token in flight is looked up in the oldest step",
        "row_token_ids",
        "reversed(in_flight)",
        "in_flight",
    ),
    Mutant(
        0,
        "a row's index is used as its index among the sampled rows",
        "Planner._batch",
        "age == 0 and plan.is_decode_only and is_usual",
        "age == 0 and is_usual",
    ),
    Mutant(
        0,
        "an index into the running queue is kept while victims before it are removed",
        "Planner.plan",
        "position = bisect_left(running, head.rank, key=by_rank)",
        "position = min(end, len(running))",
    ),
    Mutant(
        0,
        "a request with reads_cache=False reads the cache",
        "BlockManager.match",
        "self.enable_prefix_caching and request.reads_cache",
        "self.enable_prefix_caching",
    ),
    Mutant(
        0,
        "a preempted request with reads_cache=False reads the cache",
        "BlockManager.match",
        "request.reads_cache",
        "request.reads_cache or request.num_admissions",
    ),
    Mutant(
        0,
        "a request with reads_cache=False does not publish its blocks",
        "BlockManager.publish",
        "self.enable_prefix_caching",
        "self.enable_prefix_caching and request.reads_cache",
    ),
    Mutant(
        0,
        "a history ends with the prompt",
        "Planner._freeze",
        "self._starts[row]",
        "min(self._starts[row], request.num_prompt_tokens)",
    ),
    Mutant(
        0,
        "a history is sent at the first admission only",
        "Planner._freeze",
        "request.info.needs_history",
        "request.info.needs_history and request.num_admissions == 1",
    ),
    Mutant(
        0,
        "no history is sent if nothing was cached",
        "Planner._freeze",
        "request.info.needs_history",
        "request.info.needs_history and self._starts[row]",
    ),
    Mutant(
        0,
        "an unsettled token is computed of a request that waits for it",
        "Planner._serve",
        "held or (request.waits_for_samples and total != len(request.token_ids))",
        "held",
    ),
    Mutant(
        0,
        "the budget reserves a token for a request that must settle first",
        "Planner._budget_behind",
        "other is not request and other.num_total - other.num_dispatched == 1 and "
        "(other.num_total != other.max_num_tokens) and (not other.must_settle)",
        "other is not request and other.num_total - other.num_dispatched == 1 and "
        "(other.num_total != other.max_num_tokens)",
    ),
    Mutant(
        0,
        "a block copy is not in the plan",
        "Planner._admit",
        "self._copies.append((source.block_table[len(hits)], copy))",
        "",
    ),
    Mutant(
        0,
        "a block copy has its source and target swapped",
        "Planner._admit",
        "(source.block_table[len(hits)], copy)",
        "(copy, source.block_table[len(hits)])",
    ),
    Mutant(
        0,
        "a partly filled block is shared",
        "Planner._admit",
        "num_tokens // blocks.block_size",
        "blocks.num_blocks_for(num_tokens)",
    ),
    Mutant(
        0,
        "a sibling counts the whole prompt as computed",
        "Request.num_shared_tokens",
        "self.num_prompt_tokens - 1",
        "self.num_prompt_tokens",
    ),
    Mutant(
        0,
        "a sibling counts tokens in flight as computed",
        "find_source",
        "other.num_computed",
        "other.num_dispatched",
    ),
    Mutant(
        0,
        "a request shares blocks of a younger one, which it may preempt",
        "Planner._admit",
        "self._running[:position]",
        "self._running",
    ),
    Mutant(
        0,
        "a prompt is shared with the siblings of another request",
        "find_source",
        "other is request.leader or other.leader is request.leader",
        "True",
    ),
    Mutant(
        0,
        "siblings wait for an aborted leader",
        "Queues._leave_group",
        "self.release_siblings(request)",
        "",
    ),
    Mutant(
        0,
        "siblings are released before the prompt has settled",
        "Scheduler._settle",
        "self.queues.pending and request.num_computed >= request.num_prompt_tokens",
        "self.queues.pending",
    ),
    Mutant(
        0,
        "the end of a prompt of one token is not detected",
        "Queues.set_next_event",
        "request.on_token is None and request not in self.pending",
        "request.on_token is None",
    ),
    Mutant(
        0,
        "an aborted sibling is released by its leader",
        "Queues._leave_group",
        "siblings.remove(request)",
        "pass",
    ),
    Mutant(
        0,
        "released siblings join the end of the waiting queue",
        "Queues.release_siblings",
        "self.join_waiting(sibling)",
        "self.join_waiting(sibling)\n"
        "if sibling in self.waiting:\n"
        "    self.waiting.remove(sibling)\n"
        "    self.waiting.append(sibling)",
    ),
    Mutant(0, "siblings have no cache salt", "Request.sibling", "cache_salt=info.cache_salt", ""),
    Mutant(
        0,
        "a reset keeps the prefix cache",
        "Scheduler.reset_prefix_cache",
        "self.blocks.reset()",
        "",
    ),
    Mutant(
        0,
        "a reset does not preempt running requests",
        "Scheduler.reset_prefix_cache",
        "for request in reversed(self.queues.running.copy()):\n"
        "    self.queues.preempt(request)\n"
        "self.blocks.reset()",
        "for request in reversed(self.queues.running.copy()):\n"
        "    pass\n"
        "blocks = self.blocks\n"
        "blocks.index.clear()\n"
        "blocks.keys = [None] * blocks.num_blocks\n"
        "blocks.free += blocks.lru\n"
        "blocks.lru.clear()",
    ),
    Mutant(
        0,
        "a reset does not wait for the steps in flight",
        "Scheduler.reset_prefix_cache",
        "raise RuntimeError(f'{len(self.in_flight)} steps are in flight; commit them first')",
        "self.in_flight.clear()",
    ),
    Mutant(
        0,
        "a reset does not settle the steps in flight",
        "Engine._reset_prefix_cache",
        "finished = self._settle()",
        "finished: list[Request] = []",
    ),
    Mutant(
        0,
        "a state slot is released while the next step is in flight",
        "StateSlots.settle",
        "request.num_computed",
        "request.num_dispatched",
    ),
    Mutant(
        0,
        "a state takes another slot although none is available",
        "StateSlots.extend",
        "self.keys[table[-1]] is None",
        "not self.enable_prefix_caching",
    ),
    Mutant(
        0,
        "the newest checkpoint is evicted first",
        "Ledger._evict",
        "self.lru.popitem(last=False)",
        "self.lru.popitem()",
    ),
    Mutant(
        0,
        "a request is admitted without a state slot",
        "StateSlots.has_one_beside",
        "num_left >= 1",
        "num_left >= 0",
    ),
    Mutant(
        0,
        "a hit ends at the first checkpoint instead of the last",
        "StateSlots.longest",
        "range(len(block_keys) // size * size, 0, -size)",
        "range(size, len(block_keys) + 1, size)",
    ),
    Mutant(
        0,
        "blocks beyond the last checkpoint are hits",
        "BlockManager.match",
        "del hits[self.states.longest(request.block_keys[:len(hits)]):]",
        "pass",
    ),
    Mutant(
        0,
        "a released request keeps its state slots",
        "BlockManager.release",
        "self.states.release(request)",
        "request.state_table, request.num_past_states = ([], 0)",
    ),
    Mutant(
        0,
        "the growth of a state table is not in the plan",
        "Planner._extend_states",
        "self._new_state_slots[len(self._requests)] = slots",
        "pass",
    ),
    Mutant(
        0,
        "a sibling is forked without its state",
        "Planner._admit",
        "request.leader is not None and blocks.states is None",
        "request.leader is not None",
    ),
    Mutant(
        0,
        "a commit misses the end of an interval",
        "Queues.set_next_event",
        "next_event = min(next_event, next_past)",
        "",
    ),
    Mutant(
        0,
        "a reset of the prefix cache keeps the checkpoints",
        "BlockManager.reset",
        "self.states.reset()",
        "pass",
    ),
    Mutant(0, "a turn costs nothing", "Shares.give_ranks", "owner.account += request.charge", ""),
    Mutant(
        0,
        "an idle owner accumulates unlimited credit",
        "Shares.give_ranks",
        "self._clock - policy.credit",
        "1",
    ),
    Mutant(
        0,
        "an owner's youngest request gets the next turn",
        "Shares.take_turn",
        "owner.queued.pop(0)",
        "owner.queued.pop()",
    ),
    Mutant(
        0,
        "an owner is not refunded for tokens that were not computed",
        "Shares.settle_charge",
        "owner.account += cost - request.charge",
        "",
    ),
    Mutant(
        0,
        "no next turn is assigned when an owner's head leaves the queue",
        "Queues.withdraw",
        "if state is not RequestState.WAITING:\n    self._take_turn(request.owner)",
        "",
    ),
    Mutant(
        27,
        "a request displaces one of the same owner",
        "Planner._displaced_by",
        "if other.owner != request.owner:\n    return other",
        "return other",
    ),
    Mutant(
        19,
        "every step has the maximum budget",
        "Scheduler.schedule",
        "Planner(self.queues, self.max_num_seqs, budget, self.num_steps, "
        "self.in_flight, self.last_steps, self.drafter, self.account)",
        "Planner(self.queues, self.max_num_seqs, "
        "self.max_num_batched_tokens, self.num_steps, self.in_flight, self.last_steps, "
        "self.drafter, self.account)",
    ),
    Mutant(
        0,
        "every draft token is accepted",
        "StepPlan.accepted",
        "if draft != sample:\n    break",
        "",
    ),
    Mutant(0, "a correct draft token is wasted", "StepPlan.accepted", "num_right + 1", "1"),
    Mutant(
        0,
        "samples are taken beyond the end of the request",
        "Scheduler._take_more",
        "if reason is not None:\n    break",
        "",
    ),
    Mutant(
        0,
        "an accepted draft token is computed again",
        "Scheduler._take_more",
        "request.num_computed += 1",
        "",
    ),
    Mutant(
        0,
        "a dead end after an accepted draft token is ignored",
        "Scheduler._take_more",
        "failure = DEAD_END\nbreak",
        "pass",
    ),
    Mutant(
        0,
        "a failure behind the end of the request ends it",
        "Scheduler._take_more",
        "failure and reason is None",
        "failure",
    ),
    Mutant(
        0,
        "a sample that failed is taken",
        "Scheduler._commit_drafts",
        "tokens[1:failed]",
        "tokens[1:]",
    ),
    Mutant(
        0,
        "a failure behind a rejected draft token counts",
        "Scheduler._commit_drafts",
        "failed >= len(tokens)",
        "failed > len(tokens) + 9",
    ),
    Mutant(
        0,
        "draft tokens take a block that another request needs",
        "Planner._draft",
        "drafts and num_wanted > 0 and (not (self._is_closed or self._preempted))",
        "drafts and num_wanted > 0",
    ),
    Mutant(
        0,
        "a sample after draft tokens exceeds the maximum length",
        "Planner._draft",
        "request.max_num_tokens - 1",
        "request.max_num_tokens",
    ),
    Mutant(
        19,
        "draft tokens do not count in the budget",
        "Planner._draft",
        "self._num_extra_tokens += len(drafts)",
        "",
    ),
    Mutant(
        0,
        "draft tokens follow an unsettled token",
        "Planner._draft",
        "end != len(request.token_ids)",
        "end < len(request.token_ids)",
    ),
    Mutant(
        0,
        "a request with draft tokens in flight gets a row",
        "Planner._draft",
        "request.waits_for_samples = True",
        "",
    ),
    Mutant(
        0,
        "a request that had draft tokens once is never pipelined again",
        "Scheduler._commit_drafts",
        "request.waits_for_samples = request.settled_only",
        "",
    ),
    Mutant(
        0,
        "blocks for draft tokens are not in the plan",
        "Planner._draft",
        "self._new_blocks[row] = self._new_blocks.get(row, ()) + new",
        "del new",
    ),
    Mutant(
        0,
        "a row counts for one sample of a step in flight",
        "_places_in_flight",
        "num_places += num_samples",
        "num_places += 1",
    ),
    Mutant(
        0,
        "log-probabilities beyond the end of the request are kept",
        "Engine._settle_oldest",
        "trim_logprobs(step)",
        "pass",
    ),
    Mutant(
        34,
        "a key covers placeholders only, not content",
        "BlockManager._extend_keys",
        "chunk += content_key(contents, first, first + size)",
        "",
    ),
    Mutant(
        34,
        "a key lacks the hash of its content",
        "content_key",
        "head + content.content_hash",
        "head",
    ),
    Mutant(
        34, "a key lacks the offset in its content", "content_key", "first - content.begin", "0"
    ),
    Mutant(
        34,
        "a key lacks the length of its content",
        "content_key",
        "struct.pack('<4q', first - begin, count, offset, len(content.content_hash))",
        "struct.pack('<4q', first - begin, 0, offset, len(content.content_hash))",
    ),
    Mutant(
        34,
        "a key lacks the position of content in the block",
        "content_key",
        "first - begin",
        "0",
    ),
    Mutant(
        34,
        "a key covers only the first content of its block",
        "content_key",
        "parts.append(head + content.content_hash)",
        "return head + content.content_hash",
    ),
    Mutant(
        34,
        "content offsets count from the first block with a new key",
        "BlockManager._extend_keys",
        "len(keys) * size",
        "begin // num_bytes * size",
    ),
    Mutant(
        0,
        "a key covers the content after its block",
        "content_key",
        "content.begin >= end",
        "content.begin > end",
    ),
    Mutant(
        0,
        "a sibling has tokens but no content segments",
        "Request.sibling",
        "segments=info.segments",
        "",
    ),
    Mutant(
        0,
        "segments may cover only part of the prompt",
        "check_segments",
        "total != num_tokens",
        "total > num_tokens",
    ),
    Mutant(
        0,
        "an engine admits content that its runner does not compute",
        "Engine._add",
        "not self._takes_contents",
        "False",
    ),
    Mutant(
        0,
        "an answer of another salt is proposed",
        "_Corpus.find",
        "self._places.get(salt)",
        "next(iter(self._places.values()), None)",
    ),
    Mutant(
        0,
        "earlier answers are kept without a bound",
        "_Corpus.add",
        "self.num_tokens > self._max_num_tokens",
        "False",
    ),
    Mutant(
        0,
        "an aborted answer is kept",
        "SuffixDrafter.end",
        "request.finish_reason in ('stop', 'length')",
        "True",
    ),
    Mutant(
        0,
        "a rejected draft token does not lower the acceptance",
        "RequestDrafts.note",
        "rate * _DECAY",
        "rate",
    ),
    Mutant(
        0,
        "a prediction goes on behind a difference",
        "_Prediction.propose",
        "tokens[place] != known[position]",
        "False",
    ),
]
