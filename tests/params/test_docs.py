"""The page about engine arguments is made from the declarations."""

from __future__ import annotations

from tests.support.param_docs import PAGE, page


def test_the_page_is_current() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "python -m tests.support.param_docs writes it"
    assert "| `max_num_seqs` | int | 64 | Maximum number of running" in text
    assert "| `data_parallel_size` |" in text
