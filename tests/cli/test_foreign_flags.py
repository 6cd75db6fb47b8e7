"""Flags of ``vllm serve`` on the command line, and engine arguments without an option."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cli_fakes import Desk, call


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--gpu-memory-utilization", "0.5"], {"memory_utilization": 0.5}),
        (["--gpu-memory-utilization=0.5"], {"memory_utilization": 0.5}),
        (["--num-gpu-blocks-override", "9"], {"num_blocks": 9}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--no-prefix-caching"], {"enable_prefix_caching": False}),
        (["--enforce-eager"], {"compile": "graph", "graph_batch_sizes": ()}),
        (["--no-enforce-eager", "--max-num-seqs", "8"], {"compile": "auto", "max_num_seqs": 8}),
        (["--scheduling-policy", "priority"], {"policy": "priority"}),
        (["--async-scheduling"], {"overlap": True}),
        (["--no-async-scheduling"], {"overlap": False}),
        (["-tp", "2", "--reasoning-parser", "think"], {"tensor_parallel_size": 2}),
        (["-tp=2"], {"tensor_parallel_size": 2}),
        (["--logprobs-mode", "processed_logprobs"], {"logprobs_mode": "processed_logprobs"}),
        (["--cudagraph-capture-sizes", "[1, 2]"], {"graph_batch_sizes": (1, 2)}),
        (["--disable-log-stats", "--tokenizer-mode", "auto"], {"max_num_seqs": 64}),
        (["--trust-remote-code", "--spec-method", "ngram"], {"max_num_seqs": 64}),
        (["--tokenizer", "tiny", "--swap-space", "0"], {"max_num_seqs": 64}),
        (["--limit-mm-per-prompt", '{"image": 0}'], {"max_num_seqs": 64}),
        (["--dtype", "half"], {"dtype": "float16"}),
    ],
)
def test_flags_of_equal_meaning_are_accepted(
    desk: Desk, flags: list[str], expected: dict[str, Any]
) -> None:
    result = desk.run("-p", "a", *flags)
    assert result.exit_code == 0, (result.output, result.exc_info)
    [(_, arguments)] = desk.started
    assert {name: arguments[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trust-remote-code", "maybe"], ["--trust-remote-code = 'maybe'", "True or False"]),
        (["--tokenizer", "other"], ["--tokenizer = 'other'", "folder"]),
        (["--data-parallel-size", "2"], ["--data-parallel-size = 2", "--replicas"]),
        (["-dp", "2"], ["--data-parallel-size = 2"]),
        (["--speculative-config", '{"method": "eagle"}'], ["speculative_config.method = 'eagle'"]),
        (["--speculative-config", "ngram"], ["speculative_config = 'ngram'", "JSON"]),
        (["--no-enable-chunked-prefill"], ["--no-enable-chunked-prefill = False"]),
        (["--enable-lora"], ["--enable-lora = True", "merge"]),
        (["--served-model-name", "x"], ["--served-model-name = 'x'", "pagespec serve"]),
        (["--enforce-eager", "--compile", "inductor"], ["--enforce-eager = True", "give one"]),
        (["--logprobs-mode", "x"], ["logprobs_mode = 'x'", "processed_logprobs"]),
        (["--on-logits", "x"], ["on_logits = 'x'", "function"]),
    ],
)
def test_other_flags_are_refused_in_one_line(
    desk: Desk, flags: list[str], words: list[str]
) -> None:
    result = desk.run("-p", "a", *flags)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("pagespec: error: ")
    assert all(word in result.stderr for word in words), result.stderr
    assert not desk.started


def test_an_unknown_flag_is_refused(desk: Desk) -> None:
    result = desk.run("-p", "a", "--max-num-seq", "3")
    assert result.exit_code == 2
    assert "No such option" in result.stderr
    assert "--max-num-seqs" in result.stderr
    assert call("version", "--enforce-eager").exit_code == 2


def test_a_prompt_may_look_like_a_flag(desk: Desk) -> None:
    assert desk.run("--prompt=--enforce-eager").stdout == "--ENFORCE-EAGER\n"
    assert desk.run("--prompt", "x", "--presence-penalty", "-1").exit_code == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--model", "m"], {"model": "m", "policy": "fair"}),
        (["m", "--policy", "fcfs"], {"model": "m", "policy": "fcfs"}),
        (["m", "--scheduling-policy", "priority"], {"policy": "priority"}),
        (["m", "--allowed-origins", '["*"]'], {"cors_origins": ("*",)}),
        (["m", "--disable-uvicorn-access-log"], {"access_log": False}),
        (["m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"], {"port": 8000}),
        (["m", "--served-model-name", "x", "--port", "9"], {"served_model_names": ("x",)}),
    ],
)
def test_a_server_accepts_flags_of_vllm_serve(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: dict[str, Any]
) -> None:
    found: dict[str, Any] = {}

    def serve(engine: Any, server: Any) -> None:
        from pagespec.cli.serve import server_config

        config = server_config(engine, server)
        found.update({**engine.config.arguments(), **vars(config), "model": engine.model})

    monkeypatch.setattr("pagespec.cli.main.serve_model", serve)
    result = call("serve", *flags)
    assert result.exit_code == 0, (result.output, result.exc_info)
    assert {name: found[name] for name in expected} == expected


def test_a_server_refuses_other_flags_of_vllm_serve() -> None:
    for flags in (["--chat-template", "x"], ["--headless"], ["--lora-modules", "a=b"]):
        result = call("serve", "m", *flags)
        assert result.exit_code == 2
        assert f"{flags[0]} = " in result.stderr
    result = call("generate", "-p", "x", "-m", "m", "--allowed-origins", "x")
    assert "No such option" in result.stderr
