"""Every example runs. Those that load a model are given a tiny one, so that nothing is downloaded;
none may be left out: the examples are read from the folder."""

from __future__ import annotations

import re
import runpy
import socket
import sys
from pathlib import Path

import httpx
import pytest
import torch

from pagespec.engine.policy import MAX_OVERTAKES
from spec.replay import check
from tests.support.models import VOCAB_SIZE, save_word_model, tiny_model
from tests.support.structured import save_byte_model

EXAMPLES = Path(__file__).parents[1] / "examples"
BY_HAND, STRUCTURED, ADAPTER = "step_by_hand.py", "structured.py", "lm_eval_adapter.py"
RAY_SERVE, POLICIES, IN_300_LINES = "ray_serve.py", "policies.py", "engine_in_300_lines.py"
APART = {BY_HAND, STRUCTURED, ADAPTER, RAY_SERVE, POLICIES, IN_300_LINES}
WITH_MODEL = sorted({path.name for path in EXAMPLES.glob("*.py")} - APART)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are words, so that the examples' prompts are short."""
    return save_word_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", WITH_MODEL)
def test_runs_with_the_model_it_is_given(
    name: str,
    model_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", f"{model_folder}-cache")  # traced once
    run(name, monkeypatch, model_folder)
    output = capsys.readouterr().out
    assert re.search(r"word\d", output), output
    if name == "shared_prefix.py":
        hits = [int(n) for n in re.findall(r"^ *(\d+) of \d+ prompt tokens cached", output, re.M)]
        assert hits[0] == 0 < min(hits[1:])


def test_an_example_writes_the_trace_it_is_asked_for(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", f"{model_folder}-cache")
    trace = tmp_path / "trace.jsonl"
    run("shared_prefix.py", monkeypatch, model_folder, str(trace))
    verdict = check(trace.read_text().splitlines())
    assert (verdict.property_id, verdict.num_hit_blocks > 0) == ("", True)


def test_structured_answers_are_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    run(STRUCTURED, monkeypatch, save_byte_model(tmp_path, max_position_embeddings=2048))
    output = capsys.readouterr().out
    assert re.search(r"sunny|cloudy|rainy", output)
    assert re.search(r"\b\d\d:\d\d\b", output)
    assert "refused: structured_outputs.json" in output


def test_the_adapter_of_the_harness_scores_and_generates(model_folder: str) -> None:
    """Where it is installed; docs/evaluation.md has a run beside the harness' own model."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    adapter = runpy.run_path(str(EXAMPLES / ADAPTER))["PagespecLM"](model_folder, device="cpu")
    parts = [(("", ""), [5, 6], [7, 8]), (("", ""), [5, 6, 7], [8])]
    (both, _), (last, _) = adapter._loglikelihood_tokens(parts)
    first, _ = adapter._loglikelihood_tokens([(("", ""), [5, 6], [7])])[0]
    assert both == pytest.approx(first + last)
    arguments = ("word5 word6", {"until": [], "max_gen_toks": 3})
    (text,) = adapter.generate_until([Instance("generate_until", {}, arguments, 0)])
    assert len(text.split()) == 3


@pytest.mark.nightly
def test_ray_serve_answers(model_folder: str) -> None:
    """Where Ray Serve is installed: `ray[data]` alone has it not."""
    pytest.importorskip("ray.serve", exc_type=ImportError)
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        serve.start(http_options={"port": port})
        deploy = runpy.run_path(str(EXAMPLES / RAY_SERVE))["deploy"]
        serve.run(deploy(model_folder))
        body = {"prompt": "word5 word6", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert len(answer.json()["choices"][0]["text"].split()) == 3
    finally:
        serve.shutdown()
        ray.shutdown()


def test_the_steps_by_hand_show_chunks_hits_and_preemption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(BY_HAND, monkeypatch)
    output = capsys.readouterr().out
    assert re.search(r"^  b    0\.\.2 .* -$", output, re.M)  # a chunk samples no token
    assert "c is admitted; prefix hit of 4 tokens in block 0." in output
    assert re.search(r"^  c    4  .* 0 \+5 ", output, re.M)  # block 0 is shared with a
    assert "c is younger and is preempted for a" in output
    assert "c is admitted again" in output
    assert "placeholder" in output
    prompts = {"a": [1, 2, 3, 4, 5], "b": list(range(10, 19)), "c": [1, 2, 3, 4, 6]}
    answers = {}
    for name, tokens in prompts.items():
        for _ in range(6):
            tokens.append(sum(tokens) % 1000)
        answers[name] = str(tokens[-6:])
    assert dict(re.findall(r"(\w) finished: (\[.*?\])", output)) == answers


def test_policies_order_the_same_workload_differently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(POLICIES, monkeypatch)
    output = capsys.readouterr().out
    waits = {name: float(wait) for name, wait in re.findall(r"^(\w+) +([\d.]+) +\d", output, re.M)}
    assert waits.keys() == MAX_OVERTAKES.keys()
    assert all(waits[name] < waits["fcfs"] / 2 for name in waits.keys() - {"fcfs"})


def check_engine_in_300_lines(output: str) -> None:
    """The run shows each mechanism, and every answer is that of ``generate``."""
    assert "a 0-31 (chunk)" in output
    assert re.search(r"c 32-\d+> \(hit 32\)", output)
    assert "preempted for" in output
    assert re.search(r"a \d+>, b \d+>, c \d+>, d \d+>", output)  # continuous batching
    assert re.findall(r"^(\w): \d+ tokens, (.*)$", output, re.M) == [
        (name, "equal to model.generate") for name in "abcd"
    ]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_engine_in_300_lines_equals_generate(
    architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / IN_300_LINES
    assert len(example.read_text().splitlines()) <= 300
    demonstrate = runpy.run_path(str(example))["demonstrate"]
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    demonstrate(tiny_model(architecture), ids.tolist())
    check_engine_in_300_lines(capsys.readouterr().out)


@pytest.mark.nightly
@pytest.mark.smollm2
def test_the_engine_in_300_lines_with_smollm2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(IN_300_LINES, monkeypatch)
    check_engine_in_300_lines(capsys.readouterr().out)


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"^`(\w+\.py)` ", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
