"""An ``LLM`` without a model whose steps take a time of their own, as a model's do."""

from __future__ import annotations

import time
from typing import Any

from pagespec import LLM
from pagespec.engine.plan import StepPlan
from tests.support.content_llm import content_llm


def slowed(llm: LLM, step_s: float) -> LLM:
    """Have each step of an ``LLM`` wait so many seconds; other threads run meanwhile."""
    runner: Any = llm.engine.runner
    dispatch = runner.dispatch

    def wait_and_dispatch(plan: StepPlan) -> Any:
        time.sleep(step_s)
        return dispatch(plan)

    runner.dispatch = wait_and_dispatch
    return llm


def slow_llm(step_s: float, **settings: Any) -> LLM:
    """``settings`` as of ``content_llm``."""
    return slowed(content_llm(**settings), step_s)
