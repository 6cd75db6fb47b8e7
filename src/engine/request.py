"""A request: its tokens, its progress counters, its block table and its state table."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from .logit_edits import LogitEdits
from .logprobs import RequestLogprobs
from .sampling_params import SamplingParams
from .segments import Segment, contents_of
from .text.reasoning import Reasoning


class RequestState(enum.Enum):
    """Where a request is. Every added request is in exactly one of these (S23). A sibling is
    pending while its leader has still to compute the prompt (S40). Under the policy "fair" a
    request is queued until its turn (S53)."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    PENDING = "pending"
    QUEUED = "queued"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False)
class RequestInfo:
    """The part of a request that never changes, and so may stand in a plan. Compared by identity.

    Attributes:
        request_id: no other live request has it.
        seed: 64-bit seed of its random numbers; a sample depends on it, the logits, the
            parameters, the request's own tokens and the absolute position only (T7).
        cache_salt: requests share cached blocks only with requests of the same salt.
        needs_history: a runner needs all its tokens: plans have those that its rows do not
            compute (``StepPlan.prefixes``).
        prompt_token_ids: only with ``prompt_logprobs``.
        edits: of its logits; None for none.
        reasoning: that may come before constrained content; None for none.
        end_token_ids: end content that a constraint is for, beside the model's own end tokens.
        segments: of its prompt, in order. Those of a row's positions name the content where its
            tokens are placeholders.
    """

    request_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    cache_salt: bytes
    needs_history: bool = False
    prompt_token_ids: tuple[int, ...] | None = None
    edits: LogitEdits | None = None
    reasoning: Reasoning | None = None
    end_token_ids: frozenset[int] = frozenset()
    segments: tuple[Segment, ...] = ()

    def num_prompt_rows(self, start: int, num_tokens: int) -> int:
        """How many of the positions ``[start, start + num_tokens)`` have log-probabilities to be
        reported: those whose next token lies in a prompt with ``prompt_logprobs``."""
        if self.prompt_token_ids is None:
            return 0
        return max(0, min(start + num_tokens, self.num_prompt_tokens - 1) - start)


class Request:
    """Token ids, three progress counters and a block table. There is no prefill or decode phase:
    a request simply has tokens that are not computed yet.

    ``num_computed <= num_dispatched <= num_total`` always holds:

    ======================  ==================================================================
    ``num_computed``        settled: KV of these positions is written and the step is committed
    ``num_dispatched``      settled plus in flight: positions some dispatched step writes
    ``num_total``           ``len(token_ids)`` plus tokens that steps in flight are sampling
    ======================  ==================================================================

    Blocks are freed and published on ``num_computed`` only.

    Attributes:
        token_ids: the prompt, then the settled outputs. Grows in ``Scheduler.commit`` only.
        max_num_tokens: prompt plus output length at which the request ends with "length".
        stop_token_ids: ids that end it with "stop" (the model's end tokens unless ignored).
        on_token: called with each settled output id, in order; True ends it with "stop" (stop
            strings). If it raises, the engine ends the request with reason "error".
        info: what never changes of it; plans refer to this.
        leader: of a sibling, the request that computes the prompt for it; see :meth:`sibling`.
        reads_cache: False computes every position itself, at each admission (S38); it publishes
            its blocks all the same. Always so with ``prompt_logprobs``.
        settled_only: its rows compute settled tokens only (S42), so that a runner has all its text
            before it samples. Always so where the parameters have a constraint.
        seniority: arrival number given by the scheduler. rank: place in the order of service
            (smaller is older), given once by the policy: at arrival, or at its turn.
        owner: its share is charged under the policy "fair". charge: its cost on its
            owner's account, in ticks.
        contents: the content segments of its prompt, in order; none of tokens alone.
        block_keys: of its full blocks (chained prefix key, content of the block as bytes: token ids
            and other content), computed on demand, never changed.
        num_published: how many of its leading blocks are cache hits or offered to the index.
        num_slots: ``len(block_table) * block_size``.
        state_table: a state slot, or -1 for one that was given up, for each interval that it has
            begun (see ``state_slots``); empty if the model has no recurrent layers.
        num_past_states: how many of its leading entries were given up.
        logprobs: settled rows of its ``logprobs`` and ``prompt_logprobs``.
        num_cached_tokens: prompt tokens its first admission found in the prefix cache.
        next_event: smallest ``num_computed`` at which commit has more to do (block full, length
            reached); 0: at every commit. Derived; see ``Queues.set_next_event``.
    """

    __slots__ = (
        "block_keys",
        "block_table",
        "charge",
        "contents",
        "finish_reason",
        "info",
        "leader",
        "logprobs",
        "max_num_tokens",
        "next_event",
        "num_admissions",
        "num_cached_tokens",
        "num_computed",
        "num_dispatched",
        "num_past_states",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_slots",
        "num_total",
        "on_token",
        "owner",
        "priority",
        "rank",
        "reads_cache",
        "seniority",
        "settled_only",
        "state",
        "state_table",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_num_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        on_token: Callable[[int], bool] | None = None,
        seed: int = 0,
        priority: int = 0,
        owner: str = "",
        cache_salt: bytes = b"",
        reads_cache: bool = True,
        needs_history: bool = False,
        settled_only: bool = False,
        edits: LogitEdits | None = None,
        reasoning: Reasoning | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        scores_prompt: bool = True,
        segments: Sequence[Segment] | None = None,
    ) -> None:
        """``segments``: of the prompt; None: tokens alone. ``prompt_token_ids`` has placeholders
        where a segment has other content."""
        is_scored = scores_prompt and sampling_params.prompt_logprobs is not None
        is_constrained = sampling_params.structured_outputs is not None
        self.contents = () if segments is None else contents_of(segments)
        self.info = RequestInfo(
            request_id,
            len(prompt_token_ids),
            sampling_params,
            seed,
            cache_salt,
            needs_history or is_constrained or (edits is not None and edits.needs_history),
            tuple(prompt_token_ids) if is_scored else None,
            edits,
            reasoning,
            end_token_ids,
            (Segment(len(prompt_token_ids)),) if segments is None else tuple(segments),
        )
        self.reads_cache = reads_cache and not is_scored
        self.settled_only = settled_only or is_constrained
        self.leader: Request | None = None
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = max_num_tokens
        self.stop_token_ids = stop_token_ids
        self.on_token = on_token
        self.priority = priority
        self.owner = owner
        has_logprobs = is_scored or sampling_params.logprobs is not None
        self.logprobs = RequestLogprobs() if has_logprobs else None
        self.state = RequestState.WAITING
        self.finish_reason: str | None = None
        self.seniority = self.rank = -1
        self.charge = self.next_event = 0
        self.num_computed = self.num_dispatched = 0
        self.num_total = len(prompt_token_ids)
        self.block_table: list[int] = []
        self.block_keys: list[tuple[bytes, bytes]] = []
        self.state_table: list[int] = []
        self.num_slots = self.num_published = self.num_past_states = 0
        self.num_admissions = self.num_cached_tokens = self.num_preemptions = 0

    def sibling(
        self, request_id: str, seed: int, on_token: Callable[[int], bool] | None
    ) -> Request:
        """Another continuation of the same prompt, which this request computes for both. It reads
        the cache: only its leader computes the whole prompt (S38)."""
        info = self.info
        sibling = Request(
            request_id,
            self.token_ids[: self.num_prompt_tokens],
            info.sampling_params,
            max_num_tokens=self.max_num_tokens,
            stop_token_ids=self.stop_token_ids,
            on_token=on_token,
            seed=seed,
            priority=self.priority,
            owner=self.owner,
            cache_salt=info.cache_salt,
            needs_history=info.needs_history,
            settled_only=self.settled_only,
            edits=info.edits,
            reasoning=info.reasoning,
            end_token_ids=info.end_token_ids,
            scores_prompt=False,
            segments=info.segments,
        )
        sibling.leader = self
        return sibling

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that siblings share: the prompt but its last one, which each computes itself."""
        return self.num_prompt_tokens - 1

    @property
    def request_id(self) -> str:
        return self.info.request_id

    @property
    def sampling_params(self) -> SamplingParams:
        return self.info.sampling_params

    @property
    def seed(self) -> int:
        return self.info.seed

    @property
    def cache_salt(self) -> bytes:
        return self.info.cache_salt

    @property
    def num_in_flight(self) -> int:
        """Positions that dispatched, unsettled steps are computing."""
        return self.num_dispatched - self.num_computed

    @property
    def must_settle(self) -> bool:
        """Whether the token it would compute next has to be settled first (S42)."""
        return self.settled_only and self.num_total > len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The settled outputs (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def stop_token_id(self) -> int | None:
        """The stop token that ended it; it can only be the last."""
        last = self.token_ids[-1]
        has_output = len(self.token_ids) > self.num_prompt_tokens
        return last if has_output and last in self.stop_token_ids else None

    @property
    def text_token_ids(self) -> list[int]:
        """The settled outputs that have text: without the stop token, unless it is included."""
        is_cut = self.stop_token_id is not None
        is_cut = is_cut and not self.sampling_params.include_stop_str_in_output
        return self.output_token_ids[:-1] if is_cut else self.output_token_ids

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, rank={self.rank}, "
            f"computed={self.num_computed}, dispatched={self.num_dispatched}, "
            f"total={self.num_total}, blocks={self.block_table}"
            + (f", states={self.state_table})" if self.state_table else ")")
        )


by_rank = attrgetter("rank")
