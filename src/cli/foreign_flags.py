"""Flags of ``vllm serve`` on our commands: translated, ignored if without effect, else refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from ..engine.config import EngineConfig
from ..errors import InvalidInputError
from ..params.declare import declared
from .command import MORE, readable_errors

if TYPE_CHECKING:
    from ..params.foreign import Foreign


class EngineCommand(TyperCommand):
    """A command that loads a model. It also accepts flags of ``vllm serve``, and the names of
    engine arguments that have no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from ..params.foreign import ENGINE, SERVER

        own = {flag for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        is_server = self.name == "serve"
        if is_server and args and not args[0].startswith("-"):
            args = ["--model", *args]  # vllm serve MODEL
        with readable_errors():
            rest, given = _split(args, own, ENGINE | SERVER if is_server else ENGINE)
        left: list[str] = super().parse_args(ctx, rest)
        typed = {
            name: value
            for name, value in ctx.params.items()
            if name == "model" or ctx.get_parameter_source(name).name == "COMMANDLINE"
        }
        with readable_errors():
            found = _translated(given, typed, ENGINE | SERVER)
        ctx.meta[MORE] = {k: found.pop(k) for k in list(found) if k not in ctx.params}
        ctx.params |= found
        return left


def _split(
    args: Sequence[str], own: set[str], table: Mapping[str, Foreign]
) -> tuple[list[str], dict[str, tuple[str, Any]]]:
    """Split the arguments into those of the command's own options, and (name, value) of others."""
    from ..params.foreign import SHORT

    rest: list[str] = []
    given: dict[str, tuple[str, Any]] = {}
    todo = list(args)
    while todo:
        flag, has_value, text = todo.pop(0).partition("=")
        flag = SHORT.get(flag, flag)
        name = flag.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        is_known = flag.startswith("--") and flag not in own
        known = [one for one in (name, positive) if one in table or one in declared(EngineConfig)]
        if not is_known or not known:
            rest.append(flag + has_value + text)
            if flag in own and not has_value and todo and _is_value(todo[0]):
                rest.append(todo.pop(0))  # a value may begin with a dash
            continue
        value: Any = known[0] == name
        if has_value or (todo and _is_value(todo[0])):
            value = _read(text if has_value else todo.pop(0))
        given[flag] = known[0], value
    return rest, given


def _is_value(text: str) -> bool:
    return not text.startswith("-") or text[1:2].isdigit()


def _read(text: str) -> Any:
    """A value as vLLM parses it: JSON, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _translated(
    given: Mapping[str, tuple[str, Any]], typed: Mapping[str, Any], table: Mapping[str, Foreign]
) -> dict[str, Any]:
    from ..params.foreign import translate

    found: dict[str, Any] = {}
    for flag, (name, value) in given.items():
        if name in table:
            try:
                found |= translate(name, value, {**typed, **found}, table)
            except InvalidInputError as error:
                raise error.renamed(flag) from None
        else:
            found[name] = value
    return found
