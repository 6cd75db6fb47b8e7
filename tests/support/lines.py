"""Count the lines of ``src`` per package, code and prose separately.

``python -m tests.support.lines [--at REV]`` counts the working tree, or a git revision. Prose is
docstrings and comments; blank lines count as neither. A line with code and a comment is code.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
FEW_LINES = 60
_NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Lines:
    """Line counts of a package or a file.

    Attributes:
        num_small_files: files of less than 60 lines.
        longest_signature: most lines of a signature, from ``def`` to its colon.
    """

    num_files: int = 0
    num_small_files: int = 0
    code: int = 0
    prose: int = 0
    longest_signature: int = 0

    def __add__(self, other: Lines) -> Lines:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        longest = max(self.longest_signature, other.longest_signature)
        return Lines(**{**sums, "longest_signature": longest})


def count(text: str) -> Lines:
    """The lines of one module.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(text)
    starts: set[tuple[int, int]] = set()
    longest = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            longest = max(longest, node.body[0].lineno - node.lineno)
        for text_node in _texts(node):
            starts.add((text_node.lineno, text_node.col_offset))
    code: set[int] = set()
    prose: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT or token.start in starts:
            prose |= set(lines)
        elif token.type not in _NOT_CODE:
            code |= set(lines)
    written = text.splitlines()
    prose = {number for number in prose - code if written[number - 1].strip()}
    return Lines(1, int(len(written) < FEW_LINES), len(code), len(prose), longest)


def _texts(node: ast.AST) -> Iterator[ast.stmt]:
    """String literals that are statements: docstrings, including those of attributes."""
    if isinstance(node, _WITH_DOCSTRING):
        for child in node.body:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child


def sources(revision: str | None) -> Iterator[tuple[PurePosixPath, str]]:
    """Paths below ``src``, and texts, of the files of a revision or of the working tree.

    Raises:
        subprocess.CalledProcessError: git has no such revision.
    """
    if revision is None:
        for path in sorted((ROOT / "src").rglob("*.py")):
            relative = path.relative_to(ROOT / "src")
            if not (ROOT / "src" / relative.parts[0]).is_symlink():
                yield PurePosixPath(relative), path.read_text()
        return
    command = ["git", "archive", revision, "src"]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if member.isfile() and path.suffix == ".py":
                read = archive.extractfile(member)
                assert read is not None
                yield path.relative_to("src"), read.read().decode()


def by_package(revision: str | None = None) -> Mapping[str, Lines]:
    """Lines per top-level folder of ``src``; modules outside the folders count as one package."""
    packages: dict[str, Lines] = defaultdict(Lines)
    for path, text in sources(revision):
        packages[path.parts[0] if len(path.parts) > 1 else "(beside)"] += count(text)
    return dict(sorted(packages.items()))


def table(packages: Mapping[str, Lines]) -> str:
    """A Markdown table with a row per package, and the sum."""
    rows = ["| package | files | below 60 lines | code | prose | longest signature |"]
    rows.append("|---|---|---|---|---|---|")
    for name, lines in [*packages.items(), ("sum", sum(packages.values(), Lines()))]:
        rows.append(f"| {name} | {' | '.join(str(value) for value in vars(lines).values())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", metavar="REV", help="a git revision; else the working tree")
    print(table(by_package(parser.parse_args().at)))
