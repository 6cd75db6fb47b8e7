"""Checks on the user's own machine that a request's bits do not depend on its schedule."""

from pagespec.verify.gate import run_controls, run_gate
from pagespec.verify.report import Family, GateReport, GateSize

__all__ = ["Family", "GateReport", "GateSize", "run_controls", "run_gate"]
