"""``pagespec generate --input``: a file of questions becomes a file of answers, resumably."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer
from tqdm import tqdm

from ..errors import InvalidInputError, PagespecError
from . import make_llm
from .command import EXIT_INTERRUPTED, note
from .jsonl import (
    Fingerprint,
    Line,
    Progress,
    Question,
    encode_row,
    find_progress,
    parse_question,
    read_lines,
    row_start,
)
from .options import EngineOptions, SamplingOptions
from .prompts import conversation_prompt, user_message

try:
    import fcntl
except ImportError:  # Windows has no flock; there two runs on one output are not kept apart
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from ..engine.outputs import CompletionOutput
    from ..engine.sampling_params import SamplingParams
    from ..llm import LLM

EXIT_SOME_ERRORS = 1


def answer_file(
    source: Path,
    output: Path,
    engine: EngineOptions,
    sampling: SamplingOptions,
    *,
    chat: bool,
    overwrite: bool,
) -> None:
    """Write one row for each line of ``source`` that is not blank, in order; keep the rows
    ``output`` already has.

    Raises:
        InvalidInputError: a file or an option is refused; ``output`` is then as it was.
        typer.Exit: 1 if some rows are errors, 130 if interrupted.
    """
    if not source.is_file():
        raise InvalidInputError("--input", str(source), "must be a file (it is read twice)")
    if output.exists() and not output.is_file():
        limit = "must be a file: the run goes on from the rows it has"
        raise InvalidInputError("--output", str(output), limit)
    if output.exists() and output.samefile(source):
        raise InvalidInputError("--output", str(output), "must not be the input file")
    sampling.params(0)  # refuse bad flags before anything is touched
    fingerprint = Fingerprint(make_llm.model_label(engine), chat, sampling)
    with _locked(output) as file:
        if overwrite:
            found = Progress(0, 0, 0, sum(1 for _ in read_lines(source)))
        else:
            found = find_progress(file, str(output), source, fingerprint)
        if found.rows:
            note(f"{output}: keeping {found.rows} of {found.total} rows")
        run = _Run(file, fingerprint, errors=found.errors)
        if found.rows < found.total:
            # Only now, with a model that loads, is the unfinished or unwanted end cut off.
            llm = make_llm.start_llm(engine)
            _cut(file, found.size)
            _generate_rest(llm, run, source, found)
        else:
            _cut(file, found.size)
    note(f"{output}: {found.total} rows, {run.errors} of them errors")
    if run.errors:
        raise typer.Exit(EXIT_SOME_ERRORS)


def _generate_rest(llm: LLM, run: _Run, source: Path, found: Progress) -> None:
    rest = islice(read_lines(source), found.rows, None)
    try:
        # Shown on a terminal only: in a log file the bar would be thousands of lines.
        with tqdm(total=found.total, initial=found.rows, unit="row", disable=None) as bar:
            for _ in run.answer(llm, rest):
                bar.update()
    except KeyboardInterrupt:
        note("interrupted; the same command goes on from here")
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open for reading and writing, created if missing, and keep other runs out of it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                limit = "another run is writing it"
                raise InvalidInputError("--output", str(path), limit) from None
        yield file


def _cut(file: BinaryIO, size: int) -> None:
    file.seek(size)
    file.truncate()


@dataclass(slots=True)
class _Job:
    """A line on its way: either it went to the engine, or its error row waits for its turn."""

    line: Line
    identity: str | int | None = None
    error: str | None = None


def _fields(answer: CompletionOutput) -> dict[str, Any]:
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "token_ids": list(answer.token_ids),
    }


class _Run:
    """Answers lines in order and writes their rows.

    The engine gives results in the order in which it pulled requests, but a line that cannot be
    read never reaches it. ``_pending`` holds all lines pulled and not yet written, so that an error
    row is written between its neighbours and not before them.
    """

    def __init__(self, file: BinaryIO, fingerprint: Fingerprint, errors: int) -> None:
        self.errors = errors
        self._file = file
        self._fingerprint = fingerprint
        self._pending: deque[_Job] = deque()

    def answer(self, llm: LLM, lines: Iterator[Line]) -> Iterator[None]:
        """Yield once for every row written."""
        for result in llm.generate_iter(self._requests(llm, lines)):
            yield from self._write_errors()
            job = self._pending.popleft()
            if isinstance(result, Exception):
                self._write(job, {"error": str(result)})
            else:
                answers = [_fields(answer) for answer in result.outputs]
                fields = answers[0] if len(answers) == 1 else {"outputs": answers}
                num_prompt_tokens = len(result.prompt_token_ids)
                self._write(job, fields | {"num_prompt_tokens": num_prompt_tokens})
            yield
        yield from self._write_errors()
        if self._pending:
            raise PagespecError(f"the engine left {len(self._pending)} lines unanswered")

    def _requests(
        self, llm: LLM, lines: Iterator[Line]
    ) -> Iterator[tuple[dict[str, Any], SamplingParams]]:
        for line in lines:
            job = _Job(line)
            self._pending.append(job)
            try:
                question = parse_question(line)
                job.identity = question.identity
                prompt = self._prompt(llm, question)
                params = self._fingerprint.sampling.params(line.index, question.overrides)
            except InvalidInputError as error:
                job.error = str(error)
            else:
                yield prompt, params

    def _prompt(self, llm: LLM, question: Question) -> dict[str, Any]:
        prompt: Mapping[str, Any]
        if question.kind == "messages":
            prompt = conversation_prompt(llm, question.content)
        elif question.kind == "prompt" and self._fingerprint.chat:
            prompt = conversation_prompt(llm, user_message(question.content))
        else:
            prompt = {question.kind: question.content}
        return {**prompt, **question.options}

    def _write_errors(self) -> Iterator[None]:
        """Write the error rows that are next in line."""
        while self._pending and self._pending[0].error is not None:
            job = self._pending.popleft()
            self._write(job, {"error": job.error})
            yield

    def _write(self, job: _Job, fields: dict[str, Any]) -> None:
        row = row_start(job.line, self._fingerprint.key(job.line))
        if job.identity is not None:
            row["id"] = job.identity
        self.errors += "error" in fields
        self._file.write(encode_row(row | fields))
        self._file.flush()
