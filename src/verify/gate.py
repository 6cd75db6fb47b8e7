"""The gate of schedule transparency: the same request under many schedules, every bit compared.

A subject is served alone in a fresh engine; that answer is the reference. Then it is served again
beside neighbours, cut, from the cache, preempted, and so on, and its tokens and the bits of the
logits at each of its positions are compared. A gate that finds nothing must be able to find
something: a control runs some of the cases with ``transparent=False`` and must see differences.
Where our kernels are the quickest at every size, that setting changes little and may show none;
then a second control runs the model's own operations, whose products the library chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .cases import Case, ScheduleCases
from .report import CaseGroup, GateReport, GateSize
from .score_cases import ScoreCases
from .stepped_engine import Answer, CaseRequest, LLMFactory, SteppedEngine

_CONTROLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("control: transparent=False", {}),
    ("control: the model's own operations", {"compile": "eager", "quantization": None}),
)
_NUM_CONTROL_BATCHES = 6
_NUM_CONTROL_CUTS = 8


class _Gate:
    def __init__(
        self,
        make_llm: LLMFactory,
        vocabulary: int,
        block_size: int,
        size: GateSize,
        on_progress: Callable[[str], None],
    ) -> None:
        self._size = size
        self._on_progress = on_progress
        self.report = GateReport()
        self._cases = ScheduleCases(make_llm, vocabulary, block_size, size, self.report)
        self._references: dict[CaseRequest, Answer] = {}

    def run(self, with_control: bool) -> GateReport:
        subjects = self._cases.subjects
        self._on_progress("each request alone")
        stepped = self._cases.pressed_engine(overlap=False)
        self._references = {s: stepped.run([s])[0] for s in subjects}
        self._pressed_groups(stepped, ", no overlap" if self._size.both_overlaps else "")
        for overlap in (True, False) if self._size.both_overlaps else (True,):
            stepped = self._cases.engine(overlap=overlap)
            words = "" if overlap else ", no overlap"
            self._group(f"batch sizes{words}", self._cases.batches(stepped, self._size.batch_sizes))
            self._group(f"neighbours' lengths{words}", self._cases.neighbours(stepped))
            self._group(f"cuts of the prompt{words}", self._cases.cuts(stepped))
            self._group(f"chunks of the prompt{words}", self._cases.chunks(stepped))
            self._group(f"prefix hits{words}", self._cases.hits(stepped), "num_hit_blocks")
            cases = self._cases.pauses_over_hits(stepped)
            self._group(f"paused and found in the cache{words}", cases, "num_hit_blocks")
            self._group(f"neighbours aborted{words}", self._cases.aborts(stepped))
            self._scores(f"scores beside sampled log-probabilities{words}", stepped)
            stepped.close()
        if self._size.both_overlaps:
            self._pressed_groups(self._cases.pressed_engine(overlap=True), "")
        if with_control:
            self.report.controls = self.controls()
        return self.report

    def _pressed_groups(self, stepped: SteppedEngine, words: str) -> None:
        self._group(f"paused and computed again{words}", self._cases.pauses(stepped))
        cases = self._cases.preemptions(stepped)
        self._group(f"preempted for blocks{words}", cases, "num_preemptions")
        stepped.close()

    def _group(self, name: str, cases: Iterator[Case], counts: str | None = None) -> None:
        """``counts`` is the number of the report that the cases must raise to show anything."""
        self._on_progress(name)
        group = CaseGroup(name)
        before = getattr(self.report, counts) if counts else None
        for case, subject, answer in cases:
            group.compare(case, subject, answer, self._references[subject])
        if counts and getattr(self.report, counts) == before:
            self.report.idle.append(name)
        self.report.groups.append(group)

    def _scores(self, name: str, stepped: SteppedEngine) -> None:
        self._on_progress(name)
        self.report.groups.append(self._compare_scores(CaseGroup(name), stepped))

    def _compare_scores(self, found: CaseGroup, stepped: SteppedEngine) -> CaseGroup:
        cases = ScoreCases(stepped, self._cases.subjects)
        for case, subject, answer in cases:
            found.compare(case, subject, answer, cases.references[subject])
        return found

    def controls(self) -> list[CaseGroup]:
        """Until one finds a difference."""
        found = []
        for name, settings in _CONTROLS:
            self._on_progress(name)
            found += self._control(name, settings)
            if found[-1].num_different:
                break
        return found

    def _control(self, name: str, settings: dict[str, Any]) -> list[CaseGroup]:
        """Of scores, and of schedules."""
        found = CaseGroup(name)
        stepped = self._cases.engine(enable_prefix_caching=False, transparent=False, **settings)
        subjects = self._cases.subjects
        alone = {s: stepped.run([s])[0] for s in subjects}
        sizes = self._size.batch_sizes
        few = sizes[:: -(-len(sizes) // _NUM_CONTROL_BATCHES)]
        for cases in (
            self._cases.batches(stepped, few),
            self._cases.cuts(stepped, _NUM_CONTROL_CUTS),
        ):
            for case, subject, answer in cases:
                found.compare(case, subject, answer, alone[subject])
        scores = self._compare_scores(CaseGroup(f"{name}, scores"), stepped)
        stepped.close()
        return [scores, found]


def run_gate(
    make_llm: LLMFactory,
    *,
    vocabulary: int,
    block_size: int = 16,
    size: GateSize | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    with_control: bool = True,
) -> GateReport:
    """Run the gate.

    Args:
        make_llm: builds a fresh engine; see :data:`.stepped_engine.LLMFactory`. With
            ``transparent=False`` it must build one that may choose its kernels freely.
        vocabulary: prompts are of ids below this.
        block_size: tokens in a KV block; small blocks make more cases.
        size: how much is tried; by default all of it.
        on_progress: called with what is tried next.
        with_control: run the controls as well. On a GPU they need a process of their own
            (:func:`run_controls`): what pins the library's algorithms lasts as long as the process.
    """
    return _Gate(make_llm, vocabulary, block_size, size or GateSize(), on_progress).run(
        with_control
    )


def run_controls(
    make_llm: LLMFactory,
    *,
    vocabulary: int,
    block_size: int = 16,
    size: GateSize | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[CaseGroup]:
    """The controls alone; arguments as of :func:`run_gate`. The last one is the first that found a
    difference, if any did."""
    gate = _Gate(make_llm, vocabulary, block_size, size or GateSize(), on_progress)
    return gate.controls()
