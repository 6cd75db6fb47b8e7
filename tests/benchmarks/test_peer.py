"""What the peer's scripts print is read, and they are run and timed as they should be. No vLLM."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.peer import (
    PeerError,
    PeerResult,
    measure_comparison,
    measure_start,
    measure_throughput,
    read_bench,
    read_more,
    require_kit,
)
from benchmarks.workload import make_workload


def test_the_peers_json_is_read() -> None:
    row = {
        "version": "0.26.0",
        "torch": "2.11.0",
        "engine_start_s": 21.5,
        "num_gpu_blocks": 40_625,
        "throughput": [{"s": 7.0, "tok_s": 19138.0}, {"s": 7.1, "tok_s": 18868.5}],
        "latency": [{"total_s": 0.8, "one_token_s": 0.01, "ms_per_token": 1.56}],
    }
    result = PeerResult()
    read_bench(json.dumps(row), result)
    assert result == PeerResult(
        version="vLLM 0.26.0, torch 2.11.0",
        seconds={"nano": [7.0, 7.1]},
        total_s=[0.8],
        one_token_s=[0.01],
        kv_tokens=650_000,
        start_s=[21.5],
    )


MORE = """INFO loading
[vllm warm-up] 400 in, 40 out, 0.100 s, 400 tok/s
[vllm 32 requests] 18237 in, 15177 out, 2.317 s, 6551 tok/s
[vllm 1,024 requests] 578009 in, 591657 out, 26.951 s, 21953 tok/s
[vllm 32 x 8,192 in, 256 out] 262144 in, 8192 out, 3.975 s, 2061 tok/s
"""


def test_the_lines_of_the_peers_other_loads_are_read() -> None:
    result = PeerResult()
    workloads = {name: make_workload(name) for name in ("nano32", "long")}
    read_more(MORE, workloads, result)
    read_more(MORE.replace("2.317", "2.400"), workloads, result)
    assert result.seconds == {"nano32": [2.317, 2.4], "long": [3.975, 3.975]}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (MORE.replace("18237", "18238"), "18238"),
        (MORE.replace("[vllm 32 requests]", "[vllm 33 requests]"), "no line for nano32"),
    ],
)
def test_a_peer_that_ran_something_else_is_refused(text: str, what: str) -> None:
    with pytest.raises(PeerError, match=what):
        read_more(text, {"nano32": make_workload("nano32")}, PeerResult())


FAKE_BENCH = """
import json, os, sys
flags = [a for a in sys.argv[1:] if a != "--batch-invariant"]
options = dict(zip(flags[::2], flags[1::2]))
assert os.environ["PYTHONPATH"].endswith("site"), os.environ["PYTHONPATH"]
assert os.environ["VLLM_CACHE_ROOT"].endswith("cache")
runs = [dict(s=7.0 + i) for i in range(int(options["--repeat"]))]
row = dict(version="1", torch="2", engine_start_s=3.0, throughput=runs)
open(options["--json"], "a").write(json.dumps(row) + "\\n")
"""


def test_the_peers_scripts_are_run_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "bench_vllm.py").write_text(FAKE_BENCH)
    with pytest.raises(PeerError, match="bench_more"):
        require_kit(tmp_path, "0.6b")
    (tmp_path / "bench_more.py").write_text(f"print({MORE!r})\nraise SystemExit('out of memory')")
    require_kit(tmp_path, "0.6b", ["nano", "tiny"])
    for model, names in (("tiny", ["nano"]), ("8b", ["tiny"])):
        with pytest.raises(PeerError, match="the peer supports"):
            require_kit(tmp_path, model, names)
    result = measure_throughput(tmp_path, "0.6b", ["nano"], repeat=2)
    assert result.seconds == {"nano": [7.0, 8.0]}
    with pytest.raises(PeerError, match="out of memory"):
        measure_throughput(tmp_path, "0.6b", ["nano32"], repeat=1)


def test_a_comparison_runs_the_peer_once_per_column(tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "bench_vllm.py").write_text(FAKE_BENCH)
    (tmp_path / "bench_more.py").write_text(f"print({MORE!r})")
    names = ["nano", "nano32", "tiny"]
    usual = measure_comparison(tmp_path, "0.6b", names, 2, is_batch_invariant=False)
    assert usual.seconds == {"nano": [7.0, 8.0], "nano32": [2.317]}
    invariant = measure_comparison(tmp_path, "0.6b", names, 2, is_batch_invariant=True)
    assert invariant.seconds == {"nano": [7.0, 8.0]}


ONE_SECOND_BEHIND_ITS_RESULT = """
import time
assert not os.environ["PYTHONDONTWRITEBYTECODE"]
time.sleep(0.3)
print("[0.6b] batch 1 run 0: 128+2 tokens in 0.1s")
time.sleep(1)
"""


def test_a_start_of_the_peer_is_timed_to_its_first_result(tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    script = tmp_path / "bench_vllm.py"
    script.write_text(FAKE_BENCH)
    cache = tmp_path / "cache"
    with pytest.raises(PeerError, match="no line"):
        measure_start(tmp_path, "0.6b", cache)
    script.write_text(FAKE_BENCH + ONE_SECOND_BEHIND_ITS_RESULT)
    begin = time.monotonic()
    start = measure_start(tmp_path, "0.6b", cache)
    total = time.monotonic() - begin
    assert start.start_s == [3.0]
    assert 0.3 <= start.first_result_s[0] <= total - 0.5
