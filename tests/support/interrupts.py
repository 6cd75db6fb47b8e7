"""Raise exceptions at any line of the engine during a user's calls (property S37).

    python -m tests.support.interrupts 10000 [first seed]

Raises at that many places, in as many random runs, and prints the outcomes.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pagespec.engine
import pagespec.llm
from pagespec import EngineError, InvalidInputError, RequestOutput, SamplingParams
from pagespec.engine.invariants import check_state
from pagespec.engine.record import End
from pagespec.engine.request import Request
from spec import replay
from tests.support.content_llm import answer_alone, content_llm, text_alone
from tests.support.content_runner import TOKEN_STRIDE

_OURS = (str(Path(pagespec.engine.__file__).parent), pagespec.llm.__file__)
_KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, MemoryError, RuntimeError)


class LineRaiser:
    """While open, counts the executed lines of ``src/engine`` and ``src/llm.py`` and raises at some
    of them.

    It does not raise between the end of a ``with`` block of a lock and the lock's release: CPython
    handles signals only after calls and jumps, so no interrupt occurs there.

    Args:
        places: which lines raise, counted from the previous raise (the first from the start).
        file: the only file whose lines count for the first place; empty: all.
    """

    def __init__(self, places: list[int], kind: type[BaseException], file: str = "") -> None:
        self._places = list(places)
        self._kind, self._file = kind, file
        self._is_ours: dict[str, bool] = {}  # by file; to hash a frame's code takes far longer
        self.num_lines = 0
        self.lines_of: Counter[str] = Counter()  # how many, by file
        self.raised_at: list[str] = []

    def __enter__(self) -> LineRaiser:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        is_ours = self._is_ours.get(name)
        if is_ours is None:
            is_ours = self._is_ours[name] = name.startswith(_OURS)
        if not is_ours or not self._places:
            return None
        locks, entered = _lines_that_lock(name), set()

        def on_event(frame: FrameType, event: str, _argument: object) -> Any:
            if event == "line" and self._places:
                number = frame.f_lineno
                if number not in entered:
                    if number in locks:
                        entered.add(number)
                    self._on_line(frame)
            return on_event

        return on_event

    def _on_line(self, frame: FrameType) -> None:
        self.lines_of[frame.f_code.co_filename] += 1
        if self._file not in ("", frame.f_code.co_filename):
            return
        self.num_lines += 1
        if self.num_lines == self._places[0]:
            self._places.pop(0)
            self.num_lines, self._file = 0, ""
            name, number = frame.f_code.co_filename, frame.f_lineno
            line = linecache.getline(name, number).strip()
            self.raised_at.append(f"{Path(name).name}:{number} {line}")
            if self._places:
                sys.setprofile(self._go_on)
            raise self._kind("injected")

    def _go_on(self, *_: object) -> None:
        """CPython stops tracing when a trace function raises. Resume tracing at the next call, or
        where the exception leaves its frame."""
        sys.setprofile(None)
        sys.settrace(self._on_call)


@functools.cache
def _lines_that_lock(name: str) -> frozenset[int]:
    lines = linecache.getlines(name)
    return frozenset(i for i, line in enumerate(lines, 1) if line.strip().startswith("with self._"))


class Ends:
    """The owner of requests that no call waits for; records the ends that it received."""

    def __init__(self) -> None:
        self.ends: dict[Request, End] = {}

    def on_ends(self, ends: Mapping[Request, End]) -> None:
        self.ends.update(ends)

    def on_step(self, num_tokens: int) -> None: ...


class Run:
    """A random program of calls on a new ``LLM``; the program is the same each time it runs."""

    def __init__(self, seed: int, trace: Path | None = None) -> None:
        rng = self.rng = random.Random(seed)
        block_size = rng.choice([1, 1, 2, 3])
        max_num_seqs = rng.randint(1, 4)
        self.llm = content_llm(
            num_blocks=rng.randint(6, 10),
            block_size=block_size,
            pipeline_depth=rng.choice([0, 1, 2]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.randint(0, 5),
            enable_prefix_caching=rng.random() < 0.8,
            policy=rng.choice(["fcfs", "shortest_first", "priority", "fair"]),
            trace=trace,
        )
        self.requests: list[Request] = []  # all that the scheduler ever admitted
        scheduler = self.llm.engine.scheduler
        add = scheduler.add

        def recorded_add(request: Request, siblings: Sequence[Request] = ()) -> None:
            try:
                add(request, siblings)
            finally:
                for arrival in (request, *siblings):
                    if scheduler.requests.get(arrival.request_id) is arrival:
                        self.requests.append(arrival)

        scheduler.add = recorded_add  # type: ignore[method-assign]
        self._old_prompts: list[list[int]] = []
        self._owner, self._owned = Ends(), list[Request]()

    def question(self) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        prompt = [rng.randrange(2) * TOKEN_STRIDE for _ in range(rng.randint(1, 5))]
        if self._old_prompts and rng.random() < 0.5:  # meet the cache
            prompt = (rng.choice(self._old_prompts) + prompt)[: self.llm.max_model_len - 1]
        self._old_prompts.append(prompt)
        params = SamplingParams(
            max_tokens=rng.randint(1, 5),
            seed=rng.randrange(2),
            ignore_eos=rng.random() < 0.7,
            n=rng.choice([1, 1, 2, 3]),
        )
        return prompt, params

    def calls(self) -> None:
        """A user's calls: every kind of call, some concurrent, some abandoned."""
        rng, llm = self.rng, self.llm
        if rng.random() < 0.25:
            llm.engine.runner.fail_at_step = rng.randint(0, 4)
        self.may_fail(self.own)
        self.may_fail(self.generate)
        self.may_fail(self.own)
        questions = [self.question() for _ in range(rng.randint(1, 4))]
        results = llm.generate_iter(questions, window=rng.randint(1, 4))
        prompt, params = self.question()
        pieces = llm.stream_all(prompt, params)
        self.may_fail(lambda: next(pieces, None))
        self.may_fail(lambda: next(results, None))
        for request_id in list(llm.engine.scheduler.requests)[:2]:
            self.of_live(llm.engine.pause, request_id)
            self.may_fail(llm.engine.step)
            self.of_live(llm.engine.resume, request_id)
        if rng.random() < 0.3 and llm.engine.scheduler.requests:
            self.of_live(llm.engine.abort, rng.choice(list(llm.engine.scheduler.requests)))
        if rng.random() < 0.3:
            self.may_fail(self.reset_prefix_cache)
        if rng.random() < 0.5:
            results.close()
        if rng.random() < 0.5:
            del pieces  # closed by its finalizer
        else:
            self.may_fail(lambda: list(pieces))
        self.may_fail(lambda: list(results))
        self.may_fail(self.stream)

    def may_fail(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(EngineError):
            call()

    def of_live(self, operation: Callable[[str], Any], request_id: str) -> None:
        """Run an operation on a live request. It may be rejected only if the engine must first
        finish an interrupted recovery, which leaves no request alive."""
        engine = self.llm.engine
        if request_id in engine.scheduler.requests:
            is_recovering = engine._is_changing
            try:
                operation(request_id)
            except InvalidInputError:
                if not is_recovering:
                    raise

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()
        self.llm.engine.runner.change_weights()  # type: ignore[attr-defined]

    def own(self) -> None:
        """Requests whose ends are delivered to a callback, as to another thread."""
        prompt, params = self.question()
        leader, *siblings = self.llm.factory.make(self.llm.reader.read(prompt), params)
        self.llm.engine.add(leader, None, siblings, self._owner)
        self._owned += [leader, *siblings]

    def generate(self) -> None:
        questions = [self.question() for _ in range(self.rng.randint(1, 4))]
        prompts, params = zip(*questions, strict=True)
        outputs = self.llm.generate(list(prompts), list(params), use_tqdm=False)
        for (prompt, one), output in zip(questions, outputs, strict=True):
            self.check(prompt, one, output)

    def check(self, prompt: list[int], params: SamplingParams, output: RequestOutput) -> None:
        assert len(output.outputs) == params.n
        for i, answer in enumerate(output.outputs):
            expected = answer_alone(self.llm, prompt, params, i)
            assert (answer.index, answer.token_ids) == (i, expected), (output, expected)

    def stream(self) -> None:
        prompt, params = self.question()
        texts = [""] * params.n
        for i, piece in self.llm.stream_all(prompt, params):
            texts[i] += piece
        assert texts == [text_alone(self.llm, prompt, params, i) for i in range(params.n)]

    def iterate(self) -> None:
        questions = [self.question() for _ in range(3)]
        for question, output in zip(questions, self.llm.generate_iter(questions), strict=True):
            assert isinstance(output, RequestOutput), output
            self.check(*question, output)

    def check_whole(self) -> None:
        """No trace of the interrupted call is left, and the next calls are served."""
        engine = self.llm.engine
        self.llm.engine.runner.fail_at_step = None
        if not engine._is_changing:
            check_state(engine.scheduler)
        while engine.has_work:
            self.may_fail(engine.step)
        for request in self._owned:
            end = self._owner.ends[request]
            assert (end.error is None) == (request.finish_reason != "error"), request
            assert request.finish_reason is not None
        for call in self.rng.sample([self.generate, self.stream, self.iterate], 3):
            call()
        check_state(engine.scheduler)
        assert not [r for r in self.requests if r.finish_reason is None]
        assert not engine.scheduler.requests
        assert not engine.has_work
        assert not engine._records
        for request in self.requests:
            outputs = request.output_token_ids
            alone = answer_alone(
                self.llm,
                request.token_ids[: request.num_prompt_tokens],
                request.sampling_params,
                request.seed - (request.sampling_params.seed or 0),
            )
            assert outputs == alone[: len(outputs)]


def lines_by_file(seed: int) -> Counter[str]:
    """The number of executed lines of each file in the program of ``seed``."""
    with LineRaiser([1 << 60], KeyboardInterrupt) as raiser:
        Run(seed).calls()
    return raiser.lines_of


def interrupt(
    seed: int, places: list[int], kind: type[BaseException], trace: Path | None, file: str = ""
) -> str:
    """Run the program of ``seed``, raise ``kind`` at these places, and check the state afterwards.
    Places and file as for :class:`LineRaiser`.

    Returns:
        The places where it was raised.
    """
    run = Run(seed, trace)
    raiser = LineRaiser(places, kind, file)
    # An exception raised in a finalizer is not propagated: it goes to this hook. A Mock would keep
    # its traceback, whose frames hold the callers.
    with mock.patch.object(sys, "unraisablehook", new=_ignore):
        try:
            with raiser:
                run.calls()
        except BaseException as error:
            if not _is_injected(error):
                raise
        run.check_whole()
    if trace is not None:
        verdict = replay.check(trace.read_text().splitlines())
        assert not verdict.property_id, verdict
    return " then ".join(raiser.raised_at)


def _is_injected(error: BaseException | None) -> bool:
    while error is not None:
        if "injected" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def campaign(num_injections: int, first_seed: int, folder: Path) -> Counter[str]:
    """Raise at ``num_injections`` random places. Half of them are followed by a second exception
    soon after, during recovery or clean-up.

    Returns:
        The number of raises in each file.
    """
    files: Counter[str] = Counter()
    seed = first_seed
    while sum(files.values()) < num_injections:
        rng = random.Random(seed)
        num_lines = lines_by_file(seed)
        for i in range(16):
            # Of any file alike, too: most lines are the planner's.
            file = rng.choice(list(num_lines)) if i % 4 else ""
            places = [rng.randint(1, num_lines[file] if file else num_lines.total())]
            if i % 2:
                places.append(rng.randint(1, 80))
            trace = folder / "trace.jsonl" if i % 4 < 2 else None
            kind = rng.choice(_KINDS)
            try:
                where = interrupt(seed, places, kind, trace, file)
            except BaseException as error:
                given = f"{seed}, {places}, {kind.__name__}, {trace}, {file!r}"
                error.add_note(f"interrupt({given})")
                raise
            files.update(place.split(":")[0] for place in where.split(" then ") if place)
        seed += 1
    return files


def _ignore(_: object) -> None:
    pass


def main() -> None:
    num_injections = int(sys.argv[1])
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = campaign(num_injections, int((sys.argv[2:] or ["0"])[0]), Path(folder))
    for name, count in files.most_common():
        print(f"{count:7} {name}")
    print(f"{sum(files.values()):7} in {time.perf_counter() - begin:.0f} s: none left anything")


if __name__ == "__main__":
    main()
