"""Cases with draft tokens: right, wrong and random ones, made from known answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from ..engine.request import Request
from .report import GateReport
from .stepped_engine import Answer, Case, CaseRequest, SteppedEngine

KINDS = ("right", "wrong", "random")
_BATCH_SIZES = (1, 3, 8)
_BUDGETS = (5, 33)  # tokens per step
_CHANCE = 0.6


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
        max_draft_tokens: int = 4,
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


def draft_cases(
    stepped: SteppedEngine,
    subjects: Sequence[CaseRequest],
    references: Mapping[CaseRequest, Answer],
    vocabulary: int,
    kind: str,
    report: GateReport,
) -> Iterator[Case]:
    """Batches of subjects whose rows have draft tokens, whole and in chunks. Some batches find
    their prompts in the cache.

    Args:
        references: the answers that the drafts come from.
        kind: one of :data:`KINDS`.
        report: counts accepted and rejected draft tokens.
    """
    stepped.use_drafter(OracleDrafter(references, kind, vocabulary))
    for size in _BATCH_SIZES:
        batch = [subjects[i % len(subjects)] for i in range(size)]
        salt = f"drafts {size}".encode()
        for subject, answer in zip(batch, stepped.run(batch, salt), strict=True):
            yield f"batch of {size}", subject, answer
    for budget in _BUDGETS:
        requests = [stepped.add(subject, b"drafts %d" % budget) for subject in subjects[-2:]]
        while stepped.engine.has_work:
            stepped.step(budget=budget)
        for subject, request in zip(subjects[-2:], requests, strict=True):
            yield f"steps of {budget} tokens", subject, stepped.answer(request)
    counts = stepped.scheduler.draft_counts
    report.num_accepted_drafts += counts.num_accepted_tokens
    report.num_rejected_drafts += counts.num_draft_tokens - counts.num_accepted_tokens
    stepped.use_drafter(None)
