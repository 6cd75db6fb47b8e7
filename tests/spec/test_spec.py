"""The specification's properties hold in the small scopes, and every seeded defect is detected."""

from __future__ import annotations

import ast
import random
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

import spec
from spec import model
from spec.canonical import digest
from spec.checker import ALL_PROPERTIES, Report, explore
from spec.defects import DEFECTS
from spec.scopes import CI, SCOPES, SEEDED
from spec.state import (
    Schedule,
    Segment,
    Segments,
    State,
    prefixes,
    read_prefix,
    root,
    spell,
    without_last,
)
from spec.trace import render
from spec.walk import random_scope, walk

DEFECT_CASES = [(name, prop) for name, known in DEFECTS.items() for prop in known.violates]


@cache
def ci_report(name: str) -> Report:
    return explore(SCOPES[name])


# Whose states show all kinds of plans.
KINDS_OF_PLANS = ("hold", "states-depth-2", "drafts-overlap", "segments", "wishes-sync")
# The others run at night. Each feature has one here, with few states; some have 20 times as many.
BY_DAY = {
    f"ci-{name}"
    for name in (
        *KINDS_OF_PLANS,
        *("sync", "priority", "fair-siblings", "states", "states-uncached"),
        *("drafts-history", "drafts-paced", "drafts-states", "wishes-overlap"),
    )
}
SCOPES_BY_DAY = [
    pytest.param(scope.name, marks=() if scope.name in BY_DAY else pytest.mark.nightly)
    for scope in CI
]


@pytest.mark.parametrize("name", SCOPES_BY_DAY)
def test_no_property_is_violated_in_a_ci_scope(name: str) -> None:
    report = ci_report(name)
    assert report.complete
    assert not report.violated, render(report.trace, report.scope, report.cycle)


def test_ci_scopes_exercise_every_kind_of_plan() -> None:
    reports = [ci_report(f"ci-{name}") for name in KINDS_OF_PLANS]
    seen = sum((report.seen for report in reports), Counter())
    plans = ("preempt", "hold", "hit", "evict", "chunk", "draft", "wish", "mixed")
    for event in (*plans, "flight 2", "flight 3", "chunk in segment", "hit in segment"):
        assert seen[event] > 0, event


@pytest.mark.parametrize(("name", "prop"), DEFECT_CASES)
def test_a_seeded_defect_violates_its_property(name: str, prop: str) -> None:
    known = DEFECTS[name]
    report = explore(known.scope, only=[prop], max_states=20_000)
    assert prop in report.violated
    assert len(report.trace) <= 30
    assert "r0" in render(report.trace, report.scope, report.cycle)


@pytest.mark.parametrize("name", DEFECTS)
def test_the_scope_of_a_defect_is_clean_without_it(name: str) -> None:
    report = explore(DEFECTS[name].scope._replace(defects=frozenset()), max_states=1_500)
    assert not report.violated


def test_no_property_is_vacuous() -> None:
    broken = {prop for known in DEFECTS.values() for prop in known.violates}
    assert broken == set(ALL_PROPERTIES)


def all_segments(length: int) -> Iterator[Segments]:
    """All segmentations of a prompt of that length into tokens and two contents."""
    if not length:
        yield ()
    for first, content in product(range(1, length + 1), (None, 1, 7)):
        for rest in all_segments(length - first):
            yield (Segment(first, content), *rest)


def test_a_name_stands_for_one_prefix() -> None:
    """Includes content segments: a name can be parsed position by position, and cut."""
    held: dict[int, object] = {}
    for segments in all_segments(4):
        for salt, tokens in product((0, 1), product((0, 2), repeat=4)):
            contents = [
                (content, 0 if content is None else i)
                for length, content in segments
                for i in range(length)
            ]
            names = prefixes(salt, (*tokens, 1), segments)
            positions = [(t, *c) for t, c in zip((*tokens, 1), [*contents, (None, 0)], strict=True)]
            for end, name in enumerate(names, 1):
                expected = salt, tuple(positions[:end])
                assert read_prefix(name) == expected
                assert held.setdefault(name, expected) == expected
                assert without_last(name) == (names[end - 2] if end > 1 else root(salt))
    assert (
        spell(prefixes(0, (0, 1, 1), (Segment(1), Segment(1, 3), Segment(1)))[-1]) == "0|01<3+0>1"
    )


def reachable(max_depth: int) -> set[State]:
    scope = SEEDED
    frontier, seen = [model.initial(scope)], {model.initial(scope)}
    for _ in range(max_depth):
        found = {s for state in frontier for _, s in model.actions(state, scope)} - seen
        seen |= found
        frontier = list(found)
    return seen


def test_symmetry_reduction_loses_no_state() -> None:
    raw = reachable(max_depth=100)
    names = {digest(state, SEEDED) for state in raw}
    report = explore(SEEDED)
    assert report.states == len(names) < len(raw)


def test_random_walks_in_larger_worlds_violate_nothing() -> None:
    rng = random.Random(7)
    for _ in range(60):
        scope = random_scope(rng)
        bad, trace = walk(scope, rng, 120)
        assert not bad, f"{scope}\n{render(trace, scope)}"


def test_step_applies_one_named_action() -> None:
    for state in reachable(max_depth=5):
        for label, successor in model.actions(state, SEEDED):
            assert model.step(state, label, SEEDED) == successor


def test_a_plan_is_readable_from_the_state() -> None:
    state = model.initial(SEEDED)
    state = next(s for _, s in model.actions(state, SEEDED))
    made, _ = model.plan(state, SEEDED)
    assert [tuple(row) for row in made.rows] == [(0, 0, 2, 1, (), 0)]
    after = model.step(state, Schedule((0,)), SEEDED)
    assert [tuple(row)[:4] for row in after.flight[0]] == [(0, 0, 2, (0,))]


def foreign_imports(path: Path, root: Path) -> set[str]:
    """Imports of the file that are neither in the standard library nor below ``root``."""
    foreign = set()
    depth = len(path.relative_to(root).parts)  # so many dots lead to the root, one more beyond it
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module).partition(".")[0]]
        elif isinstance(node, ast.ImportFrom) and node.level > depth:
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        foreign.update(name for name in names if name not in sys.stdlib_module_names)
    return foreign


def test_the_specification_imports_itself_the_standard_library_and_z3_for_the_proof() -> None:
    root = Path(spec.__file__).parent
    paths = sorted(root.rglob("*.py"))
    found = {path.relative_to(root).as_posix(): foreign_imports(path, root) for path in paths}
    assert {name: foreign for name, foreign in found.items() if foreign} == {
        "proof.py": {"z3"},
        "proof_pool.py": {"z3"},
    }
