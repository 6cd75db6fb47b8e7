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
    """The state of a request; every added request is in exactly one state (S23). A sibling is
    pending until its leader has computed the prompt (S40). Under the policy "fair" a request is
    queued until its turn (S53)."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    PENDING = "pending"
    QUEUED = "queued"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False)
class RequestInfo:
    """The immutable part of a request, to which plans refer. Compared by identity.

    Attributes:
        request_id: unique among live requests.
        seed: 64-bit random seed. A sample depends only on the seed, the logits, the parameters, the
            request's own tokens and the absolute position (T7).
        cache_salt: requests share cached blocks only with requests of the same salt.
        needs_history: the runner needs all tokens of the request. Plans then include the tokens
            that its rows do not compute (``StepPlan.prefixes``).
        prompt_token_ids: only with ``prompt_logprobs``.
        edits: edits of its logits; None for none.
        reasoning: the reasoning that may precede constrained content; None for none.
        end_token_ids: tokens that end constrained content, in addition to the model's end tokens.
        early_stop_ids: tokens that bitmasks ban before ``min_tokens`` outputs, wherever they allow
            another token; empty without a constraint.
        segments: segments of its prompt, in order. They identify the content at positions whose
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
    early_stop_ids: frozenset[int] = frozenset()
    segments: tuple[Segment, ...] = ()

    def num_prompt_rows(self, start: int, num_tokens: int) -> int:
        """How many of the positions ``[start, start + num_tokens)`` report log-probabilities: those
        whose next token is in a prompt with ``prompt_logprobs``."""
        if self.prompt_token_ids is None:
            return 0
        return max(0, min(start + num_tokens, self.num_prompt_tokens - 1) - start)


class Request:
    """Token ids, three progress counters and a block table. There is no prefill or decode phase:
    a request only has tokens that are not computed yet.

    ``num_computed <= num_dispatched <= num_total`` always holds:

    ======================  ==================================================================
    ``num_computed``        settled: KV of these positions is written and the step is committed
    ``num_dispatched``      settled or in flight: positions that dispatched steps write
    ``num_total``           ``len(token_ids)`` plus tokens that steps in flight are sampling
    ======================  ==================================================================

    Blocks are freed and published on ``num_computed`` only.

    Attributes:
        token_ids: the prompt, then the settled outputs. Only ``Scheduler.commit`` appends to it.
        max_num_tokens: length of prompt plus output at which the request ends with "length".
        stop_token_ids: ids that end it with "stop" (including the model's end tokens unless
            ignored).
        on_token: called with each settled output id, in order; True ends the request with "stop"
            (stop strings). If it raises, the engine ends the request with reason "error".
        info: the immutable part; plans refer to it.
        leader: for a sibling, the request that computes the prompt; see :meth:`sibling`.
        reads_cache: if False, the request computes every position itself at each admission (S38)
            but still publishes its blocks. Always False with ``prompt_logprobs``.
        settled_only: its rows compute settled tokens only (S42), so that the runner has all its
            tokens before it samples. Always True for constrained requests.
        waits_for_samples: it gets no row while its next token is being sampled (S42):
            ``settled_only``, or a step in flight has draft tokens of it.
        seniority: arrival number, assigned by the scheduler. rank: place in the order of service
            (smaller is older), assigned once by the policy: at arrival, or at its turn.
        owner: the owner that the policy "fair" charges. charge: the cost charged to the owner's
            account, in ticks.
        contents: the content segments of its prompt, in order; empty for a prompt of tokens only.
        block_keys: of its full blocks, (chained prefix key, content of the block as bytes: token
            ids and other content); computed on demand, never changed.
        num_published: number of its leading blocks that are cache hits or were offered to the
            prefix index.
        num_slots: ``len(block_table) * block_size``.
        state_table: for each interval that it has begun, a state slot, or -1 for a released one
            (see ``state_slots``); empty if the model has no recurrent layers.
        num_past_states: number of its leading entries that are released.
        logprobs: settled rows of its ``logprobs`` and ``prompt_logprobs``.
        num_cached_tokens: prompt tokens found in the prefix cache at its first admission.
        next_event: smallest ``num_computed`` at which commit has more to do (block full, length
            reached); 0: at every commit. Derived; see ``Queues.set_next_event``.
        prediction: tokens that its output is predicted to have; drafters may propose them.
        drafts: state of the drafter for this request; None before its first proposal.
        num_drafted, num_accepted: settled draft tokens of its rows, and those accepted among them.
        num_predicted, num_accepted_predicted: the same for draft tokens from ``prediction``.
    """

    __slots__ = (
        "block_keys",
        "block_table",
        "charge",
        "contents",
        "drafts",
        "finish_reason",
        "info",
        "leader",
        "logprobs",
        "max_num_tokens",
        "next_event",
        "num_accepted",
        "num_accepted_predicted",
        "num_admissions",
        "num_cached_tokens",
        "num_computed",
        "num_dispatched",
        "num_drafted",
        "num_past_states",
        "num_predicted",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_slots",
        "num_total",
        "on_token",
        "owner",
        "prediction",
        "priority",
        "rank",
        "reads_cache",
        "seniority",
        "settled_only",
        "state",
        "state_table",
        "stop_token_ids",
        "token_ids",
        "waits_for_samples",
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
        early_stop_ids: frozenset[int] = frozenset(),
        scores_prompt: bool = True,
        segments: Sequence[Segment] | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        """``segments``: segments of the prompt; None: tokens only. ``prompt_token_ids`` has
        placeholders where a segment has other content."""
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
            early_stop_ids,
            (Segment(len(prompt_token_ids)),) if segments is None else tuple(segments),
        )
        self.reads_cache = reads_cache and not is_scored
        self.settled_only = self.waits_for_samples = settled_only or is_constrained
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
        self.prediction = prediction
        self.drafts: object | None = None
        self.num_drafted = self.num_accepted = 0
        self.num_predicted = self.num_accepted_predicted = 0

    def sibling(
        self,
        request_id: str,
        seed: int,
        on_token: Callable[[int], bool] | None,
        edits: LogitEdits | None = None,
    ) -> Request:
        """Another continuation of the same prompt, which only this request computes. The sibling
        reads the prefix cache even if this request does not (S38).

        Args:
            edits: edits of its logits; None: those of this request.
        """
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
            edits=edits or info.edits,
            reasoning=info.reasoning,
            end_token_ids=info.end_token_ids,
            early_stop_ids=info.early_stop_ids,
            scores_prompt=False,
            segments=info.segments,
            prediction=self.prediction,
        )
        sibling.leader = self
        return sibling

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that siblings share: all of the prompt except its last token."""
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
        """Number of positions that dispatched, unsettled steps compute."""
        return self.num_dispatched - self.num_computed

    @property
    def must_settle(self) -> bool:
        """Whether its next token to compute has to be settled first (S42)."""
        return self.waits_for_samples and self.num_total > len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The settled outputs, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def stop_token_id(self) -> int | None:
        """The stop token that ended it, which is always the last token; else None."""
        last = self.token_ids[-1]
        has_output = len(self.token_ids) > self.num_prompt_tokens
        return last if has_output and last in self.stop_token_ids else None

    @property
    def text_token_ids(self) -> list[int]:
        """The settled outputs that become text: without the stop token, unless it is included."""
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
