"""The number of threads of an engine on a CPU.

It is given, or the fastest by measurements at start-up and between steps.
"""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagespec import LLM, InvalidInputError, SamplingParams
from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.recurrent.recurrent_spec import RecurrentSpec
from pagespec.runner.cpu import platform as cpu_platform
from pagespec.runner.cpu import threads as cpu_threads
from pagespec.runner.cpu.platform import steady
from pagespec.runner.cpu.runner import ModelRunner
from pagespec.runner.cpu.threads import StepThreads, halvings, step_threads
from tests.support.captures import capture_once, graph_cache
from tests.support.driving import drive, make_requests
from tests.support.models import save_word_model, tiny_model


def _captured(index_dim: int, *recurrent: RecurrentSpec) -> Any:
    """The fields of a captured model that decide which of its matmuls have no recipes."""
    loaded = SimpleNamespace(recurrent=recurrent)
    return SimpleNamespace(loaded=loaded, specs=[SimpleNamespace(index_dim=index_dim)])


def _follows_threads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, weight) + torch.get_num_threads()


QUIET, BUSY = {4: 1.0, 2: 1.9, 1: 3.7}, {4: 9.0, 2: 6.0, 1: 3.7}


pytestmark = pytest.mark.usefixtures("cpu_machine")


class Machine:
    """A machine whose matmuls take the seconds of ``load``, and a measurement ``cost_s``."""

    def __init__(self, load: Mapping[int, float], cost_s: float = 0.02) -> None:
        self.load, self.cost_s = load, cost_s
        self.now = 0.0
        self.measured: list[int] = []

    def measure(self, number: int) -> float:
        torch.set_num_threads(number)
        self.measured.append(number)
        self.now += self.cost_s
        return self.load[number]

    def threads(self, number: int | None = None) -> StepThreads:
        numbers = sorted(self.load, reverse=True)
        return StepThreads(numbers, number or numbers[0], self.measure, lambda: self.now)

    def run(self, threads: StepThreads, seconds: float, step_s: float = 0.5) -> list[int]:
        """The number of threads of every step, for steps of so many seconds."""
        used = []
        for _ in range(int(seconds / step_s)):
            threads.apply()
            used.append(torch.get_num_threads())
            self.now += step_s
            threads.add(step_s)
        return used


# At start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (2, (2, 1)), (3, (3, 1)), (6, (6, 3, 1)), (8, (8, 4, 2, 1))]
)
def test_halvings(most: int, expected: tuple[int, ...]) -> None:
    assert halvings(most) == expected


@pytest.mark.parametrize(
    ("seconds", "given", "expected"),
    [
        ({2: 1.0, 1: 1.9}, 2, 2),
        ({2: 10.0, 1: 1.8}, 2, 1),  # another process holds a core
        ({2: 1.0, 1: 1.0}, 2, 2),
        ({8: 3.0, 4: 0.5, 2: 1.0, 1: 2.0}, 8, 4),
        ({3: 1.0, 1: 2.0}, 8, 3),  # a quota of three cores
        ({1: 2.0}, 8, 1),
        ({1: 2.0}, 1, 1),  # as OMP_NUM_THREADS says
    ],
)
def test_the_quickest_number_is_used_and_said(
    caplog: pytest.LogCaptureFixture, seconds: dict[int, float], given: int, expected: int
) -> None:
    caplog.set_level(logging.WARNING, "pagespec")
    assert cpu_threads.quickest(tuple(seconds), given, seconds.__getitem__) == expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (expected < given)
    if said:
        assert said[0].startswith(f"CPU threads: {expected}, where torch would use {given} ")


def test_a_trial_measures_and_leaves_the_number_as_it_was() -> None:
    torch.set_num_threads(2)
    assert cpu_threads.measured(1) > 0
    torch.set_num_threads(2)
    assert cpu_threads.quickest((2, 1), 2, cpu_threads.measured) in (1, 2)
    assert torch.get_num_threads() == 2

    def fails(number: int) -> float:
        torch.set_num_threads(number)
        raise MemoryError

    with pytest.raises(MemoryError):
        cpu_threads.quickest((1,), 2, fails)
    assert torch.get_num_threads() == 2


def test_engines_of_a_process_share_what_is_measured_and_a_given_number_is_one_engines() -> None:
    torch.set_num_threads(1)
    given = step_threads(3)
    given.apply()
    assert torch.get_num_threads() == 3
    shared = step_threads(None)
    assert shared is step_threads(None)
    assert shared.numbers == (1,)  # torch's own, not that of the engine before
    shared.apply()
    assert torch.get_num_threads() == 1
    given.apply()
    assert torch.get_num_threads() == 3


def test_ranks_and_eager_models_keep_a_number() -> None:
    torch.set_num_threads(2)
    for kept in (step_threads(None, num_ranks=2), step_threads(None, is_eager=True)):
        (number,) = kept.numbers
        kept.add(1e6)
        kept.apply()
        assert torch.get_num_threads() == number


@pytest.fixture
def fallen(cpu_machine: Callable[..., None]) -> Machine:
    """A process with an engine whose thread count fell to 1 on a busy machine. The machine is idle
    again."""
    machine = Machine(BUSY)
    cpu_machine(4, machine.measure)
    torch.set_num_threads(4)
    shared = step_threads(None)
    shared.apply()
    assert torch.get_num_threads() == 1
    machine.load = QUIET
    return machine


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, 2), (3, 1), (4, 1), (5, 1)])
def test_ranks_start_with_what_the_machine_has_now(
    fallen: Machine, num_ranks: int, expected: int
) -> None:
    """Not with the count of an earlier engine; each rank has its share of the cores."""
    assert cpu_threads.rank_threads(None, num_ranks) == expected
    assert cpu_threads.rank_threads(3, num_ranks) == 3
    fallen.load = BUSY
    assert cpu_threads.rank_threads(None, num_ranks) == 1
    assert step_threads(None).numbers == (4, 2, 1)


def test_engines_that_keep_their_number_start_with_what_the_machine_has_now(
    fallen: Machine, torch_calls: dict[Any, Any]
) -> None:
    before = torch.get_num_threads()
    assert step_threads(None, is_eager=True).numbers == (4,)
    torch_calls[torch.bmm] = _follows_threads
    assert steady(step_threads(None), _captured(16)).numbers == (4,)
    assert torch.get_num_threads() == before
    fallen.load = BUSY
    assert step_threads(None, is_eager=True).numbers == (1,)
    shared = step_threads(None)
    assert shared.number == 1  # it follows its own measurements


# Between steps ----------------------------------------------------------------------------------


def test_fewer_threads_on_a_busy_machine_and_more_on_a_quiet_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pagespec")
    machine = Machine(QUIET)
    threads = machine.threads()
    assert set(machine.run(threads, 100)) == {4}
    assert caplog.records == []
    machine.load = BUSY
    used = machine.run(threads, 100)
    assert used[0] == 4
    assert used[-1] == 1
    assert used.index(1) <= 2 * 24  # seconds of steps: two changes, each measured twice
    machine.load = QUIET
    used = machine.run(threads, 100)
    assert used[0] == 1
    assert used[-1] == 4
    levels = [record.levelno for record in caplog.records]
    said = [record.getMessage() for record in caplog.records]
    assert levels[0] == logging.WARNING
    assert said[0].startswith("CPU threads: 2 from now on, 4 before, as the machine is busy (")
    assert levels[-1] == logging.INFO
    assert "as the machine is quieter (" in said[-1]


def test_the_last_change_is_said_and_changes_are_said_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pagespec")
    machine = Machine({2: 1.0, 1: 1.9})
    threads = machine.threads()
    said_at = []
    for turn in range(40):
        machine.load = {2: 5.0 if turn % 2 else 1.0, 1: 1.9}
        before = len(caplog.records)
        machine.run(threads, 15)
        said_at += [machine.now] * (len(caplog.records) - before)
    assert len(said_at) > 3
    assert all(b - a > 40 for a, b in pairwise(said_at))
    machine.load = {2: 5.0, 1: 1.9}
    machine.run(threads, 100)
    assert caplog.records[-1].getMessage().startswith("CPU threads: 1 from now on, 2 before")


@pytest.mark.parametrize("load", [{2: 1.9, 1: 1.8}, {2: 1.9, 1: 1.6}])
def test_a_small_difference_changes_nothing(load: dict[int, float]) -> None:
    machine = Machine(load)
    for number in (2, 1):
        assert set(machine.run(machine.threads(number), 200)) == {number}


def test_one_measurement_changes_nothing() -> None:
    """A short-lived process must not change the count."""
    machine = Machine({2: 1.0, 1: 1.9})
    threads = machine.threads()
    for _ in range(20):
        machine.run(threads, 10.5)
        machine.load = {2: 9.0, 1: 1.9}
        used = machine.run(threads, 0.5)
        machine.load = {2: 1.0, 1: 1.9}
        assert used == [2]
    assert set(machine.run(threads, 100)) == {2}


@pytest.mark.parametrize("cost_s", [0.001, 0.02, 0.5])
def test_measuring_takes_below_a_hundredth_of_the_time(cost_s: float) -> None:
    machine = Machine(QUIET, cost_s)
    machine.run(machine.threads(), 2000)
    assert machine.measured
    assert len(machine.measured) * cost_s < 0.01 * 2000
    assert len(machine.measured) <= 3 * 2000 / 10


def test_only_neighbours_are_measured() -> None:
    machine = Machine({n: 100.0 / n for n in halvings(64)})
    machine.run(machine.threads(), 25)
    assert set(machine.measured) == {64, 32}
    machine = Machine({n: float(n != 8) for n in halvings(64)})
    machine.run(machine.threads(8), 15)
    assert set(machine.measured) == {16, 8, 4}


def test_idle_time_measures_nothing() -> None:
    machine = Machine(QUIET)
    threads = machine.threads()
    for _ in range(100):
        machine.now += 3600
        threads.apply()
        threads.add(0.05)
    assert machine.measured == []


def test_a_failing_measurement_leaves_the_number_and_the_lock() -> None:
    machine = Machine(QUIET)

    def fails(number: int) -> float:
        torch.set_num_threads(number)
        raise MemoryError

    threads = StepThreads((4, 2, 1), 4, fails, lambda: 0.0)
    threads.add(11)
    with pytest.raises(MemoryError):
        threads.apply()
    threads.apply()
    assert torch.get_num_threads() == 4
    threads.add(11)
    with pytest.raises(MemoryError):
        threads.apply()
    assert machine.measured == []


def test_each_thread_that_steps_gets_the_number() -> None:
    """torch's thread count is per calling thread after its first computation."""
    machine = Machine({2: 9.0, 1: 1.9})
    threads, found = machine.threads(), []
    begin, changed = threading.Event(), threading.Event()

    def steps() -> None:
        threads.apply()
        found.append(torch.get_num_threads())
        begin.set()
        changed.wait(60)
        threads.apply()
        found.append(torch.get_num_threads())

    other = threading.Thread(target=steps)
    other.start()
    begin.wait(60)
    assert machine.run(threads, 15)[-1] == 1
    changed.set()
    other.join(60)
    assert found == [2, 1]


# With a model -----------------------------------------------------------------------------------

NUMBERS = (3, 2, 1)


class Switching:
    """Chooses one of ``choices`` at random for every step."""

    numbers = NUMBERS

    def __init__(self, choices: tuple[int, ...], seed: int = 0) -> None:
        self._choices, self._rng = choices, random.Random(seed)
        self.used: set[int] = set()

    def apply(self) -> None:
        number = self._rng.choice(self._choices)
        self.used.add(number)
        torch.set_num_threads(number)

    def add(self, step_s: float) -> None:
        """Nothing follows the time."""


_WIDE = {"hidden_size": 384, "intermediate_size": 640}
KINDS: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "qwen3_moe": {**_WIDE, "moe_intermediate_size": 256},
    "deepseek_v3": _WIDE,
    "qwen3_next": {**_WIDE, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "kimi_linear": _WIDE,
    "nemotron_h": _WIDE,
    "deepseek_v32": _WIDE,
}
_BY_DAY = [("qwen3_next", "graph", torch.float32)]  # attention, states, and experts


@pytest.mark.parametrize(
    ("arch", "mode", "dtype"),
    [
        pytest.param(*case, marks=() if case in _BY_DAY else pytest.mark.nightly)
        for case in product(KINDS, ("graph", "inductor"), (torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_bits_do_not_follow_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, arch: str, mode: str, dtype: torch.dtype
) -> None:
    """Other steps use other thread counts, from those that the trials at start-up compared."""
    capture_once(monkeypatch)
    model = tiny_model(arch, **KINDS[arch]).to(dtype)
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 300) for _ in range(n)] for n in (1, 3, 17, 64, 131)]
    params = [
        SamplingParams(
            max_tokens=5, temperature=temperature, top_p=0.9, seed=7, logprobs=3, prompt_logprobs=1
        )
        for temperature in (0.0, 1.0)
    ]
    found = []
    for choices, seed in ((NUMBERS, 0), (NUMBERS[-1:], 0), (NUMBERS, 1)):
        threads = Switching(choices, seed)
        monkeypatch.setattr(cpu_platform, "step_threads", lambda *_, made=threads, **__: made)
        llm = LLM(model, device="cpu", compile=mode, num_blocks=200, max_num_batched_tokens=96)
        outputs = [
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], some, use_tqdm=False)
            for some in params
        ]
        assert threads.used == set(choices)
        found.append(
            [
                (answer.prompt_logprobs, answer.outputs[0].token_ids, answer.outputs[0].logprobs)
                for answers in outputs
                for answer in answers
            ]
        )
    assert found[0] == found[1]
    assert found[2] == found[1]


@pytest.mark.parametrize(
    ("recurrent", "index_dim", "keeps"),
    [
        ([], 0, False),
        ([RecurrentSpec(0, "short_conv", (4, 16), "float32", ())], 0, False),
        ([RecurrentSpec(0, "delta_rule", (2, 16, 32), "float32", ())], 0, True),
        ([RecurrentSpec(0, "ssd_scan", (2, 16, 32), "float32", ())], 0, True),
        ([], 16, True),
    ],
)
def test_a_model_whose_bits_follow_the_number_keeps_it(
    torch_calls: dict[Any, Any],
    caplog: pytest.LogCaptureFixture,
    recurrent: list[RecurrentSpec],
    index_dim: int,
    keeps: bool,
) -> None:
    """Models with matmuls that have no trial: matmuls of states, and of an indexer."""
    caplog.set_level(logging.INFO, "pagespec")
    made = _captured(index_dim, *recurrent)
    threads = StepThreads((2, 1), 2, QUIET.__getitem__)
    torch.set_num_threads(2)
    assert steady(threads, made) is threads
    torch_calls[torch.bmm] = _follows_threads
    found = steady(threads, made)
    assert found.numbers == ((2,) if keeps else (2, 1))
    said = "CPU threads: 2, fixed: bits of this model depend on the number"
    assert [record.getMessage() for record in caplog.records] == [said] * keeps


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    loaded = load_model(tiny_model("llama"))
    return capture_model(
        loaded, probe_model(loaded), CaptureOptions(threads=(2, 1)), graph_cache=graph_cache()
    )


def test_an_engine_falls_back_and_comes_back_with_equal_answers(captured: CapturedModel) -> None:
    def answers(threads: StepThreads) -> list[list[int]]:
        runner = ModelRunner(captured, block_size=4, num_blocks=120, threads=threads)
        requests = make_requests([[9, 8, 7, 6, 5], [100, 200, 300], [4] * 20], 40)
        drive(runner, requests, block_size=4, num_blocks=120, chunk=5)
        return [request.output_token_ids for request in requests]

    machine = Machine({2: 1.0, 1: 1.9})
    used = []

    class Slow(StepThreads):
        """Steps that take seconds; another process uses the cores during the second third."""

        def apply(self) -> None:
            machine.load = {2: 9.0 if 16 <= len(used) < 32 else 1.0, 1: 1.9}
            super().apply()
            used.append(torch.get_num_threads())

        def add(self, step_s: float) -> None:
            super().add(step_s + 6)

    found = answers(Slow((2, 1), 2, machine.measure, lambda: machine.now))
    assert [used[0], used[28], used[-1]] == [2, 1, 2]
    assert found == answers(StepThreads((1,)))


def test_a_real_measurement_sees_a_busy_machine() -> None:
    """Processes that hold every core make more threads than one slow, or at least not quicker than
    by half; nothing is asserted of a quiet machine, which tests share."""
    cores = cpu_threads.usable_cores()
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)
    ]
    try:
        time.sleep(0.2)
        threads = StepThreads((8 * cores, 1), 8 * cores, cpu_threads.measured_again)
        for _ in range(40):
            threads.add(100)
            threads.apply()
            if threads.number == 1:
                break
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert threads.number == 1


def test_threads_as_given(tmp_path: Path) -> None:
    folder = save_word_model(tmp_path)
    llm = LLM(folder, device="cpu", num_blocks=4, threads=1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)  # as another engine of the process would
    seen = []
    llm.generate("word1 word2", SamplingParams(max_tokens=2), use_tqdm=False)
    seen.append(torch.get_num_threads())
    assert seen == [1]
    assert cpu_threads.shared_threads.cache_info().currsize == 0  # no trial


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2", 1 << 40])
def test_other_numbers_are_refused(threads: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        LLM("nowhere", threads=threads)  # type: ignore[arg-type]
    assert caught.value.field == "threads"


# Cores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "files", "expected"),
    [
        (2, {"own/cpu.max": "150000 100000\n"}, 2),
        (2, {"own/cpu.max": "100000 100000\n"}, 1),
        (2, {"own/cpu.max": "20000 100000\n"}, 1),
        (2, {"own/cpu.max": "max 100000\n"}, None),
        (2, {"own/cpu.max": "max 100000\n", "cpu.max": "100000 100000\n"}, 1),
        (2, {"own/cpu.max": "broken"}, None),
        (2, {}, None),
        (1, {"own/cpu.cfs_quota_us": "100000", "own/cpu.cfs_period_us": "100000"}, 1),
        (1, {"own/cpu.cfs_quota_us": "-1", "own/cpu.cfs_period_us": "100000"}, None),
        (1, {"own/cpu.cfs_quota_us": "100000", "own/cpu.cfs_period_us": "0"}, None),
    ],
)
def test_quotas_of_control_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    files: dict[str, str],
    expected: int | None,
) -> None:
    monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    process = tmp_path / "proc/self"
    process.mkdir(parents=True)
    name, kind, options = "0::", "cgroup2", "rw"
    if version == 1:
        name, kind, options = "3:cpu,cpuacct:", "cgroup", "rw,cpu,cpuacct"
    (process / "cgroup").write_text(f"{name}/own\n")
    (process / "mountinfo").write_text(f"30 23 0:26 / /sys/group rw - {kind} none {options}\n")
    for file, content in files.items():
        path = tmp_path / "sys/group" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert cpu_threads.usable_cores(tmp_path) == (expected or 6)
