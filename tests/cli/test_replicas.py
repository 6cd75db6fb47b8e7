"""`pagespec generate --replicas`: rejected options, and a real cluster (nightly).

The cluster serves 500 rows while processes are killed. Its output must equal that of one process,
byte for byte.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagespec.cli.answer_lines import error_row
from pagespec.cli.jsonl import Fingerprint, Line
from pagespec.cli.options import EngineOptions, SamplingOptions
from pagespec.cli.replicas import _num_places, _resources
from pagespec.errors import InvalidInputError
from tests.support.cli_fakes import Desk
from tests.support.models import save_word_model

NUM_ROWS = 500


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "0"], "--replicas = 0: must be 1 or more"),
        (["--replicas", "-3"], "--replicas = -3: must be 1 or more"),
        (["--ray-address", "auto"], "--ray-address = 'auto': needs --replicas"),
        (["--replicas", "2", "--device", "cuda:1"], "Ray chooses the GPUs of a replica"),
        (
            ["--replicas", "2", "--trace", "steps"],
            "--trace = 'steps': must be absent with --replicas",
        ),
    ],
)
def test_what_does_not_go_with_replicas_is_refused(
    desk: Desk, options: list[str], said: str
) -> None:
    desk.lines({"prompt": "a"})
    result = desk.run_file(*options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not desk.output.exists()


def test_replicas_are_for_files(desk: Desk) -> None:
    result = desk.run("--prompt", "a", "--replicas", "2")
    assert result.exit_code == 2
    assert "belongs to --input" in result.stderr


def test_a_missing_ray_says_what_to_install(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    desk.lines({"prompt": "a"})
    result = desk.run_file("--replicas", "2")
    assert result.exit_code == 2
    assert "pip install 'pagespec[ray]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_address_where_nothing_listens_is_refused_at_once(desk: Desk) -> None:
    pytest.importorskip("ray")
    desk.lines({"prompt": "a"})
    began = time.perf_counter()
    result = desk.run_file("--replicas", "2", "--ray-address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "--ray-address = '127.0.0.1:1': no server responds there" in result.stderr
    assert time.perf_counter() - began < 10


def cluster(*machines: tuple[int, int]) -> Any:
    """As much of Ray as tells of machines: CPUs and GPUs of each."""
    nodes = [{"Alive": True, "Resources": {"CPU": c, "GPU": g}} for c, g in machines]
    nodes.append({"Alive": False, "Resources": {"CPU": 99, "GPU": 99}})
    total = {"CPU": sum(c for c, _ in machines), "GPU": sum(g for _, g in machines)}
    return SimpleNamespace(
        nodes=lambda: nodes, cluster_resources=lambda: total, available_resources=lambda: total
    )


@pytest.mark.parametrize(
    ("machines", "num_replicas", "num_ranks", "device", "expected"),
    [
        ([(2, 0)], 2, 1, "auto", ("cpu", 1, 0)),
        ([(64, 0)], 2, 1, "auto", ("cpu", 32, 0)),
        ([(8, 0), (3, 0)], 3, 1, "auto", ("cpu", 3, 0)),
        ([(8, 8)], 8, 1, "auto", ("cuda", 1, 1)),
        ([(8, 8)], 2, 1, "cpu", ("cpu", 4, 0)),
        ([(8, 8), (8, 8)], 4, 4, "auto", ("cuda", 1, 4)),
        ([(2, 0)], 3, 1, "auto", "must be at most 2: each needs 1 CPU on one machine"),
        ([(3, 0)], 2, 2, "auto", "must be at most 1: each needs 2 CPU on one machine"),
        ([(8, 3), (8, 3)], 3, 2, "auto", "at most 2: each needs 1 CPU and 2 GPU on one machine"),
        ([(8, 0)], 1, 1, "cuda", "must be at most 0"),
    ],
)
def test_what_a_replica_takes_and_how_many_there_can_be(
    machines: list[tuple[int, int]], num_replicas: int, num_ranks: int, device: str, expected: Any
) -> None:
    ray = cluster(*machines)
    engine = EngineOptions(tensor_parallel_size=num_ranks, device=device)
    if isinstance(expected, str):
        with pytest.raises(InvalidInputError, match=re.escape(expected)):
            _resources(ray, engine, num_replicas)
        return
    found, resources = _resources(ray, engine, num_replicas)
    assert (found, resources["num_cpus"], resources["num_gpus"]) == expected
    assert _num_places(ray, resources) >= num_replicas


def test_the_row_of_a_line_that_is_given_up_belongs_to_the_run() -> None:
    fingerprint = Fingerprint("tiny", False, SamplingOptions())
    line = Line(7, b'{"prompt": "a", "id": "x"}')
    row = error_row(fingerprint, line, "given up")
    assert row == {"index": 7, "key": fingerprint.key(line), "id": "x", "error": "given up"}
    assert "id" not in error_row(fingerprint, Line(8, b"{bad"), "given up")


# A real cluster ---------------------------------------------------------------------------------


class Job:
    """The command on one input of 500 lines, good and bad, and its outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_word_model(folder / "model")
        rng = random.Random(1)
        lines = [json.dumps(_row(rng, i)) if i % 50 != 9 else "{bad" for i in range(NUM_ROWS)]
        (folder / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))
        self.start("one.jsonl").communicate(timeout=300)
        self.expected = (folder / "one.jsonl").read_bytes()
        assert self.expected.count(b"\n") == NUM_ROWS
        assert 0 < self.expected.count(b'"error"') < NUM_ROWS / 4

    def start(self, output: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pagespec.cli", "generate", "--model", self.model]
        files = ["--input", str(self.folder / "in.jsonl"), "--output", str(self.folder / output)]
        return subprocess.Popen(
            [*command, *files, "--max-num-seqs", "16", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PAGESPEC_CACHE": str(self.folder / "cache"), "RAY_ADDRESS": ""},
        )

    def replicate(self, output: str) -> subprocess.Popen[str]:
        """Two replicas on a cluster of this command, under way: some rows are written."""
        process = self.start(output, "--replicas", "2", "--ray-address", "local")
        _wait_for(lambda: self.num_rows(output) >= 20, process)
        return process

    def num_rows(self, output: str) -> int:
        path = self.folder / output
        return path.read_bytes().count(b"\n") if path.exists() else 0


def _row(rng: random.Random, i: int) -> dict[str, Any]:
    words = " ".join(f"word{rng.randrange(1, 320)}" for _ in range(rng.randint(3, 40)))
    row: dict[str, Any] = {"prompt": words, "max_tokens": rng.randint(30, 90)}
    if i % 17 == 3:
        row["prompt"] = ""
    elif i % 13 == 5:
        row = {"id": f"r{i}", "messages": [{"role": "user", "content": words}], "seed": i}
    elif i % 11 == 7:
        row |= {"temperature": 0, "id": i}
    return row


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _replicas_of(process: subprocess.Popen[str]) -> list[Any]:
    psutil = pytest.importorskip("psutil")
    below = psutil.Process(process.pid).children(recursive=True)
    return [p for p in below if p.cmdline()[:1] and p.cmdline()[0].startswith("ray::_Replica")]


def _assert_gone(processes: list[Any]) -> None:
    psutil = pytest.importorskip("psutil")
    assert not psutil.wait_procs(processes, timeout=30)[1]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    pytest.importorskip("ray")
    return Job(tmp_path_factory.mktemp("job"))


@pytest.mark.nightly
def test_a_replica_killed_in_the_middle_leaves_the_bytes_of_one_process(job: Job) -> None:
    process = job.replicate("killed.jsonl")
    replicas = _replicas_of(process)
    assert len(replicas) == 2
    replicas[0].kill()
    num_before = job.num_rows("killed.jsonl")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said  # some rows are errors
    assert 20 <= num_before < NUM_ROWS
    assert re.search(r"a replica has ended, with [1-9]\d* unfinished rows", said), said
    assert (job.folder / "killed.jsonl").read_bytes() == job.expected
    _assert_gone(replicas)


@pytest.mark.nightly
def test_a_killed_driver_leaves_no_replica_and_the_same_command_goes_on(job: Job) -> None:
    process = job.replicate("resumed.jsonl")
    replicas = _replicas_of(process)
    assert len(replicas) == 2
    process.kill()
    process.communicate(timeout=60)
    _assert_gone(replicas)
    num_before = job.num_rows("resumed.jsonl")
    assert 20 <= num_before < NUM_ROWS
    process = job.start("resumed.jsonl", "--replicas", "2", "--ray-address", "local")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert f"keeping {num_before} of {NUM_ROWS} rows" in said
    assert (job.folder / "resumed.jsonl").read_bytes() == job.expected


@pytest.mark.nightly
def test_ctrl_c_ends_the_replicas_and_keeps_the_rows(job: Job) -> None:
    process = job.replicate("interrupted.jsonl")
    replicas = _replicas_of(process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "run the same command to continue" in said
    assert "Traceback" not in said
    _assert_gone(replicas)
    kept = (job.folder / "interrupted.jsonl").read_bytes()
    assert job.expected.startswith(kept)


@pytest.mark.nightly
def test_more_replicas_than_the_cluster_holds_are_refused(job: Job) -> None:
    process = job.start("many.jsonl", "--replicas", "9999", "--ray-address", "local")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--replicas = 9999: must be at most" in said
    assert job.num_rows("many.jsonl") == 0
