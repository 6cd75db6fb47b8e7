"""The tables of ``docs/engine_arguments.md``, made from the declarations.

``python -m tests.support.param_docs`` writes them into the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pagespec.cli.options import EngineOptions
from pagespec.engine.config import EngineConfig
from pagespec.params.declare import declared, defaults
from pagespec.params.foreign import ENGINE, SERVER, Foreign

PAGE = Path(__file__).resolve().parents[2] / "docs/engine_arguments.md"


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"(collections\.abc|os|typing)\.", "", text).replace("PathLike[str]", "path")
    return text.replace(" | None", "").replace("|", "or").replace("Ellipsis", "...")


def _arguments() -> Iterator[str]:
    hints = get_type_hints(EngineConfig)
    options = {option.name for option in EngineOptions.options()}
    yield "| argument | type | default | |"
    yield "|---|---|---|---|"
    for name, known in declared(EngineConfig).items():
        default = known.absent or repr(defaults(EngineConfig)[name])
        mark = "" if name in options else " *"
        yield f"| `{name}`{mark} | {_type(hints[name])} | {default} | {known.help} |"
    yield ""
    yield "\\* no option of the commands."


_WORDS = {
    "_is_our_model": "the model",
    "_asks_for_no_inputs": "no inputs",
    "_any": "any",
    "_is_path_of_runs": "'auto', 'generate'",
}


def _foreign(table: Mapping[str, Foreign]) -> Iterator[str]:
    yield "| name | taken as | without effect at | else |"
    yield "|---|---|---|---|"
    for name, row in sorted(table.items()):
        ours = [f"`{row.same_as}`"] if row.same_as else []
        for value, arguments in row.as_ours.items():
            ours.append(f"{value}: " + ", ".join(f"`{k}={v!r}`" for k, v in arguments.items()))
        harmless = ["None"]
        for one in row.harmless:
            shown = repr(one) if not callable(one) else _WORDS.get(one.__name__, "0 to 20")
            harmless.append(shown)
        yield f"| `{name}` | {'; '.join(ours)} | {', '.join(harmless)} | {row.instead} |"


def page(text: str) -> str:
    """The page with its tables made anew."""
    tables = {"arguments": _arguments(), "engine": _foreign(ENGINE), "server": _foreign(SERVER)}
    for name, lines in tables.items():
        begin, end = (
            text.index(f"<!-- {name} -->"),
            text.index("<!-- end -->", text.index(f"<!-- {name} -->")),
        )
        made = "\n".join([f"<!-- {name} -->", *lines, ""])
        text = text[:begin] + made + text[end:]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
