"""Measure the duration of steps by number of tokens, at start, to choose the number of draft
tokens.

On a CPU a step costs the CPU time of its computation. On a GPU it costs the time of its captured
graph; the host time that no step in flight overlaps is measured too. All rows are in
their first block, so the time to read long contexts is not included.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

from ..engine.config import EngineConfig
from ..engine.drafting.config import SpeculativeConfig
from ..engine.drafting.costs import DEFAULT_COSTS, StepCosts
from ..engine.plan import Blocks, StepPlan
from ..engine.request import RequestInfo
from ..engine.sampling_params import SamplingParams
from .bases import LocalRunner

logger = logging.getLogger("pagespec")

_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_NUM_ROWS = (1, 4, 16, 64, 256)  # of a drafter's passes
_MOST_ROWS_ON_CPU = 16
_MOST_ON_CPU = 128
_NUM_REPEATS = 3
_MAX_DURATION_S = 3.0
_PARAMS = SamplingParams(temperature=0.0)
_STRIDE = 7919  # between token ids: experts of a step differ as they do between real tokens


def measure_costs(
    runner: LocalRunner, config: EngineConfig, drafts: SpeculativeConfig, max_model_len: int
) -> StepCosts:
    """Time steps of rows with draft tokens. Their blocks are not published, so no request reads
    them. It takes some 3 s for a small model on a CPU, and below 1 s on a GPU; larger steps are
    left out for a large model."""
    # Tokens per row: they need no second block.
    width = min(1 + drafts.num_speculative_tokens, config.block_size, max_model_len - 1)
    num_rows = min(config.max_num_seqs, runner.num_blocks)
    if runner.num_state_slots:
        num_rows = min(num_rows, runner.num_state_slots)
    most = min(config.num_tokens_per_step, num_rows * width)
    most = min(most, runner.max_num_samples or _MOST_ON_CPU)
    measured: list[tuple[int, float]] = []
    exposed: list[float] = []
    begin = time.perf_counter()
    for size in _SIZES:
        is_long = len(measured) > 1 and time.perf_counter() - begin > _MAX_DURATION_S
        if size > most or is_long:
            break
        seconds, exposed_s = _measure(runner, size, width)
        measured.append((size, seconds))
        exposed.append(exposed_s)
    if len(measured) < 2:
        return DEFAULT_COSTS
    exposed_s = statistics.median(exposed)
    if runner.max_num_samples is not None:
        # Steps with draft tokens are captured apart from decode steps, with other kernels.
        both = [pair for pair in measured if pair[0] <= num_rows]
        some = (both[0], both[len(both) // 2], both[-1])
        longer = [seconds - _measure(runner, size, 1)[0] for size, seconds in some]
        extra_s = max(0.0, statistics.median(longer))
        measured = [(size, seconds - extra_s) for size, seconds in measured]
        exposed_s += extra_s
    logger.info(
        "draft tokens: milliseconds of a step by its tokens: %s; %.2f more with draft tokens",
        _shown(measured),
        1000 * exposed_s,
    )
    passes: list[tuple[int, float]] = []
    if drafts.has_model and config.block_size > 2:
        most_rows = min(num_rows, runner.max_num_samples or _MOST_ROWS_ON_CPU)
        passes = [(n, _pass_seconds(runner, n)) for n in _NUM_ROWS if n <= most_rows]
        logger.info("draft tokens: milliseconds of a drafter's pass: %s", _shown(passes))
    drafting = passes if len(passes) > 1 else ()
    return StepCosts(
        measured,
        exposed_s=exposed_s,
        drafting=drafting,
        computes_again=runner.num_state_slots > 0,
    )


def _measure(runner: LocalRunner, num_tokens: int, width: int) -> tuple[float, float]:
    """The least seconds of a step, and of the host time that it exposes."""
    plan = _plan(num_tokens, width, runner)
    times = [runner.seconds_of(plan) for _ in range(_NUM_REPEATS)]
    seconds = min(seconds for seconds, _ in times)
    # A drafter computes the positions of every step.
    seconds += min(runner.draft_seconds_of(plan) for _ in range(_NUM_REPEATS))
    return seconds, min(exposed_s for _, exposed_s in times)


def _pass_seconds(runner: LocalRunner, num_rows: int) -> float:
    """The time of a drafter's pass over one position per row."""
    once, twice = (
        min(
            runner.draft_seconds_of(_plan(num_rows, 1, runner, num_wanted))
            for _ in range(_NUM_REPEATS)
        )
        for num_wanted in (1, 2)
    )
    return max(1e-6, twice - once)


def _shown(pairs: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{number}: {1000 * seconds:.2f}" for number, seconds in pairs)


def _plan(num_tokens: int, width: int, runner: LocalRunner, num_wanted: int = 0) -> StepPlan:
    """A step of rows with ``width`` tokens that samples from each of its positions, and whose
    runner drafts ``num_wanted`` tokens behind each row."""
    lengths = [width] * (num_tokens // width) + [num_tokens % width] * (num_tokens % width > 0)
    infos = tuple(RequestInfo(f"cost-{i}", n, _PARAMS, 0, b"") for i, n in enumerate(lengths))
    tables: dict[int, Blocks] = {row: (row,) for row in range(len(lengths))}
    vocab_size = runner.captured.loaded.vocab_size
    return StepPlan(
        step=0,
        requests=infos,
        starts=(0,) * len(lengths),
        num_tokens=tuple(lengths),
        num_samples=tuple(lengths),
        token_ids=tuple(_STRIDE * i % vocab_size for i in range(num_tokens)),
        tables=tables,
        state_tables=tables if runner.num_state_slots else {},
        is_decode_only=width == 1,
        wanted_drafts={row: num_wanted for row in range(len(lengths)) if num_wanted},
    )
