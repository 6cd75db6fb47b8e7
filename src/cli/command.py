"""Makes a function a command: option groups from dataclasses, errors as one line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ..errors import PagespecError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
TRACEBACK_VARIABLE = "PAGESPEC_TRACEBACK"
MORE = "pagespec.more_arguments"
"""Key in the context of a command: arguments without an option, for a group that accepts them."""


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable streams.

    A closed stream (``<&-``; pythonw) is None in Python, and the next opened file gets its
    descriptor: a library's warning would then be written into --output. It is replaced by the null
    device. Characters that the encoding cannot represent are escaped.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def note(message: str) -> None:
    """Print a message to stderr; stdout is for answers only."""
    # A full disk or a closed pipe must not stop the answers.
    with suppress(OSError):
        typer.echo(message, err=True)


def refuse(error: Exception) -> int:
    """Print an error as one line; returns the exit code."""
    line = " ".join(str(error).split()) or type(error).__name__
    note(f"pagespec: error: {line}")
    return EXIT_REFUSED


@contextmanager
def readable_errors() -> Iterator[None]:
    """Convert user errors to one line on stderr and exit code 2, and Ctrl-C to exit code 130.

    Errors of files, folders and downloads are ``OSError``. typer exits silently at a broken pipe
    (``pagespec generate ... | head``). Other exceptions are bugs of pagespec and keep their
    traceback; ``PAGESPEC_TRACEBACK=1`` keeps every traceback.
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

    Typer maps one parameter to one option. Here a parameter annotated with a dataclass stands
    for all fields of that class that are options: typer sees a flat signature, and the function
    receives an instance of the dataclass. Errors of the function are printed as one line.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[Any, tuple[Option, ...]]] = {}
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter("ctx", keyword, annotation=typer.Context)]
    for parameter in inspect.signature(function).parameters.values():
        annotation = hints[parameter.name]
        own = getattr(annotation, "options", None)
        if own or dataclasses.is_dataclass(annotation):
            options = own() if own else options_of(annotation, annotation.PANEL)
            groups[parameter.name] = annotation, options
            shown.extend(each.parameter for each in options)
        else:
            shown.append(parameter.replace(annotation=annotation, kind=keyword))

    @functools.wraps(function)
    def run(**given: Any) -> None:
        with readable_errors():
            arguments: dict[str, Any] = {}
            more = given.pop("ctx").meta.get(MORE, {})
            for name, (group, options) in groups.items():
                values = {o.name: given.pop(o.name) for o in options}
                arguments[name] = group(**values, **(more if hasattr(group, "TAKES_MORE") else {}))
            function(**given, **arguments)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def option(default: Any, metavar: str | None, help: str, *names: str, **settings: Any) -> Any:
    """A field of a dataclass that ``command`` expands; other arguments as for ``typer.Option``."""
    settings |= {"metavar": metavar, "help": help}
    return dataclasses.field(default=default, metadata={"names": names, "settings": settings})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Option:
    """An option of the command line; ``settings`` are arguments of ``typer.Option``."""

    name: str
    type: Any
    default: Any
    names: tuple[str, ...]
    settings: Mapping[str, Any]

    def with_default(self, default: Any, show_default: Any = True, **settings: Any) -> Option:
        """The same option with another default, and that default's text in the help."""
        shown = {**self.settings, "show_default": show_default, **settings}
        type_ = self.type | None if default is None else self.type
        return dataclasses.replace(self, type=type_, default=default, settings=shown)

    @functools.cached_property
    def parameter(self) -> inspect.Parameter:
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[self.type, typer.Option(*self.names, **self.settings)],
        )


_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME", list[str]: "TEXT"}
_METAVARS |= {type_ | None: metavar for type_, metavar in _METAVARS.items()}


@functools.cache
def options_of(group: Any, panel: str | None) -> tuple[Option, ...]:
    """The options among the fields of a dataclass: those of :func:`option`, and declared
    parameters.

    Args:
        panel: panel of the help; None: the stage of a declared parameter.
    """
    names_there = vars(sys.modules[group.__module__])
    found = []
    for field in dataclasses.fields(group):
        known, names = field.metadata.get("param"), field.metadata.get("names")
        if known is not None and known.flag is not None:
            names, is_time = known.flags, field.name.endswith("_s")
            type_ = _option_type(eval(str(field.type), names_there))
            if not names and (is_time or field.default is False):  # True also gets --no-NAME
                names = ("--" + field.name.removesuffix("_s").replace("_", "-"),)
            settings = {"help": known.help, "show_default": known.absent or True}
            settings["metavar"] = known.metavar or ("S" if is_time else _METAVARS.get(type_))
        elif names is not None:
            settings, type_ = field.metadata["settings"], eval(str(field.type), names_there)
        else:
            continue
        settings = {**settings, "rich_help_panel": panel or (known and known.stage)}
        default = None if field.default == () else field.default
        found.append(Option(field.name, type_, default, names, settings))
    return tuple(found)


def _option_type(hint: Any) -> Any:
    """The type of an option for a field: text for a path, a list of texts for a sequence."""
    members = get_args(hint)
    if Sequence[str] in members or hint == tuple[str, ...]:
        return list[str] | None
    if str in members:
        return str | None if type(None) in members else str
    return hint
