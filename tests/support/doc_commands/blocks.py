"""Blocks of code in Markdown, and their markers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LANGUAGES = ("bash", "python")
# What a block may need that the machine of the checks lacks.
NEEDS = ("gpu", "docker", "network", "hub", "root", "cluster", "chromium")
_NEED = re.compile(rf"{'|'.join(NEEDS)}|package: [\w.-]+|time: \d+ minutes?")
_FENCE = re.compile(r"^( *)```(\w+)?[^\n]*\n(.*?)^\1``` *$", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"<!-- *([a-z]+)(?:: *(.*?))? *-->")
_WHERE = ("README.md", "CONTRIBUTING.md", "docs", "benchmarks", "examples", "spec", "deploy")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        file: by its path in the repository.
        line: of its first line of code.
        needs: what it needs besides the embedded model; the block is then not run.
        server: the port of the server that it starts; later blocks of the page may use the server.
        continues: a Python block that goes on with the names of the block before.
        fragment: what it is a part of, if it is no whole program; it is then not run. An excerpt of
            the sources needs no marker.
        marker_fault: what is wrong with its markers.
    """

    file: str
    line: int
    language: str
    text: str
    needs: tuple[str, ...] = ()
    server: int | None = None
    continues: bool = False
    fragment: str = ""
    marker_fault: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def first_line(self) -> str:
        lines = (line.strip() for line in self.text.splitlines())
        return next((line for line in lines if line and not line.startswith("#")), "")


def documents() -> list[str]:
    """The Markdown files whose blocks are checked, by path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    there = {name for name in listed if name.startswith(_WHERE) and (ROOT / name).exists()}
    return sorted(there, key=lambda name: ("/" in name, name))


def blocks_of(file: str, text: str) -> Iterator[Block]:
    """The blocks of one document."""
    for match in _FENCE.finditer(text):
        if match[2] not in LANGUAGES:
            continue
        line = text.count("\n", 0, match.start(3)) + 1
        code = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        try:
            marks = _marks(text[: match.start()])
        except ValueError as error:
            marks = {"marker_fault": str(error)}
        if match[2] == "python" and "fragment" not in marks and (source := _source_of(code)):
            marks["fragment"] = f"excerpt of {source}"
        yield Block(file, line, match[2], code, **marks)


def deployed_commands() -> Iterator[Block]:
    """The commands of the package in files of ``deploy``: checked, not run."""
    for path in sorted((ROOT / "deploy").iterdir()):
        if not path.is_file() or path.suffix == ".md":
            continue
        # A list of words, as in a Dockerfile, becomes one text.
        lines = path.read_text(encoding="utf-8").replace('", "', " ").splitlines()
        for number, line in enumerate(lines, 1):
            if match := re.search(r"\bpagespec (?:serve|generate|verify|bench)\b[^\"`]*", line):
                file = path.relative_to(ROOT).as_posix()
                yield Block(file, number, "bash", match[0], fragment="a deployment")


@cache
def _sources() -> dict[str, str]:
    """The files that excerpts are from, without indentation."""
    files = [path for name in ("src", "spec") for path in sorted((ROOT / name).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): _stripped(path.read_text("utf-8")) for path in files}


def _source_of(code: str) -> str:
    """The file that has a Python block word for word, lines of ``...`` aside; empty for none."""
    parts = re.split(r"^\s*(?:# )?\.\.\.\s*$", code.strip(), flags=re.MULTILINE)
    wanted = [_stripped(part) for part in parts if part.strip()]
    found = (name for name, text in _sources().items() if all(part in text for part in wanted))
    return next(found, "")


def _stripped(text: str) -> str:
    return "\n".join(filter(None, (line.strip() for line in text.splitlines())))


def _marks(before: str) -> dict[str, object]:
    """The markers in the lines directly above a block, as fields of ``Block``.

    Raises:
        ValueError: a marker is unknown.
    """
    found: dict[str, object] = {}
    needs: list[str] = []
    lines = before.splitlines()
    while lines and (match := _MARKER.fullmatch(lines.pop().strip())):
        kind, value = match[1], match[2] or ""
        if kind == "needs":
            needs += _needs(value)
        elif kind == "continues" and not value:
            found["continues"] = True
        elif kind == "server" and value.isdigit():
            found["server"] = int(value)
        elif kind == "fragment" and value:
            found["fragment"] = value
        elif kind == "end" and not value:
            break  # of a generated part
        else:
            raise ValueError(f"unknown marker {match[0]}")
    return found | {"needs": tuple(needs)} if needs else found


def _needs(value: str) -> list[str]:
    needs = value.split(", ")
    for need in needs:
        if not _NEED.fullmatch(need):
            allowed = f"{', '.join(NEEDS)}, package: NAME, time: N minutes"
            raise ValueError(f"unknown need {need!r}; one of {allowed}")
    return needs
