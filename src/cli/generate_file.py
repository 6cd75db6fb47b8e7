"""``pagespec generate --input``: answers a file of prompts; an interrupted run can be resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import typer
from tqdm import tqdm

from ..errors import InvalidInputError
from . import make_llm
from .answer_lines import answer_lines
from .command import EXIT_INTERRUPTED, note
from .jsonl import Fingerprint, Line, Progress, Row, encode_row, find_progress, read_lines
from .options import EngineOptions, PromptOptions, ReplicaOptions, SamplingOptions

try:
    import fcntl
except ImportError:  # Windows has no flock: concurrent runs on one output are not detected there
    fcntl = None  # type: ignore[assignment]

EXIT_SOME_ERRORS = 1

Answer = Callable[[Iterable[Line]], Iterable[Row]]


def answer_file(
    prompts: PromptOptions,
    engine: EngineOptions,
    sampling: SamplingOptions,
    replicas: ReplicaOptions,
) -> None:
    """Write one row per non-blank line of the input, in order; keep rows that the output already
    has. The rows are the same with and without replicas.

    Raises:
        InvalidInputError: a file or an option is refused; the output is then unchanged.
        typer.Exit: 1 if some rows are errors, 130 if interrupted.
    """
    source, output = prompts.input, prompts.output
    assert source is not None
    assert output is not None  # see PromptOptions.check
    if not source.is_file():
        raise InvalidInputError("--input", str(source), "must be a file (it is read twice)")
    if output.exists() and not output.is_file():
        limit = "must be a file: the run continues after its rows"
        raise InvalidInputError("--output", str(output), limit)
    if output.exists() and output.samefile(source):
        raise InvalidInputError("--output", str(output), "must not be the input file")
    sampling.params(0)  # refuse invalid flags before changing any file
    fingerprint = Fingerprint(
        make_llm.model_label(engine), bool(prompts.chat), sampling, engine.config.generation_config
    )
    with _locked(output) as file:
        if prompts.overwrite:
            found = Progress(0, 0, 0, sum(1 for _ in read_lines(source)))
        else:
            found = find_progress(file, str(output), source, fingerprint)
        if found.rows:
            note(f"{output}: keeping {found.rows} of {found.total} rows")
        num_errors = found.errors
        if found.rows < found.total:
            num_lines, is_default = found.total - found.rows, prompts.chat is None
            with _answerer(
                engine, fingerprint, replicas, num_lines, is_default=is_default
            ) as answer:
                # The incomplete or unwanted end is cut off only after a model has loaded.
                _cut(file, found.size)
                num_errors += _write_rest(file, answer, source, found)
        else:
            _cut(file, found.size)
    note(f"{output}: {found.total} rows, {num_errors} of them errors")
    if num_errors:
        raise typer.Exit(EXIT_SOME_ERRORS)


@contextmanager
def _answerer(
    engine: EngineOptions,
    fingerprint: Fingerprint,
    replicas: ReplicaOptions,
    num_lines: int,
    *,
    is_default: bool,
) -> Iterator[Answer]:
    """A function that answers lines, once a model has loaded: in this process, or in replicas.

    Args:
        is_default: neither --chat nor --raw was given.
    """
    if replicas.replicas is None:
        llm = make_llm.start_llm(engine)
        make_llm.note_template(llm, in_template=fingerprint.chat, is_default=is_default)
        yield partial(answer_lines, llm, fingerprint)
        return
    from .replicas import open_replicas

    with open_replicas(
        engine, fingerprint, num_lines, num_replicas=replicas.replicas, address=replicas.ray_address
    ) as answer:
        yield answer


def _write_rest(file: BinaryIO, answer: Answer, source: Path, found: Progress) -> int:
    """Answer the lines that have no row, and write their rows; returns the number of errors."""
    rest = islice(read_lines(source), found.rows, None)
    num_errors = 0
    try:
        # On a terminal only: in a log file the bar would be thousands of lines.
        with tqdm(total=found.total, initial=found.rows, unit="row", disable=None) as bar:
            for row in answer(rest):
                num_errors += "error" in row
                file.write(encode_row(row))
                file.flush()
                bar.update()
    except KeyboardInterrupt:
        note("interrupted; run the same command to continue")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    return num_errors


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open for reading and writing, created if missing, and locked against other runs."""
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
