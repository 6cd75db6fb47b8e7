"""Measure the CPU time of steps by number of tokens, at start, to choose the number of drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..engine.config import EngineConfig
from ..engine.plan import StepPlan
from ..engine.request import RequestInfo
from ..engine.sampling_params import SamplingParams
from ..engine.speculation import DEFAULT_COSTS, SpeculativeConfig, StepCosts
from .cpu_runner import ModelRunner

logger = logging.getLogger("pagespec")

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_ROWS = (1, 4, 16)
_NUM_REPEATS = 3
_MAX_DURATION_S = 3.0
_PARAMS = SamplingParams(temperature=0.0)


def measure_costs(
    runner: ModelRunner, config: EngineConfig, drafts: SpeculativeConfig, max_model_len: int
) -> StepCosts:
    """Time steps of rows with draft tokens. Their blocks are not published, so no request reads
    them. It takes some 3 s for a small model; larger steps are left out for a large one."""
    # Tokens per row: they need no second block.
    width = min(1 + drafts.num_speculative_tokens, config.block_size, max_model_len - 1)
    num_rows = min(config.max_num_seqs, runner.num_blocks)
    most = min(config.num_tokens_per_step, num_rows * width)
    measured: list[tuple[int, float]] = []
    begin = time.perf_counter()
    for size in _SIZES:
        is_long = len(measured) > 1 and time.perf_counter() - begin > _MAX_DURATION_S
        if size > most or is_long:
            break
        plan = _plan(size, width, has_states=bool(runner.captured.loaded.recurrent))
        seconds = min(runner.seconds_of(plan) for _ in range(_NUM_REPEATS))
        if runner.drafting is not None:  # computes the positions of every step
            seconds += min(runner.draft_seconds_of(plan) for _ in range(_NUM_REPEATS))
        measured.append((size, seconds))
    if len(measured) < 2:
        return DEFAULT_COSTS
    logger.info("draft tokens: CPU milliseconds of a step by its tokens: %s", _shown(measured))
    passes: list[tuple[int, float]] = []
    if runner.drafting is not None and config.block_size > 2:
        passes = [(n, _pass_seconds(runner, n)) for n in _NUM_ROWS if n <= num_rows]
        logger.info("draft tokens: CPU milliseconds of a drafter's pass: %s", _shown(passes))
    return StepCosts(measured, drafting=passes if len(passes) > 1 else ())


def _pass_seconds(runner: ModelRunner, num_rows: int) -> float:
    """The time of a drafter's pass over one position per row."""
    once, twice = (
        min(
            runner.draft_seconds_of(_plan(num_rows, 1, num_wanted=num_wanted))
            for _ in range(_NUM_REPEATS)
        )
        for num_wanted in (1, 2)
    )
    return max(1e-6, twice - once)


def _shown(pairs: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{number}: {1000 * seconds:.1f}" for number, seconds in pairs)


def _plan(
    num_tokens: int, width: int, *, has_states: bool = False, num_wanted: int = 0
) -> StepPlan:
    """A step of rows with ``width`` tokens that samples from each of its positions, and whose
    runner drafts ``num_wanted`` tokens behind each row."""
    lengths = [width] * (num_tokens // width) + [num_tokens % width] * (num_tokens % width > 0)
    infos = tuple(RequestInfo(f"cost-{i}", n, _PARAMS, 0, b"") for i, n in enumerate(lengths))
    return StepPlan(
        step=0,
        requests=infos,
        starts=(0,) * len(lengths),
        num_tokens=tuple(lengths),
        num_samples=tuple(lengths),
        token_ids=(0,) * num_tokens,
        tables={row: (row,) for row in range(len(lengths))},
        state_tables={row: (row,) for row in range(len(lengths))} if has_states else {},
        wanted_drafts={row: num_wanted for row in range(len(lengths)) if num_wanted},
    )
