"""Scores beside sampled log-probabilities: one float, however either is computed.

The reference is what a request gets with ``logprobs`` when it is served alone. It is sampled again
beside others, from the cache and after a pause; and its prompt and answer are scored as a prompt,
whose log-probabilities must be the same floats where the answer's tokens stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..engine.request import Request
from ..engine.sampling_params import SamplingParams
from .stepped_engine import Answer, Case, CaseRequest, SteppedEngine

_BUDGETS = (7, 33)  # tokens of a chunk


class ScoreCases:
    """
    Args:
        stepped: an engine with a prefix cache, or without.
        subjects: whose answers are sampled and scored.
    """

    def __init__(self, stepped: SteppedEngine, subjects: Sequence[CaseRequest]) -> None:
        self._stepped = stepped
        self._asking = {s: replace(s, params=replace(s.params, logprobs=0)) for s in subjects}
        self._num_scored: dict[str, int] = {}
        self.references = {s: self._sampled([s], b"alone")[0] for s in subjects}

    def __iter__(self) -> Iterator[Case]:
        subjects = list(self._asking)
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
        for budget in _BUDGETS:
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
        return self._stepped.add(self._asking[subject], b"logprobs " + salt)

    def _add_score(self, subject: CaseRequest) -> Request:
        """Prompt and answer as a prompt; the token sampled behind it is dropped."""
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
        """The answer's tokens and their log-probabilities; of a scored one those of its end."""
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
