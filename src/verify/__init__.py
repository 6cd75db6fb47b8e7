"""Checks on the user's own machine that a request's bits do not depend on its schedule."""

from .gate import run_controls, run_gate
from .report import CaseGroup, GateReport, GateSize

__all__ = ["CaseGroup", "GateReport", "GateSize", "run_controls", "run_gate"]
