"""Each excerpt in docs/tour.md stands verbatim in the file that its heading names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs/tour.md"
MAX_NUM_FILES, MAX_NUM_LINES = 12, 22
ELISION = "..."
_HEADING = re.compile(r"^#{2,3} .*?`(src/[\w/]+\.py)`", re.M)


def excerpts() -> list[tuple[str, str]]:
    """(file, block) of each Python block that follows a heading which names a file."""
    found = []
    for section in re.split(r"^(?=#{2,3} )", TOUR.read_text(encoding="utf-8"), flags=re.M):
        heading = _HEADING.match(section)
        if heading:
            blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
            found += [(heading[1], block) for block in blocks]
    return found


def chunks_of(block: str) -> list[list[str]]:
    """The lines of an excerpt, split at its elisions."""
    chunks: list[list[str]] = [[]]
    for line in block.splitlines():
        if line.strip() == ELISION:
            chunks.append([])
        else:
            chunks[-1].append(line)
    return [chunk for chunk in chunks if chunk]


def find_in_order(lines: list[str], chunks: list[list[str]]) -> bool:
    """Whether the chunks occur in ``lines`` in this order, each as consecutive lines."""
    begin = 0
    for chunk in chunks:
        ends = len(lines) - len(chunk) + 1
        place = next((i for i in range(begin, ends) if lines[i : i + len(chunk)] == chunk), None)
        if place is None:
            return False
        begin = place + len(chunk)
    return True


def stands_in(block: str, text: str) -> bool:
    """Whether an excerpt is in a file. It may be indented less, by the same width throughout."""
    chunks = chunks_of(block)
    for width in range(0, 24, 4):
        moved = [[" " * width + line if line else "" for line in chunk] for chunk in chunks]
        if find_in_order(text.splitlines(), moved):
            return True
    return False


@pytest.mark.parametrize(("file", "block"), excerpts())
def test_an_excerpt_stands_in_its_file(file: str, block: str) -> None:
    assert len(block.splitlines()) <= MAX_NUM_LINES
    assert stands_in(block, (ROOT / file).read_text(encoding="utf-8")), (
        f"docs/tour.md quotes lines that are not in {file}; copy them anew:\n{block}"
    )


def test_the_tour_visits_few_files() -> None:
    files = [file for file, _ in excerpts()]
    assert len(files) >= 10
    assert len(set(files)) <= MAX_NUM_FILES


def test_a_changed_line_or_order_is_noticed() -> None:
    text = "def f():\n    a = 1\n    b = 2\n    c = 3\n"
    assert stands_in("a = 1\n...\nc = 3\n", text)
    assert not stands_in("a = 1\nc = 3\n", text)
    assert not stands_in("c = 3\n...\na = 1\n", text)
    assert not stands_in("a = 2\n", text)
