"""Makes a function a command: option groups from dataclasses, errors as one line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, get_type_hints

import typer

from ..errors import PagespecError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
TRACEBACK_VARIABLE = "PAGESPEC_TRACEBACK"


def prepare_streams() -> None:
    """Make stdin, stdout and stderr streams that the commands can use, whatever they are.

    A closed one (``<&-``; pythonw) is None in Python, and its descriptor would go to the next file
    that is opened: a warning of some library would then be written into --output. It becomes the
    null device. What an encoding lacks is escaped and does not end the command.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def note(message: str) -> None:
    """Print to stderr what is not an answer, so that stdout can be piped on."""
    # Where nothing can be said (a full disk, a closed pipe) the answers still count.
    with suppress(OSError):
        typer.echo(message, err=True)


def refuse(error: Exception) -> int:
    """Say in one line why a command ends; returns its exit code."""
    line = " ".join(str(error).split()) or type(error).__name__
    note(f"pagespec: error: {line}")
    return EXIT_REFUSED


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 2, Ctrl-C into 130.

    ``OSError`` is among it because files, folders and downloads raise it. A broken pipe is left to
    typer, which ends quietly (``pagespec generate ... | head``). Anything else is a bug of ours
    and keeps its traceback; ``PAGESPEC_TRACEBACK=1`` keeps it for the rest too.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (PagespecError, OSError) as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        raise typer.Exit(refuse(error)) from error


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make ``function`` a typer callback whose dataclass arguments are groups of options.

    Typer reads one option from one parameter. Three commands share some twenty options, so here
    a parameter annotated with a dataclass stands for all fields of that class: typer is shown a
    flat signature, and the function is called with the dataclass filled in. Errors of the
    function are made readable.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        annotation = hints[parameter.name]
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            groups[parameter.name] = annotation
            shown.extend(_parameters_of(annotation))
        else:
            shown.append(
                parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @functools.wraps(function)
    def run(**given: Any) -> None:
        arguments: dict[str, Any] = {}
        for name, group in groups.items():
            arguments[name] = group(
                **{f.name: given.pop(f.name) for f in dataclasses.fields(group)}
            )
        with readable_errors():
            function(**given, **arguments)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def option(default: Any, metavar: str | None, help: str, *names: str, **settings: Any) -> Any:
    """A field of a dataclass that ``command`` expands; the rest is as in ``typer.Option``."""
    settings |= {"metavar": metavar, "help": help}
    return dataclasses.field(default=default, metadata={"names": names, "settings": settings})


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    """One for each field, made with :func:`option`; all in the panel that ``PANEL`` names."""
    hints = get_type_hints(group)
    shown = []
    for field in dataclasses.fields(group):
        names, settings = field.metadata["names"], field.metadata["settings"]
        info = typer.Option(*names, rich_help_panel=group.PANEL, **settings)
        shown.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[hints[field.name], info],  # type: ignore[name-defined]
            )
        )
    return shown
