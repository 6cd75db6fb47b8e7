"""The definition of a seeded defect: one broken rule, and a scope in which it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..model import Machine
from ..scopes import SEEDED
from ..state import Scope, Template


class Defect(NamedTuple):
    name: str
    violates: tuple[str, ...]
    rows: str  # of docs/real_bugs.md
    rule: type[Machine]
    scope: Scope


DEFECTS: dict[str, Defect] = {}


def defect(
    name: str, violates: str, rows: str = "", **scope: object
) -> Callable[[type[Machine]], type[Machine]]:
    def register(rule: type[Machine]) -> type[Machine]:
        small = SEEDED._replace(name=name, defects=frozenset([name]), **scope)  # type: ignore
        DEFECTS[name] = Defect(name, tuple(violates.split()), rows, rule, small)
        return rule

    return register


A, LONG = Template((0, 0), 2), Template((0, 0, 0, 0), 2)
