"""Checks schedule transparency (batch invariance) on the user's own machine: a request's tokens
and logits are the same to the bit, whatever else runs.

Read in this order: ``stepped_engine`` (an engine stepped by hand), ``cases`` (the schedules tried,
and scores beside sampled log-probabilities), ``gate`` (compares each answer with the one given
alone), ``report`` (how much is tried, what is found).

Imports ``llm`` and ``engine``. Imported by ``cli``.
"""

from .gate import run_gate
from .report import CaseGroup, GateReport, GateSize

__all__ = ["CaseGroup", "GateReport", "GateSize", "run_gate"]
