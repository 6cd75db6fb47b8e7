"""An engine that is stepped by hand and records the bits of all logits that it samples from."""

from __future__ import annotations

import gc
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.logit_edits import LogitEdits
from ..engine.plan import StepPlan
from ..engine.request import Request
from ..engine.runner import Drafter
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler import DraftCounts
from ..engine.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from ..llm import LLM

LLMFactory = Callable[..., "LLM"]
"""Builds a fresh engine. Called with arguments of ``LLM`` that override its own: on_logits,
max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_blocks, enable_prefix_caching,
overlap, transparent, speculative_config."""


@dataclass(frozen=True)
class CaseRequest:
    """A request whose answer is compared: a prompt, its parameters and its seed."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    edits: LogitEdits | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt plus answer; no end token stops a subject."""
        return len(self.prompt) + (self.params.max_tokens or 0)


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        token_ids: the answer's token ids.
        bits: for each sampled position, digests of the logits' bytes; more than one if the position
            was sampled several times with different bits.
        logprobs: log-probabilities of the tokens, if requested.
        text: the text that the request's watcher has read token by token.
    """

    token_ids: tuple[int, ...]
    bits: Mapping[int, frozenset[bytes]]
    logprobs: tuple[Any, ...] = ()
    text: str = ""

    def first_difference(self, other: Answer) -> str:
        """A description of the first difference; "" if all bits are equal."""
        for position in sorted(self.bits.keys() | other.bits.keys()):
            if self.bits.get(position) != other.bits.get(position):
                return f"logits at position {position}"
        if self.token_ids != other.token_ids:
            return f"tokens {list(self.token_ids)} and {list(other.token_ids)}"
        if self.logprobs != other.logprobs:
            return f"log-probabilities {list(self.logprobs)} and {list(other.logprobs)}"
        if self.text != other.text:
            return f"texts {self.text!r} and {other.text!r}"
        return ""


_Bits = tuple[bytes, tuple[int, ...]]
Case = tuple[str, CaseRequest, Answer]
"""(description of the schedule, subject, answer)."""


class SteppedEngine:
    """An engine and the recorded logits of its requests."""

    def __init__(self, make_llm: LLMFactory, **overrides: Any) -> None:
        self.llm = make_llm(on_logits=self._record, **overrides)
        self.engine = self.llm.engine
        self.scheduler = self.engine.scheduler
        self.full_budget = self.scheduler.max_num_batched_tokens
        # Per request and position: digests, each with the draft tokens before the position.
        self._bits: defaultdict[tuple[str, int], set[_Bits]] = defaultdict(set)
        self._texts: dict[str, list[str]] = {}
        self._num_added = 0

    def _record(self, plan: StepPlan, logits: Tensor) -> None:
        import torch

        rows = logits.detach().cpu().contiguous().view(torch.uint8).numpy()
        drafts = plan.drafts() if plan.has_drafts else {}
        sampled = [
            (request.request_id, start + n - num_samples + 1 + i, drafts.get(index, ())[:i])
            for index, (request, start, n, num_samples) in enumerate(plan.rows())
            for i in range(num_samples)
        ]
        for (name, position, before), row in zip(sampled, rows, strict=True):
            digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            self._bits[name, position].add((digest, before))

    def use_drafter(self, drafter: Drafter | None) -> None:
        """Let a drafter propose draft tokens from now on. Called without live requests."""
        self.scheduler.drafter = drafter
        self.scheduler.draft_counts = DraftCounts(drafter)
        self.scheduler.max_num_samples = self.engine.runner.max_num_samples

    def add(self, subject: CaseRequest, salt: bytes = b"") -> Request:
        """Add a subject. Only requests with the same ``salt`` share cached blocks."""
        self._num_added += 1
        name = f"verify-{self._num_added}"
        has_text = subject.params.logprobs is not None  # with a watcher each token is an event
        request = Request(
            name,
            list(subject.prompt),
            subject.params,
            max_num_tokens=subject.num_tokens,
            on_token=self._watcher(name, subject.prompt) if has_text else None,
            seed=subject.seed,
            cache_salt=salt,
            edits=subject.edits,
        )
        self.engine.add(request)
        return request

    def _watcher(self, name: str, prompt: Sequence[int]) -> Callable[[int], bool]:
        """Reads the text of a request; without a tokenizer a token is one character."""
        pieces = self._texts[name] = []
        tokenizer = self.llm.tokenizer
        push = chr if tokenizer is None else Detokenizer(tokenizer, prompt).push

        def read(token_id: int) -> bool:
            pieces.append(push(token_id))
            return False

        return read

    def step(self, count: int = 1, *, budget: int | None = None) -> None:
        """Take steps, of at most ``budget`` tokens each."""
        self.scheduler.max_num_batched_tokens = budget or self.full_budget
        for _ in range(count):
            if self.engine.has_work:
                self.engine.step()
        self.scheduler.max_num_batched_tokens = self.full_budget

    def step_until(self, request: Request, num_answered: int) -> None:
        """Step until ``request`` has this many settled output tokens, or has ended."""
        while request.finish_reason is None and (
            len(request.token_ids) - request.num_prompt_tokens < num_answered
        ):
            self.step()

    def finish(self) -> None:
        """Step until no work is left."""
        while self.engine.has_work:
            self.step()

    def answer(self, request: Request) -> Answer:
        """The answer of a finished request, whose records are dropped. Overlapping steps may have
        computed positions after its end, which are ignored, as positions after a wrong draft token
        are."""
        self.engine.forget(request)
        length, tokens = request.max_num_tokens, tuple(request.token_ids)
        bits = {}
        for name, position in list(self._bits):
            if name != request.request_id:
                continue
            recorded = self._bits.pop((name, position))
            found = {
                d for d, before in recorded if tokens[position - len(before) : position] == before
            }
            if found and position < length:
                bits[position] = frozenset(found)
        text = "".join(self._texts.pop(request.request_id, ()))
        return Answer(tuple(request.output_token_ids), bits, _logprobs_of(request), text)

    def run(self, subjects: Sequence[CaseRequest], salt: bytes = b"") -> list[Answer]:
        """Run subjects that arrive together."""
        requests = [self.add(subject, salt) for subject in subjects]
        self.finish()
        self._forget_others(requests)
        return [self.answer(request) for request in requests]

    def close(self) -> None:
        """Free the engine's memory for another one. This object is unusable afterwards."""
        del self.llm, self.engine, self.scheduler
        gc.collect()

    def _forget_others(self, requests: Sequence[Request]) -> None:
        kept = {request.request_id for request in requests}
        for name, position in list(self._bits):
            if name not in kept:
                del self._bits[name, position]


def _logprobs_of(request: Request) -> tuple[Any, ...]:
    """Per output (log-probability, rank, most likely tokens, theirs), and the sum last."""
    num_top = request.sampling_params.logprobs
    kept = request.logprobs
    if num_top is None or kept is None:
        return ()
    rows = (rows.row(place, num_top) for rows, place in kept.sampled)
    found = [(own, rank, tuple(ids), tuple(values)) for own, rank, ids, values in rows]
    return (*found, kept.cumulative)
