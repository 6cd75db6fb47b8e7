"""Measure the duration of steps by number of tokens, at start, to choose the number of draft
tokens.

On a CPU a step costs the CPU time of its computation. On a GPU it costs the time of its captured
graph; the host time that no step in flight overlaps is measured too. Over several ranks it is the
duration of the step of all ranks. All rows begin at position 0, so the time to read long contexts
is not included.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..engine.config import EngineConfig
from ..engine.drafting.config import SpeculativeConfig
from ..engine.drafting.costs import StepCosts
from ..engine.plan import Blocks, StepPlan
from ..engine.request import RequestInfo
from ..engine.sampling_params import SamplingParams

logger = logging.getLogger("pagespec")

_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_NUM_ROWS = (1, 4, 16, 64, 256)  # of a drafter's passes
_MOST_ROWS_ON_CPU = 16
_MOST_ON_CPU = 128
_NUM_REPEATS = 3
_MAX_DURATION_S = 3.0
_PARAMS = SamplingParams(temperature=0.0)
_STRIDE = 7919  # between token ids: experts of a step differ as they do between real tokens


class MeasuredRunner(Protocol):
    """A runner of one process, or of a group of ranks.

    Attributes:
        captured: the model, with ``loaded.vocab_size``.
        num_blocks, block_size, num_state_slots, max_num_samples: as of :class:`.LocalRunner`.
    """

    captured: Any
    num_blocks: int
    block_size: int
    num_state_slots: int
    max_num_samples: int | None

    def seconds_of(self, plan: StepPlan) -> tuple[float, float]:
        """Seconds of a step, and of host time that no step in flight overlaps if the next step is
        planned after this one is collected. Called without steps in flight; the runner is reset
        afterwards."""

    def draft_seconds_of(self, plan: StepPlan) -> float:
        """Seconds of a drafter's passes behind a step; 0 without a drafter. Called like
        :meth:`seconds_of`."""


def measure_costs(
    runner: MeasuredRunner, config: EngineConfig, drafts: SpeculativeConfig, max_model_len: int
) -> StepCosts:
    """Time steps of rows with draft tokens. Their blocks are not published, so no request reads
    them. It takes some 3 s for a small model on a CPU, and below 1 s on a GPU; larger steps are
    left out for a large model."""
    num_slots = runner.num_blocks * config.block_size
    # Tokens per row. The last token of a request is never computed.
    width = max(1, min(1 + drafts.num_speculative_tokens, max_model_len - 1, num_slots))
    num_rows = _most_rows(runner, config, width)
    most = min(config.num_tokens_per_step, num_rows * width)
    most = min(most, runner.max_num_samples or _MOST_ON_CPU)
    times = _measure_steps(runner, width, most)
    measured = [(size, seconds) for size, seconds, _ in times]
    exposed_s = statistics.median(exposed_s for *_, exposed_s in times)
    if runner.max_num_samples is not None:
        # Steps with draft tokens are captured apart from decode steps, with other kernels.
        both = [pair for pair in measured if pair[0] <= num_rows]
        some = (both[0], both[len(both) // 2], both[-1])
        plain = [_measure(runner, size, 1)[0] for size, _ in some]
        longer = [seconds - least for (_, seconds), least in zip(some, plain, strict=True)]
        extra_s = max(0.0, statistics.median(longer))
        # The median may exceed the time of a short step.
        measured = [(size, max(seconds - extra_s, plain[0])) for size, seconds in measured]
        exposed_s += extra_s
    logger.info(
        "draft tokens: milliseconds of a step by its tokens: %s; %.2f more with draft tokens",
        _shown(measured),
        1000 * exposed_s,
    )
    passes: list[tuple[int, float]] = []
    if drafts.has_model:
        passes = _measure_passes(runner, config, min(max_model_len, num_slots))
        logger.info("draft tokens: milliseconds of a drafter's pass: %s", _shown(passes))
    return StepCosts(
        measured,
        exposed_s=exposed_s,
        drafting=passes,
        computes_again=runner.num_state_slots > 0,
    )


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes below ``most``, then ``most`` itself, or the largest size if that is less."""
    return [size for size in sizes if size < most] + [min(most, sizes[-1])]


def _most_rows(runner: MeasuredRunner, config: EngineConfig, num_slots: int) -> int:
    """The most rows of a step, each with blocks for ``num_slots`` tokens."""
    num_blocks = -(-num_slots // config.block_size)
    num_rows = min(config.max_num_seqs, runner.num_blocks // num_blocks)
    return min(num_rows, runner.num_state_slots) if runner.num_state_slots else num_rows


def _measure_steps(runner: MeasuredRunner, width: int, most: int) -> list[tuple[int, float, float]]:
    """(number of tokens, seconds, seconds of exposed host time) of steps up to ``most`` tokens, in
    rows of ``width``."""
    times: list[tuple[int, float, float]] = []
    begin = time.perf_counter()
    for size in _up_to(_SIZES, most):
        if len(times) > 1 and time.perf_counter() - begin > _MAX_DURATION_S:
            break
        times.append((size, *_measure(runner, size, width)))
    # A row with all its draft tokens: shorter steps do not predict its time.
    row = min(width, most)
    if times[-1][0] < row:
        times.append((row, *_measure(runner, row, width, num_repeats=1)))
    return times


def _measure_passes(
    runner: MeasuredRunner, config: EngineConfig, num_slots: int
) -> list[tuple[int, float]]:
    """Seconds of a drafter's pass over one position per row, by number of rows.

    Args:
        num_slots: the most slots of a request. With fewer than 2 no token can be drafted.
    """
    num_wanted = min(2, num_slots - 1)
    if num_wanted < 1:
        return []
    most = _most_rows(runner, config, 1 + num_wanted)
    most = min(most, runner.max_num_samples or _MOST_ROWS_ON_CPU, config.num_tokens_per_step)
    passes: list[tuple[int, float]] = []
    begin = time.perf_counter()
    for num_rows in _up_to(_NUM_ROWS, most):
        if passes and time.perf_counter() - begin > _MAX_DURATION_S:
            break
        passes.append((num_rows, _pass_seconds(runner, num_rows, num_wanted)))
    return passes


def _measure(
    runner: MeasuredRunner, num_tokens: int, width: int, num_repeats: int = _NUM_REPEATS
) -> tuple[float, float]:
    """The least seconds of a step, and of the host time that it exposes."""
    plan = _plan(num_tokens, width, runner)
    times = [runner.seconds_of(plan) for _ in range(num_repeats)]
    seconds = min(seconds for seconds, _ in times)
    # A drafter computes the positions of every step.
    seconds += min(runner.draft_seconds_of(plan) for _ in range(num_repeats))
    return seconds, min(exposed_s for _, exposed_s in times)


def _pass_seconds(runner: MeasuredRunner, num_rows: int, num_wanted: int) -> float:
    """The time of a drafter's pass over one position per row: the difference between two drafted
    tokens and one. If a request has no slot for two, the time of all passes for one."""
    times = [
        min(runner.draft_seconds_of(_plan(num_rows, 1, runner, n)) for _ in range(_NUM_REPEATS))
        for n in range(1, num_wanted + 1)
    ]
    return max(1e-6, times[-1] - sum(times[:-1]))


def _shown(pairs: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{number}: {1000 * seconds:.2f}" for number, seconds in pairs)


def _plan(num_tokens: int, width: int, runner: MeasuredRunner, num_wanted: int = 0) -> StepPlan:
    """A step of rows with ``width`` tokens that samples from each of its positions, and whose
    runner drafts ``num_wanted`` tokens behind each row."""
    lengths = [width] * (num_tokens // width) + [num_tokens % width] * (num_tokens % width > 0)
    infos = tuple(RequestInfo(f"cost-{i}", n, _PARAMS, 0, b"") for i, n in enumerate(lengths))
    num_blocks = -(-(width + num_wanted) // runner.block_size)
    tables: dict[int, Blocks] = {
        row: tuple(range(row * num_blocks, (row + 1) * num_blocks)) for row in range(len(lengths))
    }
    states: dict[int, Blocks] = {row: (row,) for row in range(len(lengths))}
    vocab_size = runner.captured.loaded.vocab_size
    return StepPlan(
        step=0,
        requests=infos,
        starts=(0,) * len(lengths),
        num_tokens=tuple(lengths),
        num_samples=tuple(lengths),
        token_ids=tuple(_STRIDE * i % vocab_size for i in range(num_tokens)),
        tables=tables,
        state_tables=states if runner.num_state_slots else {},
        is_decode_only=width == 1,
        wanted_drafts={row: num_wanted for row in range(len(lengths)) if num_wanted},
    )
