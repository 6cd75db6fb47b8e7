"""Counters and histograms of an engine's requests, for Prometheus and the live view."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..engine.histograms import BETWEEN_TOKENS_S, STEP_TOKENS, Histogram, log_scale
from ..engine.request import Request
from ..engine.request_totals import GAUGES, RequestTotals
from ..engine.snapshot import EngineSnapshot
from ..serving.async_llm import AsyncLLM
from ..serving.served import End, Served

# For quantiles of the live view: steps of a small model are shorter than vLLM's first boundary.
_FINE_S = log_scale(1e-4, 100.0, 1.1)


# As in vLLM, the requests of probes and scrapers do not count.
_UNCOUNTED = frozenset(("/metrics", "/health", "/load", "/ping", "/version"))


class HttpRequestCounts:
    """Number of answered HTTP requests. Labels and their values are vLLM's.

    Attributes:
        numbers: by handler (the path of the endpoint, or "none"), method, and class of the status,
            such as "2xx".
    """

    def __init__(self) -> None:
        self.numbers: Counter[tuple[str, str, str]] = Counter()

    def add(self, method: str, route: Any, status: int) -> None:
        """Count a request.

        Args:
            route: the router's, with its ``path``; None: no endpoint has the path.
            status: 0 if the client was gone before the answer, which counts as 4xx.
        """
        handler = getattr(route, "path", "none")
        if handler not in _UNCOUNTED:
            self.numbers[handler, method, f"{status // 100 or 4}xx"] += 1


_LOAD = ("kv_cache_usage", "num_waiting")


def load_report(form: str, now: EngineSnapshot) -> dict[str, str]:
    """The header ``endpoint-load-metrics`` of an answer: an ORCA load report for load balancers.

    Args:
        form: the request's header ``endpoint-load-metrics-format``, "TEXT" or "JSON" in any case.
            Others give no header, as in vLLM.
        now: the engine's state.
    """
    named = {GAUGES[name][0]: float(getattr(now, name)) for name in _LOAD}
    match form.upper():
        case "TEXT":
            report = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "JSON":
            report = json.dumps({"named_metrics": named})
        case _:
            return {}
    return {"endpoint-load-metrics": f"{form.upper()} {report}"}


class EngineMetrics(RequestTotals):
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
        super().__init__(engine.llm.max_model_len, _FINE_S)
        self.engine = engine
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_S, _FINE_S)
        self.step_tokens = Histogram(STEP_TOKENS)
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
        is_leader = request is served.requests[0]
        self.add_end(request, end.metrics, is_leader=is_leader)

    def on_step(self, num_tokens: int) -> None:
        self.step_tokens.observe(num_tokens)
        for observer in self.step_observers:
            observer()
