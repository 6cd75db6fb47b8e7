"""The table and its comparison; vLLM's sources are not needed."""

from __future__ import annotations

import pytest

from tests.peer.expected import (
    DIFFERS,
    FAILS,
    NOT_APPLICABLE,
    PASSED,
    Result,
    compare,
    parse,
    render,
)
from tests.peer.reasons import result_of

FILE = "tests/a/test_b.py"
RESULTS = [
    Result(FILE, "test_one", PASSED, "", 1.5),
    Result(FILE, "test_two[x]", NOT_APPLICABLE, "LoRA"),
    Result(FILE, "test_two[y|z]", NOT_APPLICABLE, "LoRA"),
    Result(FILE, "test_three[a|b]", FAILS, "TypeError: a | b"),
    Result(FILE, "test_three[c]", PASSED),
    Result("tests/test_c.py", "test_four", DIFFERS, "another model"),
]


def test_a_run_equals_the_table_that_it_wrote() -> None:
    text = render(RESULTS, "Title")
    assert "| All | 2 | 2 | 1 | 1 |" in text
    assert "Of 4 tests that apply, 2 pass: 50.0%." in text
    assert "| `test_two` | 2 | not applicable | LoRA |" in text
    assert compare(RESULTS, parse(text)) == []


@pytest.mark.parametrize(
    "changed",
    [
        Result(FILE, "test_one", FAILS, "AssertionError"),
        Result(FILE, "test_two[y|z]", PASSED),
        Result(FILE, "test_three[a|b]", PASSED),
        Result("tests/test_c.py", "test_four", FAILS, "KeyError"),
        Result("tests/test_c.py", "test_four", PASSED),
    ],
)
def test_each_change_of_an_outcome_is_a_difference(changed: Result) -> None:
    before = parse(render(RESULTS, "Title"))
    after = [
        changed if (one.file, one.test) == (changed.file, changed.test) else one for one in RESULTS
    ]
    (line, *more) = compare(after, before)
    assert line.startswith(f"{changed.file}::{changed.test}: ")
    assert line.partition(" -> ")[2].startswith(changed.outcome)
    assert len(more) == (PASSED in (changed.outcome, before.outcome_of(changed)))


def test_a_test_that_passed_and_is_gone_is_a_difference() -> None:
    before = parse(render(RESULTS, "Title"))
    assert compare(RESULTS[1:], before) == [f"{FILE}: 2 passed -> 1 passed"]


def test_a_file_that_did_not_run_is_not_compared() -> None:
    assert compare(RESULTS[-1:], parse(render(RESULTS, "Title"))) == []


def test_an_unknown_outcome_is_refused() -> None:
    text = render(RESULTS, "Title").replace("| not applicable |", "| maybe |")
    with pytest.raises(ValueError, match=r"test_b\.py: outcome 'maybe' must be one of"):
        parse(text)


def test_entries_of_a_record_become_results() -> None:
    entry = {"id": f"{FILE}::test_x[1]", "outcome": "skipped", "seconds": 0.5}
    skipped = result_of(entry | {"reason": "not applicable: LoRA (vllm.lora.request)"})
    assert skipped == Result(FILE, "test_x[1]", NOT_APPLICABLE, "LoRA", 0.5)
    failed = result_of(entry | {"outcome": "failed", "reason": "ZeroDivisionError: x"})
    assert failed == Result(FILE, "test_x[1]", FAILS, "ZeroDivisionError: x", 0.5)
