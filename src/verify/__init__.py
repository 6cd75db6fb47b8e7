"""Checks on the user's own machine that a request's bits do not depend on its schedule."""

from .gate import run_controls, run_gate
from .report import Family, GateReport, GateSize

__all__ = ["Family", "GateReport", "GateSize", "run_controls", "run_gate"]
