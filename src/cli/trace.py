"""``pagespec trace check``: replays a step trace against the specification."""

from __future__ import annotations

from pathlib import Path

import typer

from ..errors import InvalidInputError


def check_trace(file: Path) -> None:
    """Print the verdict on a trace; exit code 1 if it breaks the specification.

    Raises:
        InvalidInputError: the file is no trace.
    """
    from ..spec.replay import TraceError, check

    try:
        with file.open(encoding="utf-8") as lines:
            verdict = check(lines)
    except (TraceError, UnicodeDecodeError) as error:
        raise InvalidInputError("file", str(file), str(error)) from error
    if verdict.property_id:
        where = f"line {verdict.line}"
        if verdict.step is not None:
            where += f", step {verdict.step}"
        typer.echo(f"REFUSED at {where}: {verdict.property_id}: {verdict.detail}")
        raise typer.Exit(1)
    typer.echo(
        f"accepted: {verdict.num_steps} steps, {verdict.num_requests} requests, "
        f"{verdict.num_preemptions} preemptions, {verdict.num_hit_blocks} blocks hit in the cache"
    )
