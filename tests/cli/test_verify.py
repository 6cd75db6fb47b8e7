"""`pagespec verify`: rejected options, and its verdicts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagespec.verify import CaseGroup, GateReport
from tests.support.cli_fakes import call


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--block-size", "0"], "block_size"),
        (["--block-size", "64"], "block_size"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-seqs", "1"], "max_num_seqs"),
        (["--max-num-seqs", "-3", "--quick"], "max_num_seqs"),
        (["--dtype", "int3"], "dtype"),
        (["--num-blocks", "100"], "--num-blocks"),
        (["--max-model-len", "100"], "--max-model-len"),
        (["--max-num-batched-tokens", "100"], "--max-num-batched-tokens"),
        (["--memory-utilization", "0.5"], "--memory-utilization"),
        (["--no-prefix-caching"], "--no-prefix-caching"),
        (["--trace", "t.jsonl"], "--trace"),
    ],
)
def test_verify_refuses_before_it_loads(options: list[str], field: str) -> None:
    """The model would be refused, too, were it looked at."""
    result = call("verify", "-m", "/no/such/model", "--device", "cpu", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"pagespec: error: {field} = ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("num_different", "idle", "exit_code", "verdict"),
    [
        (0, [], 0, "transparent: all 3 answers"),
        (1, [], 1, "NOT TRANSPARENT: 1 of 3"),
        (0, ["prefix hits"], 1, "NOT SHOWN: all 3 answers are equal"),
        (1, ["prefix hits"], 1, "NOT TRANSPARENT: 1 of 3"),
    ],
)
def test_verify_prints_its_verdict(
    monkeypatch: pytest.MonkeyPatch,
    num_different: int,
    idle: list[str],
    exit_code: int,
    verdict: str,
) -> None:
    loaded = SimpleNamespace(module=None, vocab_size=50, dtype="torch.float32", quantization=None)
    group = CaseGroup("prefix hits", num_equal=3 - num_different, num_different=num_different)
    report = GateReport([group], [CaseGroup("control: none", num_different=1)], idle=idle)
    monkeypatch.setattr("pagespec.compile.load.load.load_model", lambda *_, **__: loaded)
    monkeypatch.setattr("pagespec.verify.run_gate", lambda *_, **__: report)
    result = call("verify", "-m", "x", "--device", "cpu")
    assert result.exit_code == exit_code, result.output
    assert result.stdout.splitlines()[-1 if exit_code else -2].startswith(verdict)


@pytest.mark.parametrize("is_given", [False, True])
def test_verify_runs_only_cases_with_draft_tokens(
    monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    loaded = SimpleNamespace(module=None, vocab_size=50, dtype="torch.float32", quantization=None)
    given: dict[str, object] = {}

    def run_gate(*_: object, **arguments: object) -> GateReport:
        given.update(arguments)
        return GateReport([CaseGroup("a", num_equal=1)], [CaseGroup("b", num_different=1)])

    monkeypatch.setattr("pagespec.compile.load.load.load_model", lambda *_, **__: loaded)
    monkeypatch.setattr("pagespec.verify.run_gate", run_gate)
    options = ["--only-drafts"] if is_given else []
    assert call("verify", "-m", "x", "--device", "cpu", *options).exit_code == 0
    assert given["only_drafts"] is is_given
