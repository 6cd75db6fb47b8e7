"""``pagespec trace``: checks a step trace against the specification, or draws it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from ..errors import InvalidInputError
from .command import note

if TYPE_CHECKING:
    from ..spec.replay import Verdict


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    """Raises InvalidInputError if the file is not a trace."""
    from ..spec.replay import TraceError

    try:
        with file.open(encoding="utf-8") as lines:
            yield lines
    except (TraceError, UnicodeDecodeError) as error:
        raise InvalidInputError("file", str(file), str(error)) from error


def _judge(file: Path) -> tuple[Verdict, str]:
    """The verdict on a trace, and its text."""
    from ..spec.replay import check

    with _opened(file) as lines:
        verdict = check(lines)
    if verdict.property_id:
        where = f"line {verdict.line}"
        if verdict.step is not None:
            where += f", step {verdict.step}"
        return verdict, f"REFUSED at {where}: {verdict.property_id}: {verdict.detail}"
    return verdict, (
        f"accepted: {verdict.num_steps} steps, {verdict.num_requests} requests, "
        f"{verdict.num_preemptions} preemptions, {verdict.num_hit_blocks} blocks hit in the cache"
    )


def check_trace(file: Path) -> None:
    """Print the verdict on a trace; exit code 1 if it violates the specification.

    Raises:
        InvalidInputError: the file is not a trace.
    """
    verdict, said = _judge(file)
    typer.echo(said)
    if verdict.property_id:
        raise typer.Exit(1)


def view_trace(file: Path, output: Path | None, *, perfetto: bool, checks: bool) -> None:
    """Write the page of a trace, or its Chrome trace, and print the path.

    Raises:
        InvalidInputError: the file is not a trace.
    """
    from ..viewer.page import Verdict, make_page
    from ..viewer.perfetto import chrome_trace
    from ..viewer.timeline import read_timeline

    with _opened(file) as lines:
        timeline = read_timeline(lines)
    verdict = None
    if checks:
        found, said = _judge(file)
        verdict = Verdict(found.line, found.property_id, said)
        note(said)
    if output is None:
        output = file.with_suffix(".perfetto.json" if perfetto else ".html")
    with output.open("w", encoding="utf-8") as target:
        if perfetto:
            json.dump(chrome_trace(timeline, file.name, verdict), target, separators=(",", ":"))
        else:
            target.write(make_page(timeline, file.name, verdict))
    typer.echo(str(output))
