"""The tables of ``docs/engine_arguments.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from pagespec.cli.options import EngineOptions
from pagespec.engine.config import EngineConfig
from pagespec.params.declare import declared, defaults
from pagespec.params.foreign import ENGINE, SERVER, Foreign

from .cells import code, prose, table


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"(collections\.abc|os|typing)\.", "", text).replace("PathLike[str]", "path")
    return text.replace(" | None", "").replace("|", "or").replace("Ellipsis", "...")


def arguments() -> Iterator[str]:
    """The declared arguments of an engine."""
    hints = get_type_hints(EngineConfig)
    options = {option.name for option in EngineOptions.options()}
    rows = []
    for name, known in declared(EngineConfig).items():
        default = known.absent or code(repr(defaults(EngineConfig)[name]))
        mark = "" if name in options else " *"
        rows.append((code(name) + mark, _type(hints[name]), default, prose(known.help)))
    yield from table(("argument", "type", "default", "description"), rows)
    yield ""
    yield "\\* has no option of its own."


# What a function accepts, by the function's name.
_WORDS = {
    "_is_our_model": "the model",
    "_asks_for_no_inputs": "no inputs",
    "_any": "any",
    "<lambda>": "0 to 20",  # of _up_to
    "_is_path_of_runs": "`'auto'`, `'generate'`",
}


def _foreign(known: Mapping[str, Foreign]) -> Iterator[str]:
    rows = []
    for name, row in sorted(known.items()):
        ours = [code(row.same_as)] if row.same_as else []
        if row.key:
            ours = [f"{code(row.key)} of {code(row.same_as)}"]
        for value, values in row.as_ours.items():
            ours.append(f"{value}: " + code(*(f"{k}={v!r}" for k, v in values.items())))
        accepted = [code("None")]
        for one in row.harmless:
            shown = code(repr(one)) if not callable(one) else _WORDS[one.__name__]
            accepted.append(shown)
        rows.append((code(name), "; ".join(ours), ", ".join(accepted), prose(row.instead)))
    yield from table(("name", "same as", "ignored values", "instead of other values"), rows)


def foreign_arguments() -> Iterator[str]:
    """Arguments of other engines."""
    return _foreign(ENGINE)


def foreign_flags() -> Iterator[str]:
    """Flags of ``vllm serve`` that are no engine arguments."""
    return _foreign(SERVER)
