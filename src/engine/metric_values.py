"""Metrics of an engine as values, in the form of vLLM's ``get_metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .request_totals import ACCEPTED, COUNTERS, DRAFTS, ENDED, GAUGES, OF_REQUESTS, RequestTotals
from .scheduler import Scheduler
from .snapshot import EngineSnapshot, take_snapshot


@dataclass
class Metric:
    """Attributes:
    name: with vLLM's prefix ``vllm:``, and without the suffix of a counter.
    labels: ``model_name``, ``engine``, and others that tell metrics of one name apart.
    """

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by place, from 0."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number at the moment of the call."""

    value: float


@dataclass
class Histogram(Metric):
    """Attributes:
    count, sum: number of values, and their sum.
    buckets: by upper boundary as text, the number of values up to it; "+Inf" has all.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def counts(state: EngineSnapshot, totals: RequestTotals) -> dict[str, int]:
    """The values of :data:`.request_totals.COUNTERS`, by attribute."""
    return {
        "num_queried_tokens": state.num_queried_tokens,
        "num_hit_tokens": state.num_hit_tokens,
        "num_preemptions": state.num_preemptions,
        "num_prompt_tokens": totals.num_prompt_tokens,
        "num_generated_tokens": totals.num_generated_tokens,
    }


def read_metrics(
    scheduler: Scheduler, totals: RequestTotals, labels: Mapping[str, str]
) -> list[Metric]:
    """The metrics of a scheduler, and of ended requests.

    Args:
        labels: added to each metric.
    """
    found: list[Metric] = []
    state = take_snapshot(scheduler)
    for attribute, (name, _) in GAUGES.items():
        found.append(Gauge(f"vllm:{name}", dict(labels), float(getattr(state, attribute))))
    for attribute, number in counts(state, totals).items():
        found.append(Counter(f"vllm:{COUNTERS[attribute][0]}", dict(labels), number))
    for reason, number in totals.num_ended.items():
        found.append(Counter(f"vllm:{ENDED[0]}", {**labels, "finished_reason": reason}, number))
    if scheduler.drafter is not None:
        drafts = scheduler.draft_counts
        for attribute, (name, _) in DRAFTS.items():
            found.append(Counter(f"vllm:{name}", dict(labels), getattr(drafts, attribute)))
        found.append(
            Vector(f"vllm:{ACCEPTED[0]}", dict(labels), list(drafts.accepted_per_position))
        )
    for attribute, (name, _) in OF_REQUESTS.items():
        histogram = getattr(totals, attribute)
        buckets = {upper: int(number) for upper, number in histogram.buckets()}
        found.append(
            Histogram(f"vllm:{name}", dict(labels), buckets["+Inf"], histogram.total, buckets)
        )
    return found
