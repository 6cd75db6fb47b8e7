"""``/metrics``: the metrics of an engine in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

from .metrics import EngineMetrics, Histogram


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
            "vllm:request_success", "Requests that ended.", labels=[*names, "finished_reason"]
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
        usage = now.num_owned_blocks / max(1, now.num_blocks)
        is_up = engine.failure is None and not engine.is_stopping
        return [
            ("vllm:num_requests_running", "Running requests.", now.num_running),
            ("vllm:num_requests_waiting", "Waiting requests.", now.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", usage),
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
            ("vllm:prefix_cache_queries", "Prefix-cache look-ups, tokens.", now.num_queried_tokens),
            ("vllm:prefix_cache_hits", "Prefix-cache hits, tokens.", now.num_hit_tokens),
            ("vllm:num_preemptions", "Preemptions.", now.num_preemptions),
            ("vllm:prompt_tokens", "Prompt tokens processed.", metrics.num_prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", metrics.num_generated_tokens),
            ("pagespec:engine_steps", "Engine steps.", now.num_steps),
        ]

    def _draft_counters(self) -> Iterator[Metric]:
        drafts = self._metrics.engine.llm.engine.scheduler.draft_counts
        rows = [
            ("num_drafts", "Rows with draft tokens.", drafts.num_drafts),
            ("num_draft_tokens", "Draft tokens.", drafts.num_draft_tokens),
            ("num_accepted_tokens", "Accepted draft tokens.", drafts.num_accepted_tokens),
        ]
        named = [(f"vllm:spec_decode_{name}", text, number) for name, text, number in rows]
        yield from self._families(CounterMetricFamily, named)
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their place in the draft.",
            labels=[*self._labels, "position"],
        )
        for position, number in enumerate(drafts.accepted_per_position):
            per_position.add_metric([*self._labels.values(), str(position)], number)
        yield per_position

    def _histograms(self) -> list[tuple[str, str, Histogram]]:
        m = self._metrics
        first, mean = "time_to_first_token_seconds", "request_time_per_output_token_seconds"
        rows = [
            (first, "From arrival to the first token.", m.first_token_s),
            ("inter_token_latency_seconds", "Between two tokens.", m.between_tokens_s),
            (mean, "Mean time between a request's tokens.", m.token_s),
            ("e2e_request_latency_seconds", "From arrival to the end.", m.whole_s),
            ("request_queue_time_seconds", "From arrival to the first step.", m.queue_s),
            ("request_inference_time_seconds", "From first step to the end.", m.inference_s),
            ("request_prefill_time_seconds", "From first step to first token.", m.prefill_s),
            ("request_decode_time_seconds", "From first token to the end.", m.decode_s),
            ("iteration_tokens_total", "Computed prompt tokens and new ones.", m.step_tokens),
            ("request_prompt_tokens", "Tokens per prompt.", m.prompt_tokens),
            ("request_generation_tokens", "Tokens generated per request.", m.generated_tokens),
            ("request_params_n", "The parameter n.", m.continuations),
            ("request_params_max_tokens", "The parameter max_tokens.", m.max_tokens),
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


def metrics_router(metrics: EngineMetrics, model_name: str) -> APIRouter:
    """GET /metrics."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(metrics, model_name))
    ProcessCollector(registry=registry)
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    def read_metrics(request: Request) -> Response:  # not async: runs on a thread, not on the loop
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return router
