"""The step whose forward pass a thread is in, for functions that models call with nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ...kernels.attention.spec import AttentionSpec
from ..step_inputs import KVCaches, RecurrentStates, StepInputs


class ModelStep(NamedTuple):
    """What the attention and recurrent calls of a step share.

    ``turns`` counts the attention calls of modules that make several, by the number of the first.
    """

    inputs: StepInputs
    kv_caches: KVCaches
    states: RecurrentStates
    specs: Sequence[AttentionSpec]
    turns: dict[int, int]


class _Current(threading.local):
    """``num_recurrent_calls``: how many the pass has made so far."""

    step: ModelStep | None = None
    num_recurrent_calls: int = 0


current = _Current()
