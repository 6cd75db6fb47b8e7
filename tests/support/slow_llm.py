"""An ``LLM`` over a content runner whose steps take a time of their own, as a model's do."""

from __future__ import annotations

import time
from typing import Any

from pagespec import LLM
from pagespec.engine.plan import StepPlan
from tests.support.content_llm import NUM_TOKENS, content_llm
from tests.support.content_runner import ContentRunner


class SlowRunner(ContentRunner):
    """Waits ``step_s`` seconds in each step, as for a device: other threads run meanwhile."""

    def __init__(self, step_s: float, **settings: Any) -> None:
        super().__init__(vocab_size=NUM_TOKENS, **settings)
        self.step_s = step_s

    def dispatch(self, plan: StepPlan) -> Any:
        time.sleep(self.step_s)
        return super().dispatch(plan)


def slow_llm(step_s: float, *, num_blocks: int = 24, block_size: int = 2, **settings: Any) -> LLM:
    """``settings`` as of ``LLM``."""
    runner = SlowRunner(step_s, num_blocks=num_blocks, block_size=block_size)
    return content_llm(num_blocks=num_blocks, block_size=block_size, runner=runner, **settings)
