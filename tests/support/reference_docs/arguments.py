"""The tables of ``docs/engine_arguments.md`` and ``docs/from_vllm.md``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pagespec
from pagespec import LLM, AsyncLLM, LLMEngine, llm_engine
from pagespec.cli.options import EngineOptions
from pagespec.compat.refused import REFUSED, REFUSED_MODULES
from pagespec.engine.config import EngineConfig
from pagespec.params.declare import declared, defaults
from pagespec.params.foreign import ASYNC, CALL, ENGINE, SERVER, SPECULATION, Foreign
from tests.peer import examples

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
    "_is_limits": "numbers of inputs",
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
        by_meaning: dict[str, list[str]] = {}
        for value, values in row.as_ours.items():
            meaning = code(*(f"{k}={v!r}" for k, v in values.items()))
            by_meaning.setdefault(meaning, []).append(str(value))
        ours += [f"{', '.join(values)}: {meaning}" for meaning, values in by_meaning.items()]
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


def foreign_keys() -> Iterator[str]:
    """Keys of ``speculative_config``."""
    return _foreign(SPECULATION)


def foreign_calls() -> Iterator[str]:
    """Arguments of methods of ``AsyncLLM``."""
    return _foreign(CALL | ASYNC)


def missing_methods() -> Iterator[str]:
    """Methods of vLLM's classes that are not supported."""
    rows = [
        (code(f"{owner.__name__}.{name}"), prose(text))
        for owner, known in (
            (LLM, llm_engine.INSTEAD),
            (LLMEngine, llm_engine.INSTEAD),
            (AsyncLLM, llm_engine.ASYNC_INSTEAD),
        )
        for name, text in known.items()
        if not hasattr(owner, name)
    ]
    return table(("method", "instead"), sorted(rows))


def refused_names() -> Iterator[str]:
    """Names of vLLM that cannot be imported."""
    modules = {f"pagespec.{name}": text for name, text in REFUSED_MODULES.items()}
    known = (REFUSED | modules).items()
    return table(("name", "reason"), [(code(name), prose(text)) for name, text in known])


def examples_of_vllm() -> Iterator[str]:
    """vLLM's offline examples, as ``nox -s peer_tests`` runs them."""
    rows = []
    for name in sorted(examples.ARGUMENTS):
        feature, words = examples.REFUSED.get(name, ("", ""))
        rows.append((code(name), f"refused ({feature}): {prose(words)}" if feature else "runs"))
    yield from table(("example", "with pagespec"), rows)


def modules() -> Iterator[str]:
    """vLLM's modules, and the names in each."""
    folder = Path(pagespec.__file__).parent / "compat" / "vllm"
    rows = [(code("pagespec"), code(*sorted(pagespec.__all__)))]
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] in REFUSED_MODULES:
            continue
        name = ".".join(part for part in parts if part != "__init__")
        found = importlib.import_module(f"pagespec.compat.vllm.{name}".rstrip("."))
        names = getattr(found, "__all__", ())
        if name and names:
            rows.append((code(f"pagespec.{name}"), code(*sorted(names))))
    return table(("module", "names"), rows)
