"""The command line over a slow content runner, for a test that sends it a Ctrl-C.

Prints "working" on stderr at its first step.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from pagespec import LLM
from pagespec.cli import make_llm as start
from pagespec.cli.main import app
from pagespec.engine.plan import StepPlan
from tests.support.content_llm import NUM_TOKENS, content_llm
from tests.support.content_runner import ContentRunner

NUM_BLOCKS, BLOCK_SIZE = 2000, 16


class SlowRunner(ContentRunner):
    def dispatch(self, plan: StepPlan) -> Any:
        if self.num_steps == 0:
            print("working", file=sys.stderr, flush=True)
        time.sleep(0.001)
        return super().dispatch(plan)


def make_llm(_model: str, **_: Any) -> LLM:
    runner = SlowRunner(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=NUM_TOKENS, pipeline_depth=1
    )
    return content_llm(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, runner=runner)


# A shell that starts this in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
start.make_llm = make_llm
app(prog_name="pagespec")
