"""Every named mutant applies to the present code and changes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, mutate, read_sources
from tests.mutants.catalog import MUTANTS
from tests.mutants.syntax import PatchError, patch

_FILE = Path("a.py")
_TEXT = """
class A:
    def f(self, xs):
        for x in xs:  # comment
            self.g(x)
        if xs and (
            len(xs) > 1):
            return 1

    def g(self, x):
        self.h = x
        return self.f(xs=x, y=2)
"""


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return read_sources(ROOT / "src")


def test_every_mutant_changes_one_place(sources: dict[Path, str]) -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS)
    for mutant in MUTANTS:
        path, text = mutate(mutant, sources)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(sources[path])), mutant.name


@pytest.mark.parametrize(
    ("where", "old", "new", "expected"),
    [
        ("A.f", "len(xs) > 1", "True", "if xs and True:\n"),
        ("A.f", "for x in xs: ...", "for x in xs[1:]: ...", "for x in xs[1:]:\n            self.g"),
        ("A.f", "self.g(x)", "", "for x in xs:\n            pass\n"),
        ("A.f", "self.g(x)", "self.g(x + 1)\nbreak", "self.g(x + 1)\n            break\n"),
        (
            "A.g",
            "self.h = x\nreturn self.f(xs=x, y=2)",
            "return x",
            "def g(self, x):\n        return x",
        ),
        ("A.g", "y=2", "", "self.f(xs=x)"),
        ("A.g", "y=2", "z=3", "self.f(xs=x, z=3)"),
        ("A", "return 1", "return 2", "return 2"),
    ],
)
def test_patches_of_syntax(where: str, old: str, new: str, expected: str) -> None:
    path, text = patch({_FILE: _TEXT}, where, old, new)
    assert path == _FILE
    assert expected in text


@pytest.mark.parametrize(
    ("where", "old", "num"),
    [("A.f", "len(xs) > 2", 0), ("A.f", "xs", 3), ("A.h", "xs", 0), ("f", "len(xs)", 0)],
)
def test_code_that_does_not_occur_once_is_refused(where: str, old: str, num: int) -> None:
    with pytest.raises(PatchError, match=f"occurs {num} times"):
        patch({_FILE: _TEXT}, where, old, "True")
