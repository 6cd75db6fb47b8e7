"""Seeded defects: each replaces exactly one rule of the machine by a broken one, most of them
taken from real engines (the row of docs/real_bugs.md). A property that no defect can break says
nothing."""

from . import drafts, life, liveness, plan, pool, segments, shares, siblings, states, step
from .registry import DEFECTS, Defect

__all__ = [
    "DEFECTS",
    "Defect",
    "drafts",
    "life",
    "liveness",
    "plan",
    "pool",
    "segments",
    "shares",
    "siblings",
    "states",
    "step",
]
