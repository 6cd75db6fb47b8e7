"""The table and its comparison; vLLM's sources are not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peer import static
from tests.peer.expected import (
    DIFFERS,
    FAILS,
    NOT_APPLICABLE,
    NOT_RUN,
    PASSED,
    WHOLE_FILE,
    Result,
    compare,
    parse,
    render,
)
from tests.peer.reasons import RULES, result_of

FILE = "tests/a/test_b.py"
SERVER = "internal: classes of the server"
RESULTS = [
    Result(FILE, "test_one", PASSED, "", 1.5),
    Result(FILE, "test_two[x]", NOT_APPLICABLE, "LoRA", 0.0, "lora.request.LoRARequest"),
    Result(FILE, "test_two[y|z]", NOT_APPLICABLE, "LoRA", 0.0, "lora.request.LoRARequest"),
    Result(FILE, "test_three[a|b]", FAILS, "TypeError: a | b"),
    Result(FILE, "test_three[c]", PASSED),
    Result("tests/test_c.py", "test_four", DIFFERS, "the words of the error"),
    Result("tests/test_c.py", "test_five", NOT_RUN, "several GPUs"),
    Result("tests/test_d.py", WHOLE_FILE, NOT_APPLICABLE, SERVER, 0.0, "entrypoints.A", 7),
    Result("examples/f.py", WHOLE_FILE, PASSED),
    Result("tests/test_e.py", "test_six[1]", NOT_APPLICABLE, "LoRA"),
    Result("tests/test_e.py", "test_six[2]", NOT_APPLICABLE, SERVER, 0.0, "entrypoints.B"),
]


def test_a_run_equals_the_table_that_it_wrote() -> None:
    text = render(RESULTS, "Title")
    for row in (
        "| Passed | 2 | 1 | 1 |",
        "| Not applicable | 11 | 3 | 0 |",
        "| All | 16 | 4 | 1 |",
        f"| {SERVER} | 8 | 2 |",
        "| `tests/a/test_b.py` | 2 | 0 | 1 | 0 | 2 | 2 |",
        f"| `tests/test_d.py` | 7 | {SERVER}: `entrypoints.A` |",
        f"| `tests/test_e.py` | 2 | LoRA (1); {SERVER} (1): `entrypoints.B` |",
        "| `test_two` | 2 | not applicable | LoRA: `lora.request.LoRARequest` |",
        "| `test_five` | 1 | not run here | several GPUs |",
    ):
        assert row in text.splitlines()
    assert "Of 4 tests that apply, 2 pass: 50.0%." in text
    assert compare(RESULTS, parse(text)) == []


@pytest.mark.parametrize(
    "changed",
    [
        Result(FILE, "test_one", FAILS, "AssertionError"),
        Result(FILE, "test_two[y|z]", PASSED),
        Result(FILE, "test_three[a|b]", PASSED),
        Result("tests/test_c.py", "test_four", FAILS, "KeyError"),
        Result("tests/test_c.py", "test_four", PASSED),
        Result("tests/test_e.py", "test_six[1]", FAILS, "KeyError"),
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


def test_a_test_that_is_gone_is_a_difference() -> None:
    before = parse(render(RESULTS, "Title"))
    assert compare(RESULTS[1:], before) == [f"{FILE}: 2 passed -> 1 passed"]
    (line,) = compare(RESULTS[:-1], before)
    assert line == "tests/test_e.py: 2 not applicable -> 1 not applicable"


def test_a_file_that_did_not_run_is_not_compared() -> None:
    assert compare(RESULTS[5:7], parse(render(RESULTS, "Title"))) == []


def test_an_unknown_outcome_is_refused() -> None:
    text = render(RESULTS, "Title").replace("| not applicable |", "| maybe |")
    with pytest.raises(ValueError, match=r"test_b\.py: outcome 'maybe' must be one of"):
        parse(text)


def test_entries_of_a_record_become_results() -> None:
    entry = {"id": f"{FILE}::test_x[1]", "outcome": "skipped", "seconds": 0.5}
    skipped = result_of(entry | {"reason": "not applicable: old (vllm.lora.request.A)"})
    assert skipped == Result(FILE, "test_x[1]", NOT_APPLICABLE, "LoRA", 0.5, "lora.request.A")
    own = result_of(entry | {"reason": "needs Triton"})
    assert (own.outcome, own.reason) == (NOT_RUN, "skipped by the test: needs Triton")
    failed = result_of(entry | {"outcome": "failed", "reason": "ZeroDivisionError: x"})
    assert failed == Result(FILE, "test_x[1]", FAILS, "ZeroDivisionError: x", 0.5)


def test_a_rule_names_a_feature_and_matches_more_than_a_folder() -> None:
    for rule in RULES:
        assert rule.reason
        assert rule.message or "::" in rule.test, rule


@pytest.mark.parametrize(
    ("imports", "reason"),
    [
        ("from vllm.v1.sample.sampler import Sampler", "internal: layers and kernels"),
        ("from vllm.lora.resolver import Resolver", "LoRA"),
        ("from vllm import LLM\nfrom vllm.v1.sample.sampler import Sampler", ""),
        ("from vllm.utils.network_utils import get_open_port", ""),
        ("from vllm.v1.sample.sampler import Sampler\nfrom tests.utils import VllmRunner", ""),
        ("import pytest", ""),
    ],
)
def test_only_a_file_that_reaches_no_name_of_ours_is_not_started(
    tmp_path: Path, imports: str, reason: str
) -> None:
    (tmp_path / "test_x.py").write_text(
        f"{imports}\ndef test_a(): pass\nasync def test_b(): pass\n"
    )
    found = static.unapplied(tmp_path, "test_x.py")
    assert (found.reason if found else "") == reason
    assert found is None or found.num_tests == 2


@pytest.mark.parametrize(
    ("body", "is_started"),
    [
        ("await client.responses.create()", False),
        ("await client.responses.create(); await client.chat.completions.create()", True),
        ("await client.completions.create()", True),
    ],
)
def test_a_file_of_only_the_responses_api_is_not_started(
    tmp_path: Path, body: str, is_started: bool
) -> None:
    (tmp_path / "test_x.py").write_text(f"async def test_a(client): {body}\n")
    found = static.unapplied(tmp_path, "test_x.py")
    assert (found is None) == is_started
    assert found is None or found.reason == "Responses API"
