"""The pool's invariants are proved inductive, and the proof fails for a defective action."""

from __future__ import annotations

import pytest

z3 = pytest.importorskip("z3")

from spec import proof  # noqa: E402
from spec.proof_pool import ACTIONS, BROKEN, INVARIANTS  # noqa: E402


def test_every_verification_condition_is_proved() -> None:
    answers = proof.conditions()
    assert len(answers) >= (len(ACTIONS) + 1) * len(INVARIANTS)
    assert {name for name, answer in answers.items() if answer != z3.unsat} == set()


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_is_possible(name: str) -> None:
    assert proof.ask(ACTIONS[name], None) == z3.sat


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_action_is_refuted(name: str) -> None:
    assert proof.refuted(BROKEN[name])
