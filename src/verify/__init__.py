"""Checks on the user's machine that tokens and logits are bit-identical, whatever else runs
(schedule transparency, or batch invariance).

Reading order: ``stepped_engine`` (an engine stepped by hand), ``cases`` (the schedules, and scores
compared with sampled log-probabilities), ``gate`` (compares each answer with the answer of the
request alone), ``report`` (the amount of cases, and their results).

The package imports ``llm`` and ``engine``; ``cli`` imports it.
"""

from .gate import run_gate
from .report import CaseGroup, GateReport, GateSize

__all__ = ["CaseGroup", "GateReport", "GateSize", "run_gate"]
