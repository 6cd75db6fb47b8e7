"""Metrics: vLLM's names, text that Prometheus parses, and the values of the requests."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse

from pagespec import AsyncLLM, SamplingParams
from pagespec.engine.histograms import Histogram, log_scale, one_two_five, quantile
from pagespec.server.app import create_app
from pagespec.server.metrics import EngineMetrics
from tests.support.content_llm import content_llm, slow_llm
from tests.support.server import client, serving

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
    *("generation_tokens", "request_success"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "iteration_tokens_total"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_n"),
    "request_params_max_tokens",
)
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


async def scraped(http: httpx.AsyncClient, accept: str = "") -> str:
    answer = await http.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    return answer.text


def values(text: str) -> dict[str, float]:
    """Samples by name, with their labels other than model and engine."""
    found = {}
    for family in parse(text):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f",{k}={v}" for k, v in rest.items())] = sample.value
    return found


def serve_and_scrape(accept: str = "") -> tuple[str, dict[str, float]]:
    async def main() -> str:
        engine = AsyncLLM(slow_llm(0.005))
        app = create_app(engine)
        async with client(app) as http:
            try:
                three = [await engine.submit([0, 0, k], PARAMS) for k in range(3)]
                for generation in three:
                    await generation.result()
                several = SamplingParams(n=2, max_tokens=4, ignore_eos=True, seed=1)
                await (await engine.submit([0] * 4, several)).result()
                aborted = await engine.submit([0], SamplingParams(max_tokens=40, ignore_eos=True))
                aborted.abort()
                await aborted.result()
                return await scraped(http, accept)
            finally:
                await engine.shutdown()

    text = asyncio.run(main())
    return text, {} if accept else values(text)


def test_names_types_and_labels_are_vllms() -> None:
    text, _ = serve_and_scrape()
    kinds = {}
    for family in parse(text):
        kinds[family.name] = family.type
        assert family.documentation, family.name
        for sample in family.samples:
            if family.name.startswith(("vllm:", "pagespec:")):
                assert sample.labels["model_name"] == "model"
                assert sample.labels["engine"] == "0"
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert kinds[f"vllm:{name}"] == kind
    assert kinds["vllm:cache_config_info"] == "gauge"
    assert {"process_resident_memory_bytes", "process_cpu_seconds"} <= {*kinds}


def test_the_text_keeps_prometheus_rules() -> None:
    """What promtool checks: a HELP and a TYPE before each metric's samples, which stand together,
    _total for counters alone, buckets that grow and end with +Inf, which is the count."""
    text, _ = serve_and_scrape()
    assert text.endswith("\n")
    seen: list[str] = []
    for line in text.splitlines():
        name = re.split(r"[ {]", line.removeprefix("# HELP ").removeprefix("# TYPE "))[0]
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name), line
        if line.startswith("# HELP "):
            assert name not in seen
            seen.append(name)
        else:
            assert name.startswith(seen[-1])
        if line.startswith("# TYPE ") and name.endswith("_total"):
            # The one that vLLM calls so.
            assert line.endswith("counter") or name == "vllm:iteration_tokens_total"
        if line.endswith("counter"):
            assert name.endswith("_total")
    for family in parse(text):
        if family.type != "histogram":
            continue
        buckets = [s for s in family.samples if s.name.endswith("_bucket")]
        uppers = [float(s.labels["le"]) for s in buckets]
        assert uppers == sorted({*uppers})
        assert uppers[-1] == math.inf
        counts = [s.value for s in buckets]
        assert counts == sorted(counts)
        (count,) = (s.value for s in family.samples if s.name.endswith("_count"))
        assert counts[-1] == count


def test_http_requests_are_counted_by_endpoint_method_and_status() -> None:
    async def main() -> str:
        engine = AsyncLLM(content_llm())
        async with client(create_app(engine)) as http:
            try:
                body = {"prompt": [0, 0, 0], "max_tokens": 2}
                await http.post("/v1/completions", json=body)
                await http.post("/v1/completions", json={**body, "stream": True})
                await http.post("/v1/completions", json={**body, "max_tokens": 0.5})
                for path in ("/v1/models/model", "/v1/models/one", "/nothing", "/health"):
                    await http.get(path)
                await http.head("/v1/models/model")
                return await scraped(http)
            finally:
                await engine.shutdown()

    counted = {k: v for k, v in values(asyncio.run(main())).items() if k.startswith("http_")}
    one, total = "handler=/v1/models/{name:path}", "http_requests_total"
    assert counted == {
        f"{total},handler=/v1/completions,method=POST,status=2xx": 2,
        f"{total},handler=/v1/completions,method=POST,status=4xx": 1,
        f"{total},{one},method=GET,status=2xx": 1,
        f"{total},{one},method=GET,status=4xx": 1,
        f"{total},{one},method=HEAD,status=2xx": 1,
        f"{total},handler=none,method=GET,status=4xx": 1,
    }


def test_an_answer_reports_the_load_on_request() -> None:
    body = {"prompt": [0, 0, 0], "max_tokens": 2}

    async def reported(form: str) -> str | None:
        engine = AsyncLLM(content_llm())
        async with client(create_app(engine)) as http:
            try:
                headers = {"endpoint-load-metrics-format": form}
                answer = await http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
                report: str | None = answer.headers.get("endpoint-load-metrics")
                return report
            finally:
                await engine.shutdown()

    text, as_json, other = (asyncio.run(reported(form)) for form in ("TEXT", "json", "xml"))
    gauges = ("kv_cache_usage_perc", "num_requests_waiting")
    assert text == "TEXT " + ", ".join(f"named_metrics.{gauge}=0.0" for gauge in gauges)
    assert as_json is not None
    named = dict.fromkeys(gauges, 0.0)
    assert json.loads(as_json.removeprefix("JSON ")) == {"named_metrics": named}
    assert other is None


def test_openmetrics_is_served_on_request() -> None:
    text, _ = serve_and_scrape("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    names = {family.name for family in parse_openmetrics(text)}
    assert "vllm:generation_tokens" in names


def test_the_numbers_are_those_of_the_requests() -> None:
    _, found = serve_and_scrape()
    assert found["vllm:request_success_total,finished_reason=length"] == 3 + 2
    assert found["vllm:request_success_total,finished_reason=error"] == 0
    assert found["vllm:generation_tokens_total"] >= 3 * 6 + 2 * 4
    assert found["vllm:request_generation_tokens_sum"] == 3 * 6 + 2 * 4
    assert found["vllm:request_generation_tokens_count"] == 5
    assert found["vllm:request_prompt_tokens_sum"] == 3 * 3 + 4 + 1
    assert found["vllm:request_params_n_sum"] == 3 * 1 + 2 + 1
    assert found["vllm:request_params_max_tokens_sum"] == 3 * 6 + 4 + 40
    assert found["vllm:e2e_request_latency_seconds_count"] == 5
    assert found["vllm:time_to_first_token_seconds_count"] in (5, 6)
    assert found["vllm:prompt_tokens_total"] in (3 * 3 + 4, 3 * 3 + 4 + 1)
    later = found["vllm:inter_token_latency_seconds_count"]
    assert (
        later + found["vllm:time_to_first_token_seconds_count"]
        <= (found["vllm:generation_tokens_total"])
    )
    whole, queued, inside = (
        found[f"vllm:{name}_seconds_sum"]
        for name in ("e2e_request_latency", "request_queue_time", "request_inference_time")
    )
    assert whole == pytest.approx(queued + inside)
    parts = found["vllm:request_prefill_time_seconds_sum"]
    assert inside == pytest.approx(parts + found["vllm:request_decode_time_seconds_sum"])
    assert found["vllm:iteration_tokens_total_count"] <= found["pagespec:engine_steps_total"]
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:prefix_cache_queries_total"] > 0
    assert found["pagespec:engine_up"] == 1


# Histograms -------------------------------------------------------------------------------------


def test_a_value_belongs_to_the_first_boundary_that_is_not_below_it() -> None:
    histogram = Histogram((1, 5))
    for value in (0.5, 1.0, 1.1, 5.0, 5.1):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("5.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(12.7)


def test_boundaries_between_are_not_shown() -> None:
    histogram = Histogram((1, 5), (2, 3))
    histogram.observe(2.5, 3)
    assert histogram.buckets() == [("1.0", 0.0), ("5.0", 3.0), ("+Inf", 3.0)]
    assert quantile(histogram.uppers, histogram.counts, 0.5) == pytest.approx(2.5)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, 1.0])
def test_quantiles_are_within_a_bucket_of_the_true_ones(share: float) -> None:
    samples = sorted(0.001 * 1.01**k for k in range(700))
    histogram = Histogram((), log_scale(1e-4, 100.0, 1.1))
    for sample in samples:
        histogram.observe(sample)
    found = quantile(histogram.uppers, histogram.counts, share)
    assert found == pytest.approx(samples[math.ceil(share * 700) - 1], rel=0.1)


def test_quantiles_of_nothing_and_of_what_is_beyond_the_last_boundary() -> None:
    assert quantile((1.0, math.inf), [0, 0], 0.5) is None
    assert quantile((1.0, math.inf), [0, 4], 0.5) == 1.0


def test_one_two_five() -> None:
    assert one_two_five(1) == [1]
    assert one_two_five(60) == [1, 2, 5, 10, 20, 50]
    assert one_two_five(1000) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]


def test_a_time_between_tokens_is_counted_in_less_than_a_microsecond() -> None:
    llm: Any = SimpleNamespace(max_model_len=100)
    engine: Any = SimpleNamespace(llm=llm, observers=[])
    metrics = EngineMetrics(engine)
    served: Any = object()
    best = math.inf
    for _ in range(20):  # the best: other processes are at work too
        begin = time.perf_counter()
        for _ in range(2_000):
            metrics.on_tokens(served, 1, 0.0123)
        best = min(best, time.perf_counter() - begin)
    print(f"{best / 2_000 * 1e6:.2f} us per observation")
    assert best / 2_000 < 1e-6
    assert sum(metrics.between_tokens_s.counts) == 40_000


def test_any_number_of_tokens_may_be_requested() -> None:
    """A regression test: a number above a float's range made a counter fail, which ended all
    answers."""

    async def main() -> dict[str, float]:
        engine = AsyncLLM(slow_llm(0.005))
        async with client(create_app(engine)) as http:
            try:
                async with asyncio.timeout(60):
                    for max_tokens in (10**400, 3):
                        body = {"prompt": [0], "max_tokens": max_tokens, "ignore_eos": True}
                        answer = await http.post("/v1/completions", json=body)
                        assert answer.status_code == 200
                return values(await scraped(http, ""))
            finally:
                await engine.shutdown()

    found = asyncio.run(main())
    assert found["vllm:request_params_max_tokens_count"] == 2


def test_siblings_look_their_prompt_up_once() -> None:
    """The prompt is computed once for all siblings; no token of theirs counts as a cache hit."""
    body = {"prompt": [0, 256] * 6 + [0], "max_tokens": 3, "ignore_eos": True, "seed": 1}
    with serving(content_llm(num_blocks=80)) as url:

        def counted(**fields: Any) -> list[float]:
            answer = httpx.post(url + "/v1/completions", json={**body, **fields})
            assert answer.status_code == 200, answer.text
            found = values(httpx.get(url + "/metrics").text)
            names = "queries", "hits"
            return [found[f"vllm:prefix_cache_{name}_total"] for name in names]

        assert counted(n=4) == [13, 0]
        assert counted(n=3) == [26, 12]  # the leader's: two tokens per block
        assert counted() == [39, 24]
