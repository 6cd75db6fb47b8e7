"""The tables of ``docs/metrics.md``, from the collector behind ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from pagespec import AsyncLLM
from pagespec.server.metrics import EngineMetrics
from pagespec.server.prometheus import EngineCollector
from tests.support.content_llm import content_llm

from .cells import code, prose, table

# Their boundaries follow from the context of the model.
_BY_CONTEXT = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens")
_COMMON = ("model_name", "engine")


def _collected() -> list[Metric]:
    collector = EngineCollector(EngineMetrics(AsyncLLM(content_llm())), "model")
    return sorted(collector.collect(), key=lambda metric: (metric.type, metric.name))


def metrics() -> Iterator[str]:
    """Every metric of the engine."""
    rows = []
    for metric in _collected():
        labels = [name for name in metric.samples[0].labels if name not in (*_COMMON, "le")]
        name = metric.name + ("_total" if metric.type == "counter" else "")
        origin = "vLLM" if name.startswith("vllm:") else "pagespec"
        rows.append((code(name), metric.type, code(*labels), origin, prose(metric.documentation)))
    yield from table(("name", "type", "more labels", "defined by", "description"), rows)


def buckets() -> Iterator[str]:
    """The boundaries of the histograms, by metric."""
    rows = []
    for metric in _collected():
        if metric.type != "histogram":
            continue
        name = metric.name.removeprefix("vllm:")
        bounds = [s.labels["le"] for s in metric.samples if s.labels.get("le", "+Inf") != "+Inf"]
        shown = ", ".join(f"{float(bound):g}" for bound in bounds)
        if name in _BY_CONTEXT:
            shown = "1, 2, 5, 10, 20, 50 and so on, up to `max_model_len`"
        rows.append((code(metric.name), shown))
    by_bounds: dict[str, list[str]] = {}
    for name, shown in rows:
        by_bounds.setdefault(shown, []).append(name)
    yield from table(
        ("metrics", "upper bounds"), [("<br>".join(n), s) for s, n in by_bounds.items()]
    )
