"""The table of expected outcomes, ``expected.md``: written, read, and compared with a run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PASSED = "passed"
NOT_APPLICABLE = "not applicable"
DIFFERS = "differs"
FAILS = "fails"
OUTCOMES = (PASSED, NOT_APPLICABLE, DIFFERS, FAILS)
WHOLE_FILE = "(the file)"

_MAX_REASON = 140


@dataclass(frozen=True)
class Result:
    """The outcome of one test.

    Attributes:
        file: path below vLLM's sources.
        test: the rest of the test's id, such as ``test_a[x]``; ``WHOLE_FILE`` if the file could not
            be collected.
        outcome: one of ``OUTCOMES``.
        reason: a feature, a difference or an error; "" if it passed.
    """

    file: str
    test: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]


@dataclass
class Expected:
    """A read table: per file the number of passed tests, and the outcome of each other test."""

    passed: dict[str, int] = field(default_factory=dict)
    others: dict[str, dict[str, str]] = field(default_factory=dict)

    def outcome_of(self, result: Result) -> str:
        others = self.others.get(result.file, {})
        return others.get(result.test) or others.get(result.function) or PASSED


def render(results: Iterable[Result], title: str, more: str = "") -> str:
    """The text of a table."""
    by_file: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_file[result.file].append(result)
    lines = [f"# {title}", "", *([more, ""] if more else [])]
    lines += [f"| File | {' | '.join(_heads())} |", "|---|" + "---:|" * (len(OUTCOMES) + 1)]
    total: Counter[str] = Counter()
    for file, group in sorted(by_file.items()):
        counts = Counter(result.outcome for result in group)
        total += counts
        seconds = sum(result.seconds for result in group)
        lines.append(_row(f"`{file}`", *_cells(counts), f"{seconds:.0f}"))
    seconds = sum(result.seconds for group in by_file.values() for result in group)
    lines.append(_row("All", *_cells(total), f"{seconds:.0f}"))
    applicable = total[PASSED] + total[DIFFERS] + total[FAILS]
    if applicable:
        share = 100 * total[PASSED] / applicable
        lines += ["", f"Of {applicable} tests that apply, {total[PASSED]} pass: {share:.1f}%."]
    features = Counter(
        result.reason.partition(":")[0]
        for group in by_file.values()
        for result in group
        if result.outcome == NOT_APPLICABLE
    )
    lines += ["", "## Not applicable, by feature", "", "| Feature | Tests |", "|---|---:|"]
    lines += [_row(_text(name), count) for name, count in features.most_common()]
    lines += ["", "## Tests that do not pass"]
    for file, group in sorted(by_file.items()):
        rows = _collapse([result for result in group if result.outcome != PASSED], group)
        if rows:
            lines += ["", f"### `{file}`", "", "| Test | Tests | Outcome | Reason |"]
            lines += ["|---|---:|---|---|", *rows]
    return "\n".join(lines) + "\n"


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
        kinds = {(result.outcome, _text(result.reason)) for result in some}
        if len(kinds) == 1 and len(some) == num_all[function]:
            ((outcome, reason),) = kinds
            rows.append(_row(f"`{function}`", len(some), outcome, reason))
        else:
            rows += [
                _row(f"`{_name(each.test)}`", 1, each.outcome, _text(each.reason)) for each in some
            ]
    return rows


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
        counts = re.match(r"\| `([^`]+)` \| (\d+) \|(?: \d+ \|){4}$", line)
        other = re.match(r"\| `(.+?)` \| \d+ \| ([^|]+?) \| ", line)
        if heading:
            file = heading[1]
        elif not file and counts:
            expected.passed[counts[1]] = int(counts[2])
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
    files = set()
    for result in results:
        files.add(result.file)
        passed[result.file] += result.outcome == PASSED
        before = expected.outcome_of(result)
        if before != result.outcome:
            reason = f": {result.reason}" if result.reason else ""
            found.append(f"{result.file}::{result.test}: {before} -> {result.outcome}{reason}")
    for file in sorted(files):
        before_count = expected.passed.get(file, 0)
        if passed[file] != before_count:
            found.append(f"{file}: {before_count} passed -> {passed[file]} passed")
    return found
