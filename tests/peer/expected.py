"""The table of expected outcomes, ``expected.md``: written, read, and compared with a run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PASSED = "passed"
DIFFERS = "differs"
FAILS = "fails"
NOT_RUN = "not run here"
NOT_APPLICABLE = "not applicable"
OUTCOMES = (PASSED, DIFFERS, FAILS, NOT_RUN, NOT_APPLICABLE)
WHOLE_FILE = "(the file)"

_MAX_REASON = 140
_MAX_NAMES = 2
_MAX_FEATURES = 4


@dataclass(frozen=True)
class Result:
    """The outcome of one test, or of a file that is not started.

    Attributes:
        file: path below vLLM's sources.
        test: the rest of the test's id, such as ``test_a[x]``; ``WHOLE_FILE`` if the file could not
            be collected or was not started.
        outcome: one of ``OUTCOMES``.
        reason: a feature, a difference or an error; "" if it passed.
        needs: the name of vLLM that the test needs; "" if the reason is no missing name.
        num_tests: tests that the result stands for.
    """

    file: str
    test: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    needs: str = ""
    num_tests: int = 1

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]


@dataclass
class Expected:
    """A read table.

    Attributes:
        passed: per file, the number of passed tests.
        unapplied: per file of which no test applies, the number of its tests.
        others: per other file, the outcome of each test that did not pass.
    """

    passed: dict[str, int] = field(default_factory=dict)
    unapplied: dict[str, int] = field(default_factory=dict)
    others: dict[str, dict[str, str]] = field(default_factory=dict)

    def outcome_of(self, result: Result) -> str:
        if result.file in self.unapplied:
            return NOT_APPLICABLE
        others = self.others.get(result.file, {})
        return others.get(result.test) or others.get(result.function) or PASSED


def render(results: Iterable[Result], title: str, more: str = "") -> str:
    """The text of a table."""
    by_file: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_file[result.file].append(result)
    groups = sorted(by_file.items())
    applied = [(file, group) for file, group in groups if not _is_unapplied(group)]
    unapplied = [(file, group) for file, group in groups if _is_unapplied(group)]

    lines = [f"# {title}", "", *([more, ""] if more else [])]
    lines += _summary([result for _, group in groups for result in group])
    if applied:
        lines += ["", "## Files", "", _row("File", *_heads())]
        lines += ["|---|" + "---:|" * (len(OUTCOMES) + 1)]
    for file, group in applied:
        seconds = sum(result.seconds for result in group)
        lines.append(_row(f"`{file}`", *_cells(_count(group)), f"{seconds:.0f}"))
    if unapplied:
        lines += ["", "## Files of which no test applies", "", _row("File", "Tests", "Missing")]
        lines += ["|---|---:|---|"]
    for file, group in unapplied:
        number = sum(result.num_tests for result in group)
        lines.append(_row(f"`{file}`", number, "; ".join(_missing(group))))
    if applied:
        lines += ["", "## Tests that do not pass"]
    for file, group in applied:
        rows = _collapse([result for result in group if result.outcome != PASSED], group)
        if rows:
            lines += ["", f"### `{file}`", "", "| Test | Tests | Outcome | Reason |"]
            lines += ["|---|---:|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _is_unapplied(group: Sequence[Result]) -> bool:
    return all(result.outcome == NOT_APPLICABLE for result in group)


def _count(group: Iterable[Result]) -> Counter[str]:
    found: Counter[str] = Counter()
    for result in group:
        found[result.outcome] += result.num_tests
    return found


def _summary(results: Sequence[Result]) -> list[str]:
    """Totals per outcome, and per outcome its reasons."""
    examples = [result for result in results if result.file.startswith("examples/")]
    tests = [result for result in results if result not in examples]
    total, of_examples = _count(tests), _count(examples)
    lines = [_row("Outcome", "Tests", "Files", "Examples"), "|---|---:|---:|---:|"]
    for outcome in OUTCOMES:
        files = {result.file for result in tests if result.outcome == outcome}
        name = outcome.capitalize()
        lines.append(_row(name, total[outcome], len(files), of_examples[outcome]))
    all_files = len({result.file for result in tests})
    lines.append(_row("All", sum(total.values()), all_files, len(examples)))
    applicable = total[PASSED] + total[DIFFERS] + total[FAILS]
    if applicable:
        share = 100 * total[PASSED] / applicable
        lines += ["", f"Of {applicable} tests that apply, {total[PASSED]} pass: {share:.1f}%."]
    heads = {
        DIFFERS: "Differs, by reason",
        FAILS: "Fails, by error",
        NOT_RUN: "Not run here, by reason",
        NOT_APPLICABLE: "Not applicable, by missing feature",
    }
    for outcome, head in heads.items():
        numbers: Counter[str] = Counter()
        places: dict[str, set[str]] = defaultdict(set)
        for result in results:
            if result.outcome == outcome:
                reason = _head(result.reason)
                numbers[reason] += result.num_tests
                places[reason].add(result.file)
        if numbers:
            lines += ["", f"## {head}", "", _row("Reason", "Tests", "Files"), "|---|---:|---:|"]
            for reason, number in sorted(numbers.items(), key=lambda one: (-one[1], one[0])):
                lines.append(_row(reason, number, len(places[reason])))
    return lines


def _head(reason: str) -> str:
    """A reason without what differs from test to test."""
    head = reason.partition(":")[0]
    return head if head in ("another model", "skipped by the test") else _text(reason)


def _missing(group: Sequence[Result]) -> list[str]:
    """Per feature: the number of tests, and the first names that these need."""
    tests: Counter[str] = Counter()
    names: dict[str, Counter[str]] = defaultdict(Counter)
    for result in group:
        tests[result.reason] += result.num_tests
        names[result.reason].update(name for name in result.needs.split() if name)
    found = []
    for reason, number in tests.most_common():
        most = [f"`{name}`" for name, _ in names[reason].most_common(_MAX_NAMES)]
        most += ["..."] if len(names[reason]) > _MAX_NAMES else []
        count = f" ({number})" if len(tests) > 1 else ""
        found.append(_text(reason) + count + (": " + ", ".join(most) if most else ""))
    return found[:_MAX_FEATURES] + ["..."] * (len(found) > _MAX_FEATURES)


def _heads() -> list[str]:
    return [outcome.capitalize() for outcome in OUTCOMES] + ["Seconds"]


def _cells(counts: Mapping[str, int]) -> list[int]:
    return [counts[outcome] for outcome in OUTCOMES]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _text(reason: str) -> str:
    short = reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + " ..."
    return re.sub(r"0x[0-9a-f]+", "0x...", short).replace("|", "/").replace("`", "'")


def _collapse(others: Sequence[Result], group: Sequence[Result]) -> list[str]:
    """One row per function if all its parameters have one outcome and reason, else one per test."""
    rows = []
    functions: dict[str, list[Result]] = defaultdict(list)
    for result in others:
        functions[result.function].append(result)
    num_all = Counter(result.function for result in group)
    for function, some in functions.items():
        kinds = {(result.outcome, _reason_and_name(result)) for result in some}
        if len(kinds) == 1 and len(some) == num_all[function]:
            ((outcome, reason),) = kinds
            rows.append(_row(f"`{function}`", len(some), outcome, reason))
        else:
            rows += [
                _row(f"`{_name(each.test)}`", 1, each.outcome, _reason_and_name(each))
                for each in some
            ]
    return rows


def _reason_and_name(result: Result) -> str:
    return _text(result.reason) + (f": `{result.needs}`" if result.needs else "")


def _name(test: str) -> str:
    return test.replace("|", "\\|")


def parse(text: str) -> Expected:
    """Read a table.

    Raises:
        ValueError: a row has an unknown outcome.
    """
    expected = Expected()
    file = ""
    for line in text.splitlines():
        heading = re.match(r"### `(.+)`$", line)
        counts = re.match(r"\| `([^`]+)` \| (\d+) \|(?: \d+ \|){5}$", line)
        unapplied = re.match(r"\| `([^`]+)` \| (\d+) \| ", line)
        other = re.match(r"\| `(.+?)` \| \d+ \| ([^|]+?) \| ", line)
        if heading:
            file = heading[1]
        elif not file and counts:
            expected.passed[counts[1]] = int(counts[2])
        elif not file and unapplied:
            expected.unapplied[unapplied[1]] = int(unapplied[2])
        elif file and other:
            if other[2] not in OUTCOMES:
                raise ValueError(f"{file}: outcome {other[2]!r} must be one of {OUTCOMES}")
            expected.others.setdefault(file, {})[other[1].replace("\\|", "|")] = other[2]
    return expected


def compare(results: Iterable[Result], expected: Expected) -> list[str]:
    """The differences between a run and the table, one line each; empty if there are none.

    Only the files of the run are compared.
    """
    found = []
    passed: Counter[str] = Counter()
    all_tests: Counter[str] = Counter()
    for result in results:
        all_tests[result.file] += result.num_tests
        passed[result.file] += result.num_tests * (result.outcome == PASSED)
        before = expected.outcome_of(result)
        if before != result.outcome:
            reason = f": {result.reason}" if result.reason else ""
            found.append(f"{result.file}::{result.test}: {before} -> {result.outcome}{reason}")
    for file in sorted(all_tests):
        if file in expected.unapplied:
            before_count, count, what = expected.unapplied[file], all_tests[file], "not applicable"
        else:
            before_count, count, what = expected.passed.get(file, 0), passed[file], "passed"
        if count != before_count:
            found.append(f"{file}: {before_count} {what} -> {count} {what}")
    return found
