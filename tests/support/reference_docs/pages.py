"""Which page has which generated parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from . import arguments, command_line, endpoints, metrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
Part = Callable[[], Iterator[str]]
# By file name: the generator of each part, by the name in its marker.
PAGES: Mapping[str, Mapping[str, Part]] = {
    "engine_arguments.md": {
        "arguments": arguments.arguments,
    },
    "from_vllm.md": {
        "modules": arguments.modules,
        "refused": arguments.refused_names,
        "engine": arguments.foreign_arguments,
        "speculation": arguments.foreign_keys,
        "server": arguments.foreign_flags,
        "calls": arguments.foreign_calls,
        "examples": arguments.examples_of_vllm,
        "methods": arguments.missing_methods,
    },
    "cli.md": {"commands": command_line.commands},
    "http_reference.md": {
        "endpoints": endpoints.endpoints,
        "bodies": endpoints.bodies,
        "neutral": endpoints.neutral_fields,
    },
    "metrics.md": {"metrics": metrics.metrics, "buckets": metrics.buckets},
}
_END = "<!-- end -->"


def made(name: str) -> str:
    """A page with its parts generated again."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for part, lines in PAGES[name].items():
        marker = f"<!-- {part} -->"
        begin = text.index(marker)
        end = text.index(_END, begin)
        text = text[:begin] + "\n".join([marker, *lines(), ""]) + text[end:]
    return text


def outdated(names: Iterable[str]) -> list[str]:
    """The pages that differ from what is made now."""
    return [name for name in names if (DOCS / name).read_text(encoding="utf-8") != made(name)]


def write(names: Iterable[str]) -> None:
    for name in names:
        (DOCS / name).write_text(made(name), encoding="utf-8")
