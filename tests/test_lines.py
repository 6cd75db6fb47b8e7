"""The line count per package (tests/support/lines.py)."""

from __future__ import annotations

import pytest

from tests.support.lines import Lines, count, table

_MODULE = '''"""Doc.

More."""

# A comment.
import os  # beside code


class A:
    """Doc."""

    x: int = 1
    """Of an attribute."""

    def f(
        self,
        y: str = """text
        over lines""",
    ) -> None:
        """Doc."""
        return os.sep + "# no comment"
'''


def test_code_and_prose_are_distinguished() -> None:
    assert count(_MODULE) == Lines(1, 1, code=9, prose=6, longest_signature=5)


@pytest.mark.parametrize(
    ("text", "code", "prose"),
    [
        ("", 0, 0),
        ("# only\n# comments\n", 0, 2),
        ('x = """no\ndocstring"""\n', 2, 0),
        ("x = (\n    # inside\n    1\n)\n", 3, 1),
        ("x = 1; y = 2\n", 1, 0),
        ("'doc'; x = 1\n", 1, 0),
    ],
)
def test_of_small_texts(text: str, code: int, prose: int) -> None:
    found = count(text)
    assert (found.code, found.prose) == (code, prose)


def test_sizes_are_summed_and_the_longest_signature_kept() -> None:
    rows = table({"a": Lines(1, 0, 80, 2, 3), "b": Lines(2, 1, 7, 5, 2)}).splitlines()
    assert rows[-1] == "| sum | 3 | 1 | 87 | 7 | 3 |"
