"""The benchmark of the server: its arithmetic, its clients, and both kinds of servers."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import serving
from benchmarks.http_load import Answer, AtOnce, ClosedLoop, Loaded, run_load
from benchmarks.http_server import MODEL, pagespec_engine, running, write_tokenizer
from benchmarks.serving import gaps, latencies, percentiles, rate_between, ratios, row
from benchmarks.workload import LOADS, make_workload, model_config, model_folder

FAKE = Path(__file__).with_name("fake_vllm.py")
TINY = ["--model", "tiny", "--workload", "tiny", "--streams", "3", "--seconds", "1"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which "vLLM" is installed."""
    main = tmp_path / "site" / "vllm" / "entrypoints" / "cli" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text(f"import runpy; runpy.run_path({str(FAKE)!r}, run_name='__main__')")
    return tmp_path / "site"


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(serving.main)
    return app


# Arithmetic -----------------------------------------------------------------------------------


def answer(began: float, arrivals: list[float], num_tokens: int) -> Answer:
    return Answer(5, num_tokens, began, arrivals[-1], array("d", arrivals))


def test_chunks_that_came_together_have_one_gap() -> None:
    assert list(gaps([1.0, 1.5, 1.5, 2.5], 0.0, 9.0)) == [0.5, 1.0]
    assert list(gaps([1.0, 1.5, 1.5, 2.5], 0.0, 2.0)) == [0.5]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([0.003, 0.001, 0.002]) == [2.0, 3.0]
    assert percentiles([i / 1000 for i in range(101)]) == [50.0, 99.0]
    assert percentiles([]) is None


def test_a_rate_counts_the_tokens_that_came_in_its_time() -> None:
    loaded = Loaded([answer(0.0, [1.0, 2.0, 3.0, 4.0], 8), answer(0.0, [2.5], 3)])
    assert rate_between(loaded, 2.0, 4.0) == (4 + 3) / 2


def test_latencies_are_those_of_requests_begun_in_the_time() -> None:
    loaded = Loaded([answer(0.0, [0.5, 0.6], 2), answer(1.0, [1.2, 1.3, 1.6], 5)], 0.25)
    found = latencies([loaded], 1.0, 2.0)
    assert found["ttft_ms"] == pytest.approx([200, 200])
    assert found["itl_ms"] == pytest.approx([100, 300])
    assert found["tpot_ms"] == pytest.approx([100, 100])
    assert found["tokens_per_chunk"] == 7 / 5
    assert (found["num_requests"], found["client_share"]) == (2, 0.25)


def test_a_line_shows_what_there_is() -> None:
    measured = {"rates": [10.0, 30.0, 20.0], "ttft_ms": [1.0, 2.0], "itl_ms": None}
    cells = ["name", "20", "(10..30)", "1.0/2.0", "-", "-", "-", "-"]
    assert row("name", measured).split() == cells


def test_ratios_are_of_medians() -> None:
    loads = {"at once, whole": {"rates": [9.0]}, "without pause": {"rates": [6.0]}}
    results = {
        "offline": {"loads": {"generate": {"rates": [10.0]}}},
        "pagespec": {"loads": loads},
        "vLLM": {"loads": {"without pause": {"rates": [3.0]}}},
    }
    assert list(ratios(results)) == [
        "at once, whole: 0.900 of offline generate",
        "without pause: 2.00 of vLLM's tokens per second",
    ]


def test_clients_draw_the_same_requests_each_time() -> None:
    load = ClosedLoop(4, 1.0, (3, 5), (2, 2))
    drawn = [next(load.requests(stream)) for stream in range(4)]
    assert drawn == [next(load.requests(stream)) for stream in range(4)]
    assert len({tuple(prompt) for prompt, _ in drawn}) == 4
    assert all(3 <= len(prompt) <= 5 and num == 2 for prompt, num in drawn)


def test_every_token_has_a_text_of_its_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, 20_000)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = tokenizer.batch_decode([[number] for number in range(20_000)])
    assert len(tokenizer) == len(set(texts)) == 20_000
    assert tokenizer.decode([700, 3, 19_999]) == "".join(texts[i] for i in (700, 3, 19_999))


# Servers --------------------------------------------------------------------------------------


def test_vllm_is_measured_as_its_users_start_it(
    site: Path, app: typer.Typer, tmp_path: Path
) -> None:
    output = tmp_path / "out.json"
    arguments = [*TINY, "--peer", str(site), "--peer-only", "--clients", "2", "--repeat", "1"]
    found = CliRunner().invoke(app, [*arguments, "--json", str(output)])
    assert found.exit_code == 0, found.output
    their = json.loads(output.read_text())["vLLM"]
    assert their["version"] == "0.fake"
    assert list(their["loads"]) == ["at once, whole", "at once, streamed", "without pause"]
    streamed = their["loads"]["at once, streamed"]
    assert streamed["tokens_per_chunk"] == 1.0
    assert streamed["num_requests"] == len(make_workload("tiny").prompts)
    assert streamed["tpot_ms"][0] >= 2
    assert their["loads"]["at once, whole"]["ttft_ms"] is None
    assert "vLLM, without pause" in found.output


@pytest.mark.parametrize(
    ("fault", "told"), [("exit", "no known GPU"), ("short", "tokens in and out instead")]
)
def test_a_peer_that_fails_is_told(
    fault: str, told: str, site: Path, app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULT", fault)
    found = CliRunner().invoke(app, [*TINY, "--peer", str(site), "--peer-only", "--clients", "1"])
    assert found.exit_code == 1
    assert told in found.output


def test_our_server_answers_both_loads(tmp_path: Path) -> None:
    workload = make_workload("tiny")
    with model_folder("tiny") as folder:
        write_tokenizer(folder, model_config("tiny")["vocab_size"])
        engine = pagespec_engine(folder, 8, LOADS["tiny"].max_model_len, ["--device", "cpu"])
        with running(engine, 120.0, tmp_path / "log") as server:
            whole = run_load(server.port, MODEL, AtOnce(workload), 2, is_streamed=False)
            load = ClosedLoop(3, 0.5, (3, 5), (4, 6))
            streamed = run_load(server.port, MODEL, load, 1, is_streamed=True)
    assert sum(a.num_tokens for a in whole.answers) == workload.num_output_tokens
    assert len(streamed.answers) >= 3
    assert all(0 < a.arrivals[0] - a.began < a.ended - a.began for a in streamed.answers)
