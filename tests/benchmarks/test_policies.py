"""The comparison of policies: whole, repeatable, and drawn."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import policies
from benchmarks.pictures import draw_beside_vllm, draw_policies, read_palette

NUM_REQUESTS = 60


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_no_request_is_served_before_its_arrival(policy: str) -> None:
    arrivals = policies.bursts(random.Random(0), NUM_REQUESTS, 40.0)
    served, _ = policies.serve(arrivals, policy)
    assert len(served) == NUM_REQUESTS
    for one in served:
        assert one.arrival.second < one.first_token <= one.end


def test_urgent_requests_wait_less_under_the_priority_policy() -> None:
    arrivals = policies.bursts(random.Random(0), 96, 80.0)
    waits = {}
    for policy in policies.POLICIES:
        served, _ = policies.serve(arrivals, policy)
        waits[policy] = sum(one.latency for one in served if not one.arrival.is_long)
    assert waits["priority"] < waits["shortest_first"] < waits["fcfs"]


def test_both_arrival_processes_have_the_given_rate() -> None:
    for arrive in (policies.poisson, policies.bursts):
        arrivals = arrive(random.Random(1), 4000, 40.0)
        assert 4000 / arrivals[-1].second == pytest.approx(40.0, rel=0.15)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pictures_are_drawn_in_the_palette(theme: str) -> None:
    colours = read_palette(theme)
    assert {"decode", "prefill", "waiting", "bg", "fg", "muted", "panel"} <= colours.keys()
    measured = policies.measure(NUM_REQUESTS, 40.0, 0)
    assert policies.table(measured).count("\n") == 9
    rows = [{"name": "a & b", "pagespec": 200, "vLLM": 100, "invariant": 4, "roofline": 300}]
    loads = {"card": "c", "setting": ["s"], "throughput": {"unit": "u", "rows": rows}}
    for text in (
        draw_policies(measured, colours),
        draw_beside_vllm(loads, "throughput", "t", colours),
    ):
        ElementTree.fromstring(text)
        assert colours["decode"] in text
