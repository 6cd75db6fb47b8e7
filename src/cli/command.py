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
"""In the context of a command: arguments without an option, of the group that ``TAKES_MORE``."""


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

    Typer reads one option from one parameter. Here a parameter annotated with a dataclass stands
    for all fields of that class that are options: typer is shown a flat signature, and the function
    is called with the dataclass filled in. Errors of the function are made readable.
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
    """A field of a dataclass that ``command`` expands; the rest is as in ``typer.Option``."""
    settings |= {"metavar": metavar, "help": help}
    return dataclasses.field(default=default, metadata={"names": names, "settings": settings})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Option:
    """An option of the command line; ``settings`` are as in ``typer.Option``."""

    name: str
    type: Any
    default: Any
    names: tuple[str, ...]
    settings: Mapping[str, Any]

    def with_default(self, default: Any, show_default: Any = True, **settings: Any) -> Option:
        """The same with another default, and what its help calls that."""
        shown = {**self.settings, "show_default": show_default, **settings}
        type_ = self.type | None if default is None else self.type
        return dataclasses.replace(self, type=type_, default=default, settings=shown)

    def in_panel(self, panel: str) -> Option:
        """The same in another panel of the help."""
        return dataclasses.replace(self, settings={**self.settings, "rich_help_panel": panel})

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
    """The options among the fields of a dataclass: what :func:`option` made, and declared
    parameters that have one."""
    names_there = vars(sys.modules[group.__module__])
    found = []
    for field in dataclasses.fields(group):
        known, names = field.metadata.get("param"), field.metadata.get("names")
        if known is not None and known.flag is not None:
            names, is_time = known.flags, field.name.endswith("_s")
            type_ = _option_type(eval(str(field.type), names_there))
            if not names and (is_time or field.default is False):  # True has --no-NAME as well
                names = ("--" + field.name.removesuffix("_s").replace("_", "-"),)
            settings = {"help": known.help, "show_default": known.absent or True}
            settings["metavar"] = known.metavar or ("S" if is_time else _METAVARS.get(type_))
        elif names is not None:
            settings, type_ = field.metadata["settings"], eval(str(field.type), names_there)
        else:
            continue
        settings = {**settings, "rich_help_panel": panel}
        default = None if field.default == () else field.default
        found.append(Option(field.name, type_, default, names, settings))
    return tuple(found)


def _option_type(hint: Any) -> Any:
    """The type of what is typed for a field: text for a path, a list of texts for a sequence."""
    members = get_args(hint)
    if Sequence[str] in members or hint == tuple[str, ...]:
        return list[str] | None
    if str in members:
        return str | None if type(None) in members else str
    return hint
