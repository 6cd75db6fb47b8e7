"""Seeded defects: each replaces exactly one rule of the machine by a broken one. Most are taken
from real engines (with the row of docs/real_bugs.md). They show that every property can fail; a
property that no defect violates is vacuous."""

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
