"""`pagespec bench`: one table or one JSON object, and no figures for a run that is too short."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagespec.cli.bench import percentile
from pagespec.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.support.cli_fakes import call, start_with

SMALL = ["bench", "-m", "x", "--device", "cpu", "--num-prompts", "6", "--input-len", "5"]


class FakeLLM:
    """Generates the requested number of tokens, or ``short`` fewer."""

    def __init__(self) -> None:
        self.tokenizer = range(50)
        self.device = "cpu"
        self.short = 0

    def generate(self, prompts: list[list[int]], params: Any, **_: Any) -> list[RequestOutput]:
        assert params.ignore_eos
        assert all(0 <= i < 50 for ids in prompts for i in ids)
        tokens = [1] * (params.max_tokens - self.short)
        metrics = RequestMetrics(time_to_first_token_s=0.5)
        output = CompletionOutput(0, "", tokens, finish_reason="length")
        return [RequestOutput("r", None, ids, None, [output], metrics=metrics) for ids in prompts]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    start_with(monkeypatch, lambda model, **arguments: fake)
    return fake


def test_bench_prints_one_table(llm: FakeLLM) -> None:
    result = call(*SMALL, "--output-len", "7")
    assert result.exit_code == 0, result.output
    found = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert found["requests"] == "6"
    assert found["tokens_in"] == "30"
    assert found["tokens_out"] == "42"
    assert found["ttft_median_s"] == "0.5"


def test_bench_json_is_one_object(llm: FakeLLM) -> None:
    found = json.loads(call(*SMALL, "--json").stdout)
    assert found["tokens_out"] == 6 * 64
    assert found["device"].startswith("cpu")
    assert {"torch", "transformers", "pagespec", "seconds", "ttft_p99_s"} <= set(found)


def test_bench_gives_no_number_for_a_short_run(llm: FakeLLM) -> None:
    llm.short = 1
    result = call(*SMALL)
    assert result.exit_code == 2
    assert "were generated instead of" in result.stderr
    assert result.stdout == ""


def test_percentile_is_a_value_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([3.0], 99) == 3
