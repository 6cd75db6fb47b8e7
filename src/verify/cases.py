"""The schedules that a request is run under: batched, chunked, cached, paused, preempted.

Each method of :class:`ScheduleCases` is one group of cases. It drives an engine step by step and
yields what was done, the request, and the answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.logit_edits import LogitEdits
from ..engine.request import Request
from ..engine.sampling_params import SamplingParams
from .report import CUT_PROMPT, GateReport, GateSize
from .stepped_engine import Answer, Case, CaseRequest, LLMFactory, SteppedEngine

_LONG_PROMPT = 100
_SCORE_BUDGETS = (7, 33)  # tokens per chunk
MAX_MODEL_LEN = 512


@dataclass(eq=False)
class ScheduleCases:
    """
    Attributes:
        report: counts cache hits and preemptions.
        subjects: the requests whose answers are compared: greedy, sampled, and with edited logits.
        cut: those with prompts of 64 tokens.
    """

    make_llm: LLMFactory
    vocabulary: int
    block_size: int
    size: GateSize
    report: GateReport = field(default_factory=GateReport)

    def __post_init__(self) -> None:
        self._rng = random.Random(0)
        lengths = [1, 2, 5, 16, 17, 31, 40, 64]
        self._pool = [self._request(n, i) for i, n in enumerate(lengths)]
        self._pool += [self._edited(n, i) for i, n in enumerate([3, 24])]
        self.cut = [self._request(CUT_PROMPT, i) for i in range(2)]
        self.cut.append(self._edited(CUT_PROMPT, 1))
        self.subjects = [*self._pool, *self.cut]

    def _request(self, num_tokens: int, number: int, *, answer: int | None = None) -> CaseRequest:
        """A request, alternately greedy and sampled."""
        prompt = tuple(self._rng.randrange(self.vocabulary) for _ in range(num_tokens))
        is_random = number % 2 == 1
        params = SamplingParams(
            temperature=0.9 if is_random else 0.0,
            top_p=0.95 if number % 4 == 3 else 1.0,
            max_tokens=answer or self.size.num_tokens,
            ignore_eos=True,
        )
        kind = ("top-p" if number % 4 == 3 else "sampled") if is_random else "greedy"
        return CaseRequest(f"{kind} after {num_tokens} tokens", prompt, params, seed=1000 + number)

    def _edited(self, num_tokens: int, number: int) -> CaseRequest:
        """A request that edits its logits: restricted to few tokens, or with a bias for some."""
        plain = self._request(num_tokens, number)
        few = self._rng.sample(range(self.vocabulary), 8)
        penalties: dict[str, Any] = {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
        }
        if number % 2:
            chosen = {
                "logit_bias": dict.fromkeys(few, 8.0),
                "min_tokens": self.size.num_tokens // 2,
                **penalties,
            }
        else:
            chosen = {"allowed_token_ids": few, **penalties}
        params = replace(plain.params, **chosen)
        bad_words = [(few[0],), *((few[i], few[j]) for i in range(1, 4) for j in range(1, 4))]
        edits = LogitEdits.of(params, few[4:6], bad_words)
        return replace(plain, name=f"edited, {plain.name}", params=params, edits=edits)

    def engine(self, **overrides: Any) -> SteppedEngine:
        """An engine with capacity for the largest batch and for the longest neighbour."""
        longest = self.cut[0].num_tokens
        num_blocks = self.size.max_batch * self._num_blocks(longest)
        return SteppedEngine(
            self.make_llm,
            **{
                "max_num_seqs": self.size.max_batch,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_batched_tokens": max(1024, self.size.max_batch),
                "block_size": self.block_size,
                "num_blocks": max(num_blocks, 2 * self._num_blocks(MAX_MODEL_LEN)),
                **overrides,
            },
        )

    def pressed_engine(self, overlap: bool, **overrides: Any) -> SteppedEngine:
        """An engine without prefix cache, so that everything is recomputed, and with blocks for
        only an older request of ``_older_blocks`` blocks and one subject."""
        self._older_blocks = self._num_blocks(self.size.num_tokens) + 2
        num_blocks = self._older_blocks + self._num_blocks(self.cut[0].num_tokens - 1)
        return self.engine(
            max_num_seqs=2,
            max_model_len=num_blocks * self.block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            overlap=overlap,
            **overrides,
        )

    def older(self, num_steps: int) -> CaseRequest:
        """A request that fills its blocks, in the pressed engine, after this many steps."""
        num_tokens = self._older_blocks * self.block_size - num_steps
        return self._request(num_tokens, 0, answer=self.size.num_tokens + 2)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------------------------------

    def batches(self, stepped: SteppedEngine, sizes: Sequence[int]) -> Iterator[Case]:
        """Batches of subjects only, in different orders; in the largest one, a request waits."""
        for size in sizes:
            subjects = [self._pool[i % len(self._pool)] for i in range(size)]
            self._rng.shuffle(subjects)
            answers = stepped.run(subjects, salt=b"batch %d" % size)
            for subject, answer in zip(subjects, answers, strict=True):
                yield f"batch of {size}", subject, answer

    def neighbours(self, stepped: SteppedEngine) -> Iterator[Case]:
        """A neighbour arrives before, together with, or in the middle of the answer."""
        for i, length in enumerate(self.size.neighbour_lengths):
            neighbour = self._request(length, i)
            subject = self.cut[i % len(self.cut)]
            salt = b"neighbour %d" % i
            if i % 3 == 0:
                stepped.add(neighbour, salt)
            request = stepped.add(subject, salt)
            if i % 3 == 1:
                stepped.add(neighbour, salt)
            stepped.step_until(request, 1)
            if i % 3 == 2:
                stepped.add(neighbour, salt)
            stepped.finish()
            yield f"neighbour of {length} tokens", subject, stepped.answer(request)

    def cuts(self, stepped: SteppedEngine, count: int | None = None) -> Iterator[Case]:
        for i, cut in enumerate(self.size.cuts[:count]):
            subject = self.cut[i % len(self.cut)]
            request = stepped.add(subject, b"cut %d" % i)
            stepped.step(budget=cut)
            stepped.finish()
            yield f"cut after {cut}", subject, stepped.answer(request)

    def chunks(self, stepped: SteppedEngine) -> Iterator[Case]:
        for i, budget in enumerate(self.size.budgets):
            subject = self.cut[i % len(self.cut)]
            request = stepped.add(subject, b"budget %d" % i)
            while request.num_dispatched < request.num_prompt_tokens:
                stepped.step(budget=budget)
            stepped.finish()
            yield f"chunks of {budget}", subject, stepped.answer(request)

    def hits(self, stepped: SteppedEngine) -> Iterator[Case]:
        """The leading blocks come from another request's prompt, or all from an equal request."""
        size = self.block_size
        for i, subject in enumerate(self.cut):
            for count in range((CUT_PROMPT - 1) // size + 1):
                salt = b"hit %d %d" % (i, count)
                shared = subject.prompt[: count * size] or subject.prompt[:1]
                other = (self.vocabulary - 1 - shared[-1],)
                stepped.run([CaseRequest("donor", shared + other, subject.params, seed=1)], salt)
                for again in ("", ", and all of itself"):
                    request = stepped.add(subject, salt)
                    stepped.finish()
                    self.report.num_hit_blocks += request.num_cached_tokens // size
                    yield f"{count} blocks hit{again}", subject, stepped.answer(request)

    def pauses_over_hits(self, stepped: SteppedEngine) -> Iterator[Case]:
        """Two equal requests arrive together and compute their own blocks. One is paused after each
        number of tokens; a neighbour takes the blocks that it released, and it resumes with the
        blocks of the other. A third request arrives when they are done and hits their blocks."""
        for count in range(self.size.num_tokens):
            for i, subject in enumerate(self.cut):
                salt = b"paused %d %d" % (count, i)
                twins = [stepped.add(subject, salt), stepped.add(subject, salt)]
                if count == 0:
                    stepped.step()
                stepped.step_until(twins[1], count)
                stepped.engine.pause(twins[1].request_id)
                stepped.step()
                stepped.add(self._request(CUT_PROMPT, count), salt)
                stepped.step()
                if twins[1].finish_reason is None:  # otherwise its last token was in flight
                    stepped.engine.resume(twins[1].request_id)
                stepped.finish()
                for twin, words in zip(twins, ("beside one", "itself"), strict=True):
                    yield f"{words} paused after {count} tokens", subject, stepped.answer(twin)
                later = stepped.add(subject, salt)
                stepped.finish()
                self.report.num_hit_blocks += later.num_cached_tokens // self.block_size
                yield f"behind one paused after {count} tokens", subject, stepped.answer(later)

    def aborts(self, stepped: SteppedEngine) -> Iterator[Case]:
        """Two neighbours, one of them long, are aborted after each number of steps."""
        for count in range(self.size.num_tokens + 1):
            subject = self.cut[count % len(self.cut)]
            salt = b"abort %d" % count
            others = [stepped.add(self._request(_LONG_PROMPT, count), salt)]
            request = stepped.add(subject, salt)
            others.append(stepped.add(self._request(3, count), salt))
            stepped.step(count)
            for other in others:
                stepped.engine.abort(other.request_id)
            stepped.finish()
            yield f"abort after {count} steps", subject, stepped.answer(request)

    def pauses(self, stepped: SteppedEngine) -> Iterator[Case]:
        """The subject is paused after each token of its answer, and once in the prompt."""
        for count in range(self.size.num_tokens):
            for subject in self.cut:
                request = stepped.add(subject)
                if count == 0:
                    stepped.step(budget=CUT_PROMPT // 2)
                stepped.step_until(request, count)
                stepped.engine.pause(request.request_id)
                stepped.engine.resume(request.request_id)
                stepped.finish()
                yield f"taken after {count} tokens", subject, stepped.answer(request)

    def preemptions(self, stepped: SteppedEngine) -> Iterator[Case]:
        """After each number of steps, an older request needs a block when none is free."""
        for steps in range(self.size.num_tokens):
            subject = self.cut[steps % len(self.cut)]
            stepped.add(self.older(steps))
            request = stepped.add(subject)
            stepped.finish()
            self.report.num_preemptions += request.num_preemptions
            yield f"preempted after {steps} steps", subject, stepped.answer(request)


class ScoreCases:
    """Scores compared with sampled log-probabilities: both must give the same float.

    The references are the log-probabilities of requests that run alone. Each is sampled again in a
    batch, from the cache and after a pause. Prompt and answer are also scored as one prompt, whose
    log-probabilities at the answer's tokens must be the same floats.

    Args:
        stepped: an engine, with or without a prefix cache.
        subjects: requests whose answers are sampled and scored.
    """

    def __init__(self, stepped: SteppedEngine, subjects: Sequence[CaseRequest]) -> None:
        self._stepped = stepped
        self._sampling = {s: replace(s, params=replace(s.params, logprobs=0)) for s in subjects}
        self._num_scored: dict[str, int] = {}
        self.references = {s: self._sampled([s], b"alone")[0] for s in subjects}

    def __iter__(self) -> Iterator[Case]:
        subjects = list(self._sampling)
        for words in ("together", "together again"):
            answers = self._sampled(subjects, b"together")
            yield from self._cases(f"sampled {words}", subjects, answers)
        for subject in subjects:
            request = self._add(subject, b"paused")
            self._stepped.step_until(request, 1)
            self._pause(request)
            yield "sampled and paused", subject, self._answer(request)
            yield "scored alone", subject, self._answer(self._add_score(subject))
            request = self._add_score(subject)
            self._stepped.step(budget=len(subject.prompt))
            self._pause(request)
            yield "scored and paused", subject, self._answer(request)
        requests = [self._add_score(subject) for subject in subjects]
        yield from self._cases("scored together", subjects, map(self._answer, requests))
        for budget in _SCORE_BUDGETS:
            requests = [self._add_score(subject) for subject in subjects[-2:]]
            while self._stepped.engine.has_work:
                self._stepped.step(budget=max(budget, len(requests)))
            answers = list(map(self._answer, requests))
            yield from self._cases(f"scored in chunks of {budget}", subjects[-2:], answers)

    @staticmethod
    def _cases(
        name: str, subjects: Sequence[CaseRequest], answers: Iterator[Answer] | Sequence[Answer]
    ) -> Iterator[Case]:
        for subject, answer in zip(subjects, answers, strict=True):
            yield name, subject, answer

    def _sampled(self, subjects: Sequence[CaseRequest], salt: bytes) -> list[Answer]:
        requests = [self._add(subject, salt) for subject in subjects]
        return list(map(self._answer, requests))

    def _add(self, subject: CaseRequest, salt: bytes) -> Request:
        return self._stepped.add(self._sampling[subject], b"logprobs " + salt)

    def _add_score(self, subject: CaseRequest) -> Request:
        """Add prompt and answer as a prompt; the token sampled after it is discarded."""
        answer = self.references[subject].token_ids
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        scored = CaseRequest(subject.name, (*subject.prompt, *answer), params, seed=0)
        request = self._stepped.add(scored, b"logprobs together")
        self._num_scored[request.request_id] = len(answer)
        return request

    def _pause(self, request: Request) -> None:
        engine = self._stepped.engine
        if request.finish_reason is None:
            engine.pause(request.request_id)
            self._stepped.step()
        if request.finish_reason is None:
            engine.resume(request.request_id)

    def _answer(self, request: Request) -> Answer:
        """The answer's tokens and log-probabilities; of a scored request, those at its end."""
        self._stepped.finish()
        found = self._stepped.answer(request)
        kept = request.logprobs
        assert kept is not None
        token_ids, rows = found.token_ids, list(kept.sampled)
        num_scored = self._num_scored.get(request.request_id, 0)
        if num_scored:
            rows = list(kept.prompt)[-num_scored:]
            token_ids = tuple(request.token_ids[len(request.token_ids) - len(rows) - 1 : -1])
        logprobs = tuple(part.row(index, 0)[0] for part, index in rows)
        return Answer(token_ids, {}, logprobs)
