"""The benchmark of draft tokens, with a tiny model, and with a stand-in for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from benchmarks import speculation
from benchmarks.speculation import FreeDrafts, HostGaps, KnownAnswers, OracleDrafter, lines
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from pagespec.runner.cpu import platform as cpu_platform
from pagespec.runner.cpu.drafting import CpuDrafting

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=8)
FREE_STEPS = StepCosts([(1, 1.0), (1000, 1.0)])


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.8, 1.0])
def test_the_oracle_proposes_right_tokens_with_the_given_probability(acceptance: float) -> None:
    answer = list(range(100, 2100))
    known = KnownAnswers({(1, 2, 3): answer}, acceptance, 10_000)
    drafter = OracleDrafter(known, CONFIG, FREE_STEPS, fixed=4)
    request = Request("a", [1, 2, 3], SamplingParams(), max_num_tokens=9999, seed=0)
    num_right = 0
    for token in range(100, 2100):
        drafts = drafter.propose(request)
        assert len(drafts) == min(4, 2100 - token)
        num_right += drafts[0] == token
        request.token_ids.append(token)
    assert num_right == pytest.approx(2000 * acceptance, abs=70)


def test_each_repeat_draws_other_tokens() -> None:
    answers = {(1, 2): range(100, 2100), (3,): range(100, 2100)}

    def drawn(acceptance: float, repeat: int) -> list[bool]:
        known = KnownAnswers(answers, acceptance, 10_000, repeat)
        request = Request("a", [1, 2], SamplingParams(), max_num_tokens=9999, seed=0)
        drafts = known.after(request, 2000)
        return [a == b for a, b in zip(drafts, range(100, 2100), strict=True)]

    assert drawn(0.8, 2) == drawn(0.8, 2)
    first, second = drawn(0.8, 0), drawn(0.8, 1)
    # Independent draws: 0.8 * 0.8 + 0.2 * 0.2.
    assert sum(a == b for a, b in zip(first, second, strict=True)) == pytest.approx(1360, abs=70)


def test_few_rows_are_repeated_more_often() -> None:
    assert [speculation.num_repeats(0, rows) for rows in (1, 2, 3, 8, 64)] == [8, 4, 3, 3, 3]
    assert speculation.num_repeats(2, 1) == 2


def test_a_quantization_without_a_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="needs --drafter-layers"):
        speculation.pagespec("tiny", tmp_path / "a.json", drafter_quantization="fp8")


def test_gaps_are_the_time_without_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(speculation.time, "perf_counter", lambda: now)
    runner = SimpleNamespace(pack_s=0.0, dispatch=lambda plan: plan, collect=lambda handle: handle)
    gaps = HostGaps(runner)
    times = [("dispatch", 1), ("dispatch", 2), ("collect", 5), ("dispatch", 6), ("collect", 9)]
    for call, now in [*times, ("collect", 10), ("dispatch", 13)]:  # noqa: B007
        getattr(runner, call)(None)
    assert gaps.seconds == 3  # from 10 to 13
    gaps.restart()
    runner.collect(None)
    assert gaps.seconds == 0


def test_the_engine_chooses_the_number_of_draft_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_platform, "measure_costs", lambda *_: FREE_STEPS)
    file = tmp_path / "ours.json"
    sizes = {"prompt_tokens": 12, "output_tokens": 64, "repeat": 1}
    speculation.pagespec("tiny", file, rows=[2], acceptance=[0.0, 1.0], k=0, **sizes)
    _, wrong, right = json.loads(file.read_text())["cells"]
    assert wrong["num_different"] == right["num_different"] == [0]
    assert right["num_accepted_tokens"] == right["num_draft_tokens"] >= [2 * 48]
    assert right["num_steps"][0] <= 16
    assert wrong["num_accepted_tokens"] == [0]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_drafter_computes_the_tokens_that_the_oracle_replaces(
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pagespec")
    calls: list[int] = []
    draft = CpuDrafting.draft

    def counted(self: CpuDrafting, plan: StepPlan, *given: Any) -> Any:
        calls.append(sum(plan.wanted_drafts.values()))
        return draft(self, plan, *given)

    monkeypatch.setattr(CpuDrafting, "draft", counted)
    file = tmp_path / "ours.json"
    sizes = {"prompt_tokens": 12, "output_tokens": 16, "repeat": 1, "drafter_layers": 1}
    sizes["drafter_quantization"] = quantization
    speculation.pagespec("tiny", file, rows=[2], acceptance=[1.0], k=3, **sizes)
    result = json.loads(file.read_text())
    assert result["engine"].startswith("pagespec+1L-fp8," if quantization else "pagespec+1L,")
    assert ("M in fp8" in caplog.text) == (quantization == "fp8")
    _, right = result["cells"]
    assert right["num_different"] == [0]
    # The first step has no draft tokens, the others have three of each row.
    assert right["num_accepted_tokens"] == right["num_draft_tokens"] == [2 * 11]
    assert sum(calls) >= 2 * 11


def test_a_tiny_model_is_measured_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ours.json"
    sizes = {"prompt_tokens": 12, "output_tokens": 16, "repeat": 1}
    speculation.pagespec("tiny", file, rows=[1, 3], acceptance=[0.0, 1.0], k=3, **sizes)
    cells = {(c["rows"], c["acceptance"]): c for c in json.loads(file.read_text())["cells"]}
    assert set(cells) == {(rows, chance) for rows in (1, 3) for chance in (None, 0.0, 1.0)}
    assert all(cell["num_different"] == [0] for cell in cells.values())
    for rows in (1, 3):
        assert cells[rows, None]["num_drafts"] == [0]
        assert cells[rows, 0.0]["num_accepted_tokens"] == [0]
        assert cells[rows, 1.0]["num_accepted_tokens"] == [
            rows * 12
        ]  # 4 steps of 4 tokens, the first with the prompt
    assert cells[1, 1.0]["num_steps"] == [4]
    capsys.readouterr()
    speculation.table([file, tmp_path / "absent.json"])
    shown = capsys.readouterr().out.splitlines()
    assert "answers that differ from those without draft tokens: 0" in "\n".join(shown)
    assert [line.split()[:2] for line in shown[-6:]] == [
        [rows, kind] for rows in ("1", "3") for kind in ("plain", "0", "1")
    ]


class FakeVllm:
    """Its requests have one more token after each step, and one more for an accepted draft."""

    def __init__(self, num_drafts: int) -> None:
        self.rates = torch.ones(num_drafts)
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(
                rejection_sampler=SimpleNamespace(synthetic_conditional_rates=self.rates)
            )
        )
        self.llm_engine = SimpleNamespace(step=self.step)
        self.live: dict[str, int] = {}

    def collective_rpc(self, call: Any, args: tuple[Any, ...]) -> None:
        call(self.worker, *args)

    def step(self) -> list[Any]:
        for name in self.live:
            self.live[name] -= 1 + int(self.rates[:1].sum())
        ended = [name for name, left in self.live.items() if left <= 0]
        for name in ended:
            del self.live[name]
        return [SimpleNamespace(request_id=name, finished=True) for name in ended]

    def generate(self, prompts: list[Any], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.live = {str(i): asked.max_tokens for i, asked in enumerate(params)}
        while self.live:
            self.llm_engine.step()
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * asked.max_tokens)])
            for asked in params
        ]


def test_vllm_is_measured_with_its_synthetic_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Any]] = []

    def start(_model: str, _folder: Path, **settings: Any) -> tuple[Any, Any, float]:
        given.append(settings)
        drafts = settings.get("speculative_config", {"num_speculative_tokens": 0})
        engine = SimpleNamespace(__version__="0.1", SamplingParams=SimpleNamespace)
        return engine, FakeVllm(drafts["num_speculative_tokens"]), 1.0

    monkeypatch.setattr(speculation, "vllm_engine", start)
    sizes = {"prompt_tokens": 4, "output_tokens": 8, "repeat": 2}
    for k in (0, 2):
        file = tmp_path / f"{k}.json"
        speculation.vllm("tiny", file, k, rows=[2], acceptance=[0.0, 1.0], **sizes)
    asked = given[1].pop("speculative_config")
    assert "speculative_config" not in given[0]
    assert asked["synthetic_acceptance_rates"] == [1.0, 1.0]
    cells = [json.loads((tmp_path / f"{k}.json").read_text())["cells"] for k in (0, 2)]
    assert [cell["num_steps"] for cell in cells[0]] == [[8, 8]]
    assert [cell["num_steps"] for cell in cells[1]] == [[8, 8], [4, 4]]
    capsys.readouterr()
    speculation.table([tmp_path / "0.json", tmp_path / "2.json"])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [line[:4] for line in shown] == [
        ["2", "plain", "vLLM", "-"],
        ["2", "0", "vLLM", "2"],
        ["2", "1", "vLLM", "2"],
    ]
    module, _, name = asked["model"].rpartition(".")
    assert (module, getattr(speculation, name)) == ("benchmarks.speculation", FreeDrafts)


def test_vllm_gets_draft_tokens_for_rows_that_sampled() -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    proposer = FreeDrafts(config)
    for _ in range(2000):
        assert [len(d) for d in proposer.propose([[5], [], [6, 7]], None, None)] == [3, 0, 3]


def test_ratios_are_above_one_if_draft_tokens_are_faster() -> None:
    plain = {
        "rows": 8,
        "acceptance": None,
        "k": None,
        "seconds": [2.0],
        "mean_s": [2.0],
        "first_s": [0.0],
        "num_steps": [10],
    }
    fast = {**plain, "acceptance": 0.8, "k": 3, "seconds": [1.0], "mean_s": [0.5]}
    about = {"output_tokens": 11}
    both = [
        {"engine": "pagespec, torch 1", **about, "cells": [plain, fast]},
        {"engine": "vLLM 1", **about, "cells": [{**fast, "mean_s": [0.75]}]},
        {"engine": "pagespec+1L, torch 1", **about, "cells": [{**plain, "mean_s": [4.0]}]},
    ]
    shown = [line.split() for line in lines(both)]
    assert [line[2] for line in shown] == ["pagespec", "pagespec+1L", "pagespec", "vLLM"]
    assert shown[1][8] == "0.50"
    assert shown[2][8:10] == ["4.00", "1.50"]  # times plain, times vLLM
    assert shown[2][11] == "2.00"
