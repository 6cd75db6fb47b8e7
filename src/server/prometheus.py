"""``/metrics``: the metrics of an engine in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..engine.histograms import Histogram
from ..engine.metric_values import counts
from ..engine.request_totals import ACCEPTED, COUNTERS, DRAFTS, ENDED, GAUGES, OF_REQUESTS
from .metrics import EngineMetrics, HttpRequestCounts


class EngineCollector(Collector):
    """Collects an engine's metrics for each scrape. Names with ``vllm:`` have vLLM's meaning."""

    def __init__(self, metrics: EngineMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        names, values = [*self._labels], [*self._labels.values()]
        yield from self._families(GaugeMetricFamily, self._gauges())
        yield self._waiting_by_reason()
        yield from self._families(CounterMetricFamily, self._counters())
        ended = CounterMetricFamily(
            f"vllm:{ENDED[0]}", ENDED[1], labels=[*names, "finished_reason"]
        )
        for reason, number in self._metrics.num_ended.items():
            ended.add_metric([*values, reason], number)
        yield ended
        if self._metrics.engine.llm.config.speculation is not None:
            yield from self._draft_counters()
        histograms = ((n, t, h.buckets(), h.total) for n, t, h in self._histograms())
        yield from self._families(HistogramMetricFamily, histograms)
        yield self._settings()

    def _families(self, kind: Any, rows: Iterable[tuple[Any, ...]]) -> Iterator[Metric]:
        """One metric family per row of name, help and values."""
        for name, text, *values in rows:
            family = kind(name, text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], *values)
            yield family

    def _gauges(self) -> list[tuple[str, str, float]]:
        engine = self._metrics.engine
        now = engine.snapshot()
        is_up = engine.failure is None and not engine.is_stopping
        return [
            *_rows(GAUGES, {attribute: getattr(now, attribute) for attribute in GAUGES}),
            ("pagespec:num_requests_paused", "Paused requests that keep blocks.", now.num_paused),
            ("pagespec:engine_up", "1 if the engine accepts and computes requests.", float(is_up)),
        ]

    def _waiting_by_reason(self) -> Metric:
        now = self._metrics.engine.snapshot()
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason; deferred: until another has computed the prompt.",
            labels=[*self._labels, "reason"],
        )
        counts = {"capacity": now.num_waiting - now.num_deferred, "deferred": now.num_deferred}
        for reason, number in counts.items():
            family.add_metric([*self._labels.values(), reason], number)
        return family

    def _counters(self) -> list[tuple[str, str, int]]:
        metrics = self._metrics
        now = metrics.engine.snapshot()
        return [
            *_rows(COUNTERS, counts(now, metrics)),
            ("pagespec:engine_steps", "Engine steps.", now.num_steps),
        ]

    def _draft_counters(self) -> Iterator[Metric]:
        drafts = self._metrics.engine.llm.engine.scheduler.draft_counts
        values = {attribute: getattr(drafts, attribute) for attribute in DRAFTS}
        yield from self._families(CounterMetricFamily, _rows(DRAFTS, values))
        per_position = CounterMetricFamily(
            f"vllm:{ACCEPTED[0]}",
            ACCEPTED[1],
            labels=[*self._labels, "position"],
        )
        for position, number in enumerate(drafts.accepted_per_position):
            per_position.add_metric([*self._labels.values(), str(position)], number)
        yield per_position

    def _histograms(self) -> list[tuple[str, str, Histogram]]:
        m = self._metrics
        rows = [(*OF_REQUESTS[attribute], getattr(m, attribute)) for attribute in OF_REQUESTS]
        rows += [
            ("inter_token_latency_seconds", "Between two tokens.", m.between_tokens_s),
            ("iteration_tokens_total", "Computed prompt tokens and new ones.", m.step_tokens),
        ]
        return [(f"vllm:{name}", text, histogram) for name, text, histogram in rows]

    def _settings(self) -> Metric:
        llm = self._metrics.engine.llm
        num_tokens = llm.num_blocks * llm.config.block_size
        labels = {
            **self._labels,
            "block_size": str(llm.config.block_size),
            "num_gpu_blocks": str(llm.num_blocks),
            "kv_cache_size_tokens": str(num_tokens),
            "kv_cache_max_concurrency": str(num_tokens / llm.max_model_len),
            "enable_prefix_caching": str(llm.config.enable_prefix_caching),
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Settings of the KV cache; always 1.", labels=[*labels]
        )
        info.add_metric([*labels.values()], 1.0)
        return info


class HttpCollector(Collector):
    """Collects the counts of HTTP requests for each scrape."""

    def __init__(self, counts: HttpRequestCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "http_requests", "Answered HTTP requests.", labels=["handler", "method", "status"]
        )
        for labels, number in list(self._counts.numbers.items()):
            family.add_metric(labels, number)
        yield family


def _rows(
    declared: Mapping[str, tuple[str, str]], values: Mapping[str, Any]
) -> list[tuple[str, str, Any]]:
    """Full name, description and value, of values by attribute."""
    return [(f"vllm:{name}", text, values[key]) for key, (name, text) in declared.items()]


def metrics_router(metrics: EngineMetrics, counts: HttpRequestCounts, model_name: str) -> APIRouter:
    """GET /metrics."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(metrics, model_name))
    registry.register(HttpCollector(counts))
    ProcessCollector(registry=registry)
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    def read_metrics(request: Request) -> Response:  # not async: runs on a thread, not on the loop
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return router
