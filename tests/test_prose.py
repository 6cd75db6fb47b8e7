"""Prose leaves out the words of ``tests/support/prose.py``, and its sentences are short."""

from __future__ import annotations

import pytest

from tests.support.prose import (
    MAX_NUM_WORDS,
    ROOT,
    find_in_text,
    find_long_sentences,
    find_places,
    prose_files,
)

FILES = prose_files()


def test_no_file_has_a_banned_word() -> None:
    assert len(FILES) > 500
    assert [str(place) for place in find_places(FILES)] == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".md")])
def test_sentences_of_the_documentation_are_short(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [str(place) for place in find_long_sentences(name, text, MAX_NUM_WORDS)] == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", "The token is for nobody.", ["is for nobody", "nobody"]),
        ("a.md", "It takes 3 ms a\nstep.", ["ms a step"]),
        ("a.md", "It takes 3 ms per step. Launch a step.", []),
        ("a.md", "A dot product, and `product` in code.", []),
        ("a.md", "```python\nproduct = 1  # nobody\n```\n", []),
        ("a.md", "One [link](the-product.md) of products", ["products"]),
        ("src/a.py", '"""A weight that a product reads."""\nproduct = 1\n', ["product"]),
        ("src/a.py", "x = 1  # tokens a\n# row\n", ["tokens a row"]),
        ("src/a.py", 'raise ValueError(f"{x} is not what it asked for")\n', ["asked for"]),
        ("src/a.py", 'x = {"product": "nobody"}\n', []),
        ("src/a.py", "# a thread who waits\n", ["who"]),
        ("a.md", "Users who serve models.", []),
    ],
)
def test_places_are_found_in_prose_and_not_in_code(name: str, text: str, found: list[str]) -> None:
    assert sorted(place.found for place in find_in_text(name, text)) == sorted(found)


def test_a_long_sentence_is_found_with_its_line() -> None:
    text = f"Short. Fine.\n\n{'word ' * (MAX_NUM_WORDS + 1)}end. Short.\n\n- {'item ' * 9}\n"
    (place,) = find_long_sentences("a.md", text, MAX_NUM_WORDS)
    assert (place.line, place.found.split()[0]) == (3, "word")
