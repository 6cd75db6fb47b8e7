"""Counters and histograms of an engine's requests, for Prometheus and the live view."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from ..engine.request import Request
from ..serving.async_llm import AsyncLLM
from ..serving.served import End, Served

_INF = float("inf")


class Histogram:
    """Counts of values per bucket. One thread observes; any thread may read.

    An observation takes 0.2 us. A step of 256 rows makes 256 of them on the event loop that serves
    requests. The histogram of prometheus_client, with a lock and labels, takes several times as
    long.

    Args:
        boundaries: bucket boundaries for Prometheus, ascending. A value counts in the first bucket
            whose boundary is greater than or equal to it.
        between: additional boundaries, for finer quantiles.

    Attributes:
        uppers: upper boundaries of all buckets; the last one is infinite.
        counts: number of values in each bucket.
        total: the sum of all values.
    """

    def __init__(self, boundaries: Sequence[float], between: Iterable[float] = ()) -> None:
        self.boundaries = tuple(boundaries)
        self.uppers = (*sorted({*boundaries, *between}), _INF)
        self.counts = [0] * len(self.uppers)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.uppers, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' cumulative counts: per boundary, the number of values up to it."""
        counts = self.counts.copy()
        shown = {*self.boundaries, _INF}
        found, below = [], 0
        for upper, count in zip(self.uppers, counts, strict=True):
            below += count
            if upper in shown:
                found.append(("+Inf" if upper == _INF else repr(float(upper)), float(below)))
        return found


def quantile(uppers: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The quantile ``share`` of the counted values, interpolated linearly within its bucket; None
    without values. Above the last finite boundary it returns that boundary."""
    rank = share * sum(counts)
    if not rank:
        return None
    below, lower = 0, 0.0
    for upper, count in zip(uppers, counts, strict=True):
        if count and below + count >= rank:
            if upper == _INF:
                return lower
            return lower + (upper - lower) * (rank - below) / count
        below += count
        lower = upper
    return lower


def log_scale(first: float, last: float, factor: float) -> list[float]:
    """``first``, and each ``factor`` times the previous value, up to ``last``."""
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to ``limit``."""
    found = [1]
    while True:
        for digit in (2, 5, 10):
            value = digit * 10 ** ((len(found) - 1) // 3)
            if value > limit:
                return found
            found.append(value)


FINISH_REASONS = ("stop", "length", "abort", "error")

# The boundaries are vLLM's, so that its dashboards and alerts work unchanged.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CONTINUATIONS = (1, 2, 5, 10, 20)
# For quantiles of the live view: steps of a small model are shorter than vLLM's first boundary.
_FINE_S = log_scale(1e-4, 100.0, 1.1)


class EngineMetrics:
    """Observes an engine's requests.

    The histograms are vLLM's, under the same names. ``prompt_tokens``, ``continuations`` and
    ``max_tokens`` have one value per prompt, the others one per continuation. Request times
    include only requests that ended by "stop" or "length"; token times include all.

    Attributes:
        num_prompt_tokens: tokens of prompts whose first output token was settled.
        num_generated_tokens: settled output tokens.
        num_ended: number of ended requests, by finish reason.
        step_observers: called after each step, on the engine's thread.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_ended = dict.fromkeys(FINISH_REASONS, 0)
        self.first_token_s = Histogram(FIRST_TOKEN_S, _FINE_S)
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_S, _FINE_S)
        self.token_s = Histogram(BETWEEN_TOKENS_S)
        self.whole_s, self.queue_s = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prefill_s, self.decode_s = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.continuations = Histogram(CONTINUATIONS)
        lengths = one_two_five(engine.llm.max_model_len)
        self.prompt_tokens, self.generated_tokens = Histogram(lengths), Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.step_observers: list[Callable[[], None]] = []
        self._answering: set[Served] = set()
        engine.observers.append(self)

    # Observer: on the event loop, except on_step ----------------------------------------------

    def on_arrival(self, served: Served) -> None:
        pass

    def on_tokens(self, served: Served, num_tokens: int, elapsed_s: float | None) -> None:
        self.num_generated_tokens += num_tokens
        if elapsed_s is not None:
            # An event loop that runs late sees several tokens at once.
            self.between_tokens_s.observe(elapsed_s / num_tokens, num_tokens)
            return
        self.first_token_s.observe(time.perf_counter() - served.arrived_at)
        if served not in self._answering:
            self._answering.add(served)
            self.num_prompt_tokens += served.requests[0].num_prompt_tokens

    def on_end(self, served: Served, request: Request, end: End) -> None:
        if served.has_ended:
            self._answering.discard(served)
        reason = request.finish_reason or "abort"
        self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
        if request is served.requests[0]:
            self.prompt_tokens.observe(request.num_prompt_tokens)
            self.continuations.observe(served.params.n)
            if served.params.max_tokens is not None:
                limit = self.engine.llm.max_model_len  # larger values are equivalent
                self.max_tokens.observe(min(served.params.max_tokens, limit))
        if reason not in ("stop", "length"):
            return
        num_tokens = len(request.token_ids) - request.num_prompt_tokens
        self.generated_tokens.observe(num_tokens)
        times = end.metrics
        whole, first = times.total_time_s, times.time_to_first_token_s
        if whole is None or first is None:
            return
        queued = times.queue_time_s or 0.0
        self.whole_s.observe(whole)
        self.queue_s.observe(queued)
        self.inference_s.observe(whole - queued)
        self.prefill_s.observe(first - queued)
        self.decode_s.observe(whole - first)
        if num_tokens > 1:
            self.token_s.observe((whole - first) / (num_tokens - 1))

    def on_step(self, num_tokens: int) -> None:
        self.step_tokens.observe(num_tokens)
        for observer in self.step_observers:
            observer()
