"""The gate of schedule transparency: compares the same request, bit by bit, under many schedules.

A subject runs alone in a fresh engine; that answer is the reference. Then it runs batched, chunked,
from the cache, preempted, and so on. Its tokens, and the bits of the logits at each of its
positions, are compared with the reference. To show that the gate can detect a difference, a control
runs some of the cases with ``transparent=False``. If our kernels are the fastest at every size,
that setting may change nothing. Then a second control runs the model's own operations, whose matmul
kernels the library chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import InvalidInputError
from .cases import ScheduleCases, ScoreCases
from .draft_cases import KINDS, SPECULATIVE_CONFIG, DraftCases
from .report import CaseGroup, GateReport, GateSize
from .stepped_engine import Answer, Case, CaseRequest, LLMFactory, SteppedEngine

_CONTROLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("control: transparent=False", {}),
    ("control: the model's own operations", {"compile": "eager", "quantization": None}),
)
_NUM_CONTROL_BATCHES = 6
_NUM_CONTROL_CUTS = 8


class _Gate:
    def __init__(self, cases: ScheduleCases, on_progress: Callable[[str], None]) -> None:
        self._cases, self._on_progress = cases, on_progress
        self._size, self.report = cases.size, cases.report
        self._references: dict[CaseRequest, Answer] = {}

    def run(self, with_control: bool, only_drafts: bool) -> GateReport:
        if not only_drafts:
            self._run_schedules()
        self._run_drafts(is_required=only_drafts)
        if with_control:
            self.report.controls = self.controls(only_drafts)
        return self.report

    def _run_schedules(self) -> None:
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
            scores = ScoreCases(stepped, subjects)
            name = f"scores beside sampled log-probabilities{words}"
            self._group(name, scores, references=scores.references)
            stepped.close()
        if self._size.both_overlaps:
            self._pressed_groups(self._cases.pressed_engine(overlap=True), "")

    def _run_drafts(self, is_required: bool) -> None:
        """The groups with draft tokens. Their references are computed without draft tokens, in an
        engine of their own.

        Args:
            is_required: raise the error of an engine that supports no draft tokens. Otherwise the
                groups are left out.
        """
        try:
            pressed = self._cases.pressed_engine(True, speculative_config=SPECULATIVE_CONFIG)
        except InvalidInputError as error:
            if is_required or error.field != "speculative_config":
                raise
            return
        cases = DraftCases(self._cases, self.report)
        self._on_progress("each request alone, without draft tokens")
        cases.refer(pressed)
        for kind in KINDS:
            found = cases.preemptions(pressed, kind)
            name = f"draft tokens: {kind}, preempted"
            self._group(name, found, "num_preemptions", cases.references)
        pressed.close()
        for overlap in (True, False) if self._size.both_overlaps else (True,):
            stepped = self._cases.engine(overlap=overlap, speculative_config=SPECULATIVE_CONFIG)
            words = "" if overlap else ", no overlap"
            for kind in KINDS:
                counts = f"num_{'rejected' if kind == 'wrong' else 'accepted'}_drafts"
                found = cases.schedules(stepped, kind)
                self._group(f"draft tokens: {kind}{words}", found, counts, cases.references)
            stepped.close()

    def _pressed_groups(self, stepped: SteppedEngine, words: str) -> None:
        self._group(f"paused and computed again{words}", self._cases.pauses(stepped))
        cases = self._cases.preemptions(stepped)
        self._group(f"preempted for blocks{words}", cases, "num_preemptions")
        stepped.close()

    def _group(
        self,
        name: str,
        cases: Iterable[Case],
        counts: str | None = None,
        references: Mapping[CaseRequest, Answer] | None = None,
    ) -> None:
        """Run one group of cases.

        Args:
            counts: a counter of the report that the cases must increase; else the group is idle.
            references: None: each subject's answer alone.
        """
        self._on_progress(name)
        group = CaseGroup(name)
        before = getattr(self.report, counts) if counts else None
        group.compare(cases, references or self._references)
        if counts and getattr(self.report, counts) == before:
            self.report.idle.append(name)
        self.report.groups.append(group)

    def controls(self, only_drafts: bool) -> list[CaseGroup]:
        """Run controls until one finds a difference."""
        found = []
        for name, settings in _CONTROLS:
            self._on_progress(name)
            try:
                found += self._control(name, settings, only_drafts)
            except InvalidInputError:
                if not found:
                    raise
                break  # the model's own operations cannot use a checkpoint's quantised weights
            if found[-1].num_different:
                break
        return found

    def _control(self, name: str, settings: dict[str, Any], only_drafts: bool) -> list[CaseGroup]:
        """One control: its groups of scores, of draft tokens and of schedules."""
        settings = {"enable_prefix_caching": False, "transparent": False, **settings}
        groups = []
        try:
            stepped = self._cases.engine(speculative_config=SPECULATIVE_CONFIG, **settings)
        except InvalidInputError as error:
            if only_drafts or error.field != "speculative_config":
                raise
            stepped = self._cases.engine(**settings)
        else:
            drafts, drafted = (
                CaseGroup(f"{name}, draft tokens"),
                DraftCases(self._cases, GateReport()),
            )
            drafted.refer(stepped)
            drafts.compare(drafted.schedules(stepped, "right"), drafted.references)
            groups.append(drafts)
        if not only_drafts:
            subjects = self._cases.subjects
            scores, cases = CaseGroup(f"{name}, scores"), ScoreCases(stepped, subjects)
            scores.compare(cases, cases.references)
            alone = {s: stepped.run([s])[0] for s in subjects}
            sizes, found = self._size.batch_sizes, CaseGroup(name)
            few = sizes[:: -(-len(sizes) // _NUM_CONTROL_BATCHES)]
            found.compare(self._cases.batches(stepped, few), alone)
            found.compare(self._cases.cuts(stepped, _NUM_CONTROL_CUTS), alone)
            groups += [scores, found]
        stepped.close()
        return groups


def run_gate(
    make_llm: LLMFactory,
    *,
    vocabulary: int,
    block_size: int = 16,
    size: GateSize | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    with_control: bool = True,
    only_control: bool = False,
    only_drafts: bool = False,
) -> GateReport:
    """Run the gate.

    Args:
        make_llm: builds a fresh engine; see :data:`.stepped_engine.LLMFactory`. With
            ``transparent=False`` it must build one that may choose its kernels by batch size.
        vocabulary: prompts consist of ids below this.
        block_size: tokens per KV block; smaller blocks give more cases.
        size: the amount of cases; by default all.
        on_progress: called with the name of the next group.
        with_control: also run the controls. On a GPU they need a separate process
            (``only_control``), because the library's algorithms stay pinned within a process.
        only_control: run the controls only.
        only_drafts: run the groups with draft tokens only, and their controls.

    Raises:
        InvalidInputError: ``only_drafts``, and the engine supports no draft tokens.
    """
    cases = ScheduleCases(make_llm, vocabulary, block_size, size or GateSize())
    gate = _Gate(cases, on_progress)
    if only_control:
        gate.report.controls = gate.controls(only_drafts)
        return gate.report
    return gate.run(with_control, only_drafts)
