"""The gate of schedule transparency: the same request under many schedules, every bit compared.

A subject is served alone in a fresh engine; that answer is the reference. Then it is served again
beside neighbours, cut, from the cache, preempted, and so on, and its tokens and the bits of the
logits at each of its positions are compared. A gate that finds nothing must be able to find
something: a control runs some of the cases with ``transparent=False`` and must see differences.
Where our kernels are the quickest at every size, that setting changes little and may show none;
then a second control runs the model's own operations, whose products the library chooses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..engine.sampling_params import SamplingParams
from .report import CUT_PROMPT, CaseGroup, GateReport, GateSize
from .stepped_engine import Answer, CaseRequest, MakeLLM, SteppedEngine

_LONG_PROMPT = 100
_MAX_MODEL_LEN = 512
_CONTROLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("control: transparent=False", {}),
    ("control: the model's own operations", {"compile": "eager"}),
)
_NUM_CONTROL_BATCHES = 6
_NUM_CONTROL_CUTS = 8

Case = tuple[str, CaseRequest, Answer]  # what was done, to whom, and what it then answered


class _Gate:
    def __init__(
        self,
        make_llm: MakeLLM,
        vocabulary: int,
        block_size: int,
        size: GateSize,
        note: Callable[[str], None],
    ) -> None:
        self._make_llm = make_llm
        self._size = size
        self._note = note
        self._rng = random.Random(0)
        self._vocabulary = vocabulary
        self._block_size = block_size
        self.report = GateReport()
        lengths = [1, 2, 5, 16, 17, 31, 40, 64]
        self._pool = [self._subject(n, i) for i, n in enumerate(lengths)]
        self._cut = [self._subject(CUT_PROMPT, i) for i in range(2)]
        self._references: dict[CaseRequest, Answer] = {}

    # Subjects ---------------------------------------------------------------------------------

    def _subject(self, num_tokens: int, number: int, *, answer: int | None = None) -> CaseRequest:
        """Greedy and sampled ones in turn."""
        prompt = tuple(self._rng.randrange(self._vocabulary) for _ in range(num_tokens))
        is_random = number % 2 == 1
        params = SamplingParams(
            temperature=0.9 if is_random else 0.0,
            top_p=0.95 if number % 4 == 3 else 1.0,
            max_tokens=answer or self._size.num_tokens,
            ignore_eos=True,
        )
        kind = ("top-p" if number % 4 == 3 else "sampled") if is_random else "greedy"
        return CaseRequest(f"{kind} after {num_tokens} tokens", prompt, params, seed=1000 + number)

    def _stage(self, **overrides: Any) -> SteppedEngine:
        """An engine with room for the largest batch and for the longest neighbour."""
        longest = self._cut[0].num_tokens
        num_blocks = self._size.max_batch * self._num_blocks(longest)
        return SteppedEngine(
            self._make_llm,
            **{
                "max_num_seqs": self._size.max_batch,
                "max_model_len": _MAX_MODEL_LEN,
                "max_num_batched_tokens": max(1024, self._size.max_batch),
                "block_size": self._block_size,
                "num_blocks": max(num_blocks, 2 * self._num_blocks(_MAX_MODEL_LEN)),
                **overrides,
            },
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # ------------------------------------------------------------------------------------------

    def run(self, with_control: bool) -> GateReport:
        subjects = [*self._pool, *self._cut]
        self._note("each request alone")
        stage = self._pressed_stage(overlap=False)
        self._references = {s: stage.run([s])[0] for s in subjects}
        self._pressed_families(stage, ", no overlap" if self._size.both_overlaps else "")
        for overlap in (True, False) if self._size.both_overlaps else (True,):
            stage = self._stage(overlap=overlap)
            words = "" if overlap else ", no overlap"
            self._family(f"batch sizes{words}", self._batches(stage, self._size.batch_sizes))
            self._family(f"neighbours' lengths{words}", self._neighbours(stage))
            self._family(f"cuts of the prompt{words}", self._cuts(stage))
            self._family(f"chunks of the prompt{words}", self._chunks(stage))
            self._family(f"prefix hits{words}", self._hits(stage), "num_hit_blocks")
            cases = self._pauses_over_hits(stage)
            self._family(f"paused and found in the cache{words}", cases, "num_hit_blocks")
            self._family(f"neighbours aborted{words}", self._aborts(stage))
            stage.close()
        if self._size.both_overlaps:
            self._pressed_families(self._pressed_stage(overlap=True), "")
        if with_control:
            self.report.controls = self.controls()
        return self.report

    def _pressed_families(self, stage: SteppedEngine, words: str) -> None:
        self._family(f"paused and computed again{words}", self._pauses(stage))
        cases = self._preemptions(stage)
        self._family(f"preempted for blocks{words}", cases, "num_preemptions")
        stage.close()

    def _family(self, name: str, cases: Iterator[Case], counts: str | None = None) -> None:
        """``counts`` is the number of the report that the cases must raise to show anything."""
        self._note(name)
        family = CaseGroup(name)
        before = getattr(self.report, counts) if counts else None
        for case, subject, answer in cases:
            family.compare(case, subject, answer, self._references[subject])
        if counts and getattr(self.report, counts) == before:
            self.report.idle.append(name)
        self.report.families.append(family)

    def controls(self) -> list[CaseGroup]:
        """Until one finds a difference."""
        found = []
        for name, settings in _CONTROLS:
            self._note(name)
            found.append(self._control(name, settings))
            if found[-1].num_different:
                break
        return found

    def _control(self, name: str, settings: dict[str, Any]) -> CaseGroup:
        found = CaseGroup(name)
        stage = self._stage(enable_prefix_caching=False, transparent=False, **settings)
        subjects = [*self._pool, *self._cut]
        alone = {s: stage.run([s])[0] for s in subjects}
        sizes = self._size.batch_sizes
        few = sizes[:: -(-len(sizes) // _NUM_CONTROL_BATCHES)]
        for cases in (self._batches(stage, few), self._cuts(stage, _NUM_CONTROL_CUTS)):
            for case, subject, answer in cases:
                found.compare(case, subject, answer, alone[subject])
        stage.close()
        return found

    # Cases ------------------------------------------------------------------------------------

    def _batches(self, stage: SteppedEngine, sizes: Sequence[int]) -> Iterator[Case]:
        """All of a batch are subjects, in another order each time; one waits in the largest."""
        for size in sizes:
            subjects = [self._pool[i % len(self._pool)] for i in range(size)]
            self._rng.shuffle(subjects)
            answers = stage.run(subjects, salt=b"batch %d" % size)
            for subject, answer in zip(subjects, answers, strict=True):
                yield f"batch of {size}", subject, answer

    def _neighbours(self, stage: SteppedEngine) -> Iterator[Case]:
        """A neighbour comes first, at the same time, or in the middle of the answer."""
        for i, length in enumerate(self._size.neighbour_lengths):
            neighbour = self._subject(length, i)
            subject = self._cut[i % 2]
            salt = b"neighbour %d" % i
            if i % 3 == 0:
                stage.add(neighbour, salt)
            request = stage.add(subject, salt)
            if i % 3 == 1:
                stage.add(neighbour, salt)
            stage.step_until(request, 1)
            if i % 3 == 2:
                stage.add(neighbour, salt)
            stage.finish()
            yield f"neighbour of {length} tokens", subject, stage.answer(request)

    def _cuts(self, stage: SteppedEngine, count: int | None = None) -> Iterator[Case]:
        for i, cut in enumerate(self._size.cuts[:count]):
            subject = self._cut[i % 2]
            request = stage.add(subject, b"cut %d" % i)
            stage.step(budget=cut)
            stage.finish()
            yield f"cut after {cut}", subject, stage.answer(request)

    def _chunks(self, stage: SteppedEngine) -> Iterator[Case]:
        for i, budget in enumerate(self._size.budgets):
            subject = self._cut[i % 2]
            request = stage.add(subject, b"budget %d" % i)
            while request.num_dispatched < request.num_prompt_tokens:
                stage.step(budget=budget)
            stage.finish()
            yield f"chunks of {budget}", subject, stage.answer(request)

    def _hits(self, stage: SteppedEngine) -> Iterator[Case]:
        """The leading blocks come from another request's prompt, or all from the same request."""
        size = self._block_size
        for i, subject in enumerate(self._cut):
            for count in range((CUT_PROMPT - 1) // size + 1):
                salt = b"hit %d %d" % (i, count)
                shared = subject.prompt[: count * size] or subject.prompt[:1]
                other = (self._vocabulary - 1 - shared[-1],)
                stage.run([CaseRequest("donor", shared + other, subject.params, seed=1)], salt)
                for again in ("", ", and all of itself"):
                    request = stage.add(subject, salt)
                    stage.finish()
                    self.report.num_hit_blocks += request.num_cached_tokens // size
                    yield f"{count} blocks hit{again}", subject, stage.answer(request)

    def _pauses_over_hits(self, stage: SteppedEngine) -> Iterator[Case]:
        """Two of one prompt arrive together and compute blocks of their own. One is paused after
        each number of tokens, a neighbour takes the blocks it gave back, and it goes on with those
        of the other. A third comes when they are done and finds what they left."""
        for count in range(self._size.num_tokens):
            for i, subject in enumerate(self._cut):
                salt = b"paused %d %d" % (count, i)
                twins = [stage.add(subject, salt), stage.add(subject, salt)]
                if count == 0:
                    stage.step()
                stage.step_until(twins[1], count)
                stage.engine.pause(twins[1].request_id)
                stage.step()
                stage.add(self._subject(CUT_PROMPT, count), salt)
                stage.step()
                if twins[1].finish_reason is None:  # else its last token was in flight
                    stage.engine.resume(twins[1].request_id)
                stage.finish()
                for twin, words in zip(twins, ("beside one", "itself"), strict=True):
                    yield f"{words} paused after {count} tokens", subject, stage.answer(twin)
                later = stage.add(subject, salt)
                stage.finish()
                self.report.num_hit_blocks += later.num_cached_tokens // self._block_size
                yield f"behind one paused after {count} tokens", subject, stage.answer(later)

    def _aborts(self, stage: SteppedEngine) -> Iterator[Case]:
        """Two neighbours, one of them long, are aborted after each number of steps."""
        for count in range(self._size.num_tokens + 1):
            subject = self._cut[count % 2]
            salt = b"abort %d" % count
            others = [stage.add(self._subject(_LONG_PROMPT, count), salt)]
            request = stage.add(subject, salt)
            others.append(stage.add(self._subject(3, count), salt))
            stage.step(count)
            for other in others:
                stage.engine.abort(other.request_id)
            stage.finish()
            yield f"abort after {count} steps", subject, stage.answer(request)

    def _pressed_stage(self, overlap: bool) -> SteppedEngine:
        """No prefix cache, so that all is computed again, and blocks for an elder request of
        ``_elder_blocks`` and for one subject, no more."""
        self._elder_blocks = self._num_blocks(self._size.num_tokens) + 2
        num_blocks = self._elder_blocks + self._num_blocks(self._cut[0].num_tokens - 1)
        return self._stage(
            max_num_seqs=2,
            max_model_len=num_blocks * self._block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            overlap=overlap,
        )

    def _pauses(self, stage: SteppedEngine) -> Iterator[Case]:
        """Its blocks are taken after each token of its answer, and once in the prompt."""
        for count in range(self._size.num_tokens):
            for subject in self._cut:
                request = stage.add(subject)
                if count == 0:
                    stage.step(budget=CUT_PROMPT // 2)
                stage.step_until(request, count)
                stage.engine.pause(request.request_id)
                stage.engine.resume(request.request_id)
                stage.finish()
                yield f"taken after {count} tokens", subject, stage.answer(request)

    def _preemptions(self, stage: SteppedEngine) -> Iterator[Case]:
        """An elder request needs one more block after each number of steps, and none is left."""
        size, answer = self._block_size, self._size.num_tokens
        for steps in range(answer):
            subject = self._cut[steps % 2]
            elder = self._subject(self._elder_blocks * size - steps, 0, answer=answer + 2)
            stage.add(elder)
            request = stage.add(subject)
            stage.finish()
            self.report.num_preemptions += request.num_preemptions
            yield f"preempted after {steps} steps", subject, stage.answer(request)


def run_gate(
    make_llm: MakeLLM,
    *,
    vocabulary: int,
    block_size: int = 16,
    size: GateSize | None = None,
    note: Callable[[str], None] = lambda _: None,
    with_control: bool = True,
) -> GateReport:
    """Run the gate.

    Args:
        make_llm: builds a fresh engine; see :data:`.stepped_engine.MakeLLM`. With
            ``transparent=False`` it must build one that may choose its kernels freely.
        vocabulary: prompts are of ids below this.
        block_size: tokens in a KV block; small blocks make more cases.
        size: how much is tried; by default all of it.
        note: called with what is tried next.
        with_control: run the controls as well. On a GPU they need a process of their own
            (:func:`run_controls`): what pins the library's algorithms lasts as long as the process.
    """
    return _Gate(make_llm, vocabulary, block_size, size or GateSize(), note).run(with_control)


def run_controls(
    make_llm: MakeLLM,
    *,
    vocabulary: int,
    block_size: int = 16,
    size: GateSize | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[CaseGroup]:
    """The controls alone; arguments as of :func:`run_gate`. The last one is the first that found a
    difference, if any did."""
    return _Gate(make_llm, vocabulary, block_size, size or GateSize(), note).controls()
