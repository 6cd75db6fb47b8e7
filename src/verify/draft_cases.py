"""Cases with draft tokens: right, wrong and random ones, made from known answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..engine.request import Request
from .cases import ScheduleCases
from .report import GateReport
from .stepped_engine import Answer, Case, CaseRequest, SteppedEngine

KINDS = ("right", "wrong", "random")
TEMPERATURES = (0.0, 0.8, 1.2)
NUM_DRAFT_TOKENS = 4
SPECULATIVE_CONFIG = {"method": "prediction", "num_speculative_tokens": NUM_DRAFT_TOKENS}
"""Of engines that compute these cases. Their drafter is replaced by :class:`OracleDrafter`."""
_BATCH_SIZES = (1, 3, 12)
_BUDGETS = (7, 33)  # tokens per step
_NUM_PAUSES = 3
_NUM_PRESSED = 2  # draft tokens per row; with more, a right answer ends before its preemption
_CHANCE = 0.6
_NUM_TOP = 2


class OracleDrafter:
    """Proposes tokens from known answers.

    Args:
        answers: the answers of the subjects.
        kind: "right": the answers' own tokens; "wrong": each is another token; "random": each is
            right with a probability of 0.6.
        vocabulary: proposed ids are below it.
        max_draft_tokens: see :class:`.engine.runner.Drafter`.
    """

    def __init__(
        self,
        answers: Mapping[CaseRequest, Answer],
        kind: str,
        vocabulary: int,
        max_draft_tokens: int = NUM_DRAFT_TOKENS,
    ) -> None:
        self._answers = {(s.prompt, s.seed): a.token_ids for s, a in answers.items()}
        self._kind, self._vocabulary = kind, vocabulary
        self.max_draft_tokens = max_draft_tokens
        self._rng = random.Random(0)

    def propose(self, request: Request) -> Sequence[int]:
        tokens, length = request.token_ids, request.num_prompt_tokens
        answer = self._answers.get((tuple(tokens[:length]), request.seed), ())
        return [self._drafted(t) for t in answer[len(tokens) - length :][: self.max_draft_tokens]]

    def _drafted(self, token: int) -> int:
        is_right = self._kind == "right"
        if self._kind == "random":
            is_right = self._rng.random() < _CHANCE
        return token if is_right else (token + 1) % self._vocabulary


class DraftCases:
    """Requests whose rows have draft tokens: at each temperature a plain one and one that edits its
    logits, all with log-probabilities. Those of a kind have the same prompt.

    Attributes:
        subjects: these requests.
        references: their answers alone, without draft tokens.
    """

    def __init__(self, cases: ScheduleCases, report: GateReport) -> None:
        self._cases, self._report = cases, report
        _, plain, edited = cases.cut
        self.subjects = [
            _asked(subject, f"{kind}, temperature {temperature}", temperature, seed)
            for seed, ((kind, subject), temperature) in enumerate(
                product((("plain", plain), ("edited", edited)), TEMPERATURES)
            )
        ]
        self.references: dict[CaseRequest, Answer] = {}

    def refer(self, stepped: SteppedEngine) -> None:
        """Compute the references."""
        self.references = {s: stepped.run([s], b"alone")[0] for s in self.subjects}

    def schedules(self, stepped: SteppedEngine, kind: str) -> Iterator[Case]:
        """Batches; steps of few tokens; prompts found in the cache; pauses in the answer.

        Args:
            kind: one of :data:`KINDS`.
        """
        self._begin(stepped, kind)
        subjects = self.subjects
        for size in _BATCH_SIZES:
            for first in range(0, len(subjects), size):
                batch = [subjects[i % len(subjects)] for i in range(first, first + size)]
                answers = stepped.run(batch, salt=b"drafts %d" % size)
                for subject, answer in zip(batch, answers, strict=True):
                    yield f"batch of {size}", subject, answer
        for budget in _BUDGETS:
            requests = [stepped.add(subject, b"budget %d" % budget) for subject in subjects]
            while stepped.engine.has_work:
                stepped.step(budget=max(budget, len(subjects)))
            for subject, request in zip(subjects, requests, strict=True):
                yield f"steps of {budget} tokens", subject, stepped.answer(request)
        for count in range(_NUM_PAUSES):
            for subject in subjects:
                request = stepped.add(subject, b"paused %d" % count)
                stepped.step_until(request, count)
                if request.finish_reason is None:
                    stepped.engine.pause(request.request_id)
                    stepped.engine.resume(request.request_id)
                stepped.finish()
                num_cached = request.num_cached_tokens
                self._report.num_hit_blocks += num_cached // self._cases.block_size
                yield f"paused after {count} tokens", subject, stepped.answer(request)
        self._end(stepped)

    def preemptions(self, stepped: SteppedEngine, kind: str) -> Iterator[Case]:
        """An older request, which has no draft tokens, needs a block when none is free."""
        self._begin(stepped, kind, _NUM_PRESSED)
        for subject in self.subjects:
            for steps in (0, 1):
                older = stepped.add(self._cases.older(steps))
                request = stepped.add(subject)
                stepped.finish()
                stepped.answer(older)
                self._report.num_preemptions += request.num_preemptions
                yield f"preempted after {steps} steps", subject, stepped.answer(request)
        self._end(stepped)

    def _begin(self, stepped: SteppedEngine, kind: str, num_drafts: int = NUM_DRAFT_TOKENS) -> None:
        drafter = OracleDrafter(self.references, kind, self._cases.vocabulary, num_drafts)
        stepped.use_drafter(drafter)

    def _end(self, stepped: SteppedEngine) -> None:
        counts = stepped.scheduler.draft_counts
        self._report.num_accepted_drafts += counts.num_accepted_tokens
        self._report.num_rejected_drafts += counts.num_draft_tokens - counts.num_accepted_tokens
        stepped.use_drafter(None)


def _asked(subject: CaseRequest, name: str, temperature: float, seed: int) -> CaseRequest:
    changed: dict[str, Any] = {"temperature": temperature, "logprobs": _NUM_TOP}
    params = replace(subject.params, **changed)
    return replace(subject, name=name, params=params, seed=3000 + seed)
