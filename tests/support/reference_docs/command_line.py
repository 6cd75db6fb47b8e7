"""The commands of ``docs/cli.md``: what ``pagespec COMMAND --help`` prints, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer

from pagespec.cli.main import app
from pagespec.cli.options import EngineOptions, SamplingOptions

from .cells import code, prose, table

# Groups of options that several commands have: each is shown once.
_SHARED: Mapping[str, tuple[Any, str]] = {
    "Sampling": (SamplingOptions, "Options of `generate` and `chat`. A default of the model comes "
                 "from its generation config."),
    "Engine": (EngineOptions, "Options of all commands that load a model. [Engine arguments]"
               "(engine_arguments.md) has the arguments of `LLM` behind them."),
}  # fmt: skip


def commands() -> Iterator[str]:
    """A section per command, then one per shared group of options."""
    group = typer.main.get_command(app)
    for name, command in _flattened(group, "pagespec"):
        yield from _command(name, command)
    for panel, (_, text) in _SHARED.items():
        user = next(c for _, c in _flattened(group, "") if _of_panel(c, panel))
        yield from (f"## {panel} options", "", text, "", *_options(_of_panel(user, panel)), "")


def _flattened(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        full = f"{path} {name}".strip()
        if hasattr(command, "commands"):
            yield from _flattened(command, full)
        else:
            yield full, command


def _of_panel(command: Any, panel: str) -> list[Any]:
    return [one for one in command.params if getattr(one, "rich_help_panel", None) == panel]


def _command(name: str, command: Any) -> Iterator[str]:
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    places = [one for one in shown if one.param_type_name == "argument"]
    usage = [name, *(one.name.upper() for one in places), "[OPTIONS]"]
    yield from (f"## {name}", "", "```text", " ".join(usage), "```", "")
    yield from _help(command.help)
    for one in places:
        yield from (f"`{one.name.upper()}`: {prose(one.help)}", "")
    own = [one for one in shown if one not in places and one.rich_help_panel not in _SHARED]
    if own:
        yield from (*_options(own), "")
    shared = [panel for panel in _SHARED if _of_panel(command, panel)]
    links = " and ".join(f"[{panel} options](#{panel.lower()}-options)" for panel in shared)
    if links:
        changed = [one for one in shown if _differs(one)]
        defaults = "".join(f" The default of `{o.opts[0]}` is `{o.default}` here." for o in changed)
        yield from (f"Also: {links}.{defaults}", "")


def _differs(one: Any) -> bool:
    """Whether a shared option has another default than in its group."""
    group, _ = _SHARED.get(getattr(one, "rich_help_panel", None) or "", (None, ""))
    known = {} if group is None else {each.name: each.default for each in group.options()}
    return one.name in known and known[one.name] != one.default


def _help(text: str) -> Iterator[str]:
    """The paragraphs of a help text; lines behind the sign for "as it is" are code."""
    for paragraph in text.strip().split("\n\n"):
        if not paragraph.startswith("\b"):
            yield from (prose(paragraph), "")
            continue
        lines = paragraph.replace("\\[", "[").replace("\b\n", "").split("\n")
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        is_json = lines[0].lstrip().startswith("{")
        if not is_json:
            yield "<!-- fragment: examples of the help -->"
        yield from (f"```{'json' if is_json else 'bash'}", *(line[indent:] for line in lines))
        yield from ("```", "")


def _options(options: Iterable[Any]) -> Iterator[str]:
    rows = [(_names(one), _default(one), prose(one.help or "")) for one in options]
    return table(("option", "default", "description"), rows)


def _names(one: Any) -> str:
    metavar = "" if one.is_flag else f" {one.metavar or _metavar(one)}"
    # A short name last.
    names = sorted([*one.opts, *one.secondary_opts], key=lambda name: not name.startswith("--"))
    return code(names[0] + metavar, *names[1:])


def _metavar(one: Any) -> str:
    """As the help shows it."""
    shown = str(one.display_type(typer.Context(typer.main.get_command(app)))).strip("<>").upper()
    return {"INT RANGE": "N", "FLOAT RANGE": "X"}.get(shown, shown)


def _default(one: Any) -> str:
    if isinstance(one.show_default, str):
        return one.show_default
    if one.is_flag:
        return {True: "on", False: "off", None: ""}[one.default]
    return "" if one.default in (None, "") else code(re.sub(r"\.0$", "", str(one.default)))
