"""Ranks, or their parent, that end in unusual ways; most of these tests are nightly."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pagespec import LLM, EngineError, InvalidInputError
from tests.distributed.rank_group import (
    BOUND_S,
    GREEDY,
    HOSTILE,
    Group,
    assert_gone,
    is_there,
    lose,
)
from tests.support.models import tiny_model

_PROGRAM = """
import json, sys
from pagespec import LLM, SamplingParams
if __name__ == "__main__":
    folder, then = sys.argv[1:]
    llm = LLM(folder, device="cpu", tensor_parallel_size=2, num_blocks=64, max_model_len=256)
    pids = llm._runner._workers.pids
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    print(json.dumps(pids), flush=True)
    while True:
        tokens = llm.generate([[2, 3, 4]], params, use_tqdm=False)[0].outputs[0].token_ids
        if then == "end":
            break
    print(json.dumps(tokens), flush=True)
"""


def start_program(folder: Path, then: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder), then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1"},
    )


def pids_of(program: subprocess.Popen[str]) -> list[int]:
    assert program.stdout is not None
    found: list[int] = json.loads(program.stdout.readline())
    assert found
    return found


@pytest.mark.nightly
def test_a_rank_out_of_memory_is_named(group: Group) -> None:
    assert group.llm
    (pid,) = group.pids

    def leave_no_memory() -> None:
        resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))

    # An exception (oneDNN, which compiles its kernels, names a "primitive"); or a signal, if it is
    # the stack that cannot grow.
    causes = "memory|alloc|mmap|create a primitive"
    lose(group, f"rank 1 .*(has failed: .*({causes})|has ended by signal)", leave_no_memory)


@pytest.mark.nightly
def test_an_engine_that_is_collected_ends_its_workers(group: Group) -> None:
    num_files = []
    for _ in range(3):  # the first opens what a process has once
        group.tokens([[2, 3]])
        pids = group.pids
        group.drop()
        assert_gone(pids)
        assert "LOCAL_RANK" not in os.environ
        assert not dist.is_initialized()
        num_files.append(len(os.listdir("/proc/self/fd")))
    assert num_files[1] == num_files[2]


def test_workers_end_with_their_parent_however_it_ends(folder: Path) -> None:
    program = start_program(folder, "on")
    pids = pids_of(program)
    time.sleep(0.5)
    assert all(map(is_there, pids))
    program.kill()
    program.communicate()
    assert_gone(pids)


@pytest.mark.nightly
def test_a_program_ends_without_a_word(folder: Path) -> None:
    program = start_program(folder, "end")
    pids = pids_of(program)
    out, err = program.communicate(timeout=BOUND_S)
    assert (program.returncode, len(json.loads(out))) == (0, 200)
    assert err == ""
    assert_gone(pids)


@pytest.mark.nightly
@pytest.mark.parametrize("after_s", [0.2, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
def test_ctrl_c_during_the_start_leaves_no_process(folder: Path, after_s: float) -> None:
    """At any moment: imports, the meeting of the ranks, weights, probe and trace."""
    program = start_program(folder, "on")
    end = time.monotonic() + BOUND_S
    while not (pids := children_of(program.pid)):
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(after_s)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=BOUND_S)
    assert program.returncode != 0
    assert err.count("Traceback") == 1, err
    assert "KeyboardInterrupt" in err
    assert_gone(pids)


@pytest.mark.nightly
@pytest.mark.parametrize("after_s", [0.5, 3.0, 4.0, 5.0, 6.0])
def test_a_rank_that_is_killed_during_the_start_is_named(
    group: Group, folder: Path, after_s: float
) -> None:
    group.drop()
    before, killed = set(children_of(os.getpid())), 0.0

    def kill() -> None:
        nonlocal killed
        while not (new := set(children_of(os.getpid())) - before):
            time.sleep(0.01)
        time.sleep(after_s)
        killed = time.monotonic()
        os.kill(min(new), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()

    def start_and_serve() -> None:
        llm = LLM(folder, device="cpu", tensor_parallel_size=2, **HOSTILE)
        while True:  # the start was over before
            llm.generate([[2, 3]], GREEDY, use_tqdm=False)

    with pytest.raises(EngineError, match=r"rank 1 .*by signal 9"):
        start_and_serve()
    assert time.monotonic() - killed < BOUND_S
    thread.join()
    assert set(children_of(os.getpid())) <= before


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return list(map(int, text.split()))


@pytest.mark.nightly
def test_weights_that_one_rank_cannot_read_are_the_error_of_load(
    group: Group, tmp_path: Path
) -> None:
    group.drop()
    tiny_model("qwen3").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = set(children_of(os.getpid()))
    begin = time.monotonic()
    with pytest.raises(InvalidInputError, match="must have weights"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=2, **HOSTILE)
    assert time.monotonic() - begin < BOUND_S
    assert set(children_of(os.getpid())) <= before
    assert group.tokens([[2, 3]])
