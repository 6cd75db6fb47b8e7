"""How many threads an engine on a CPU computes with: given, or the quickest of a trial."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagespec import LLM, InvalidInputError
from pagespec.runner import cpu_threads
from tests.support.models import save_word_model

clear = cpu_threads.quickest.cache_clear


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    clear()
    yield
    torch.set_num_threads(before)
    clear()


def chosen(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], given: int, cores: int
) -> int:
    torch.set_num_threads(given)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: cores)
    monkeypatch.setattr(cpu_threads, "measured", seconds.__getitem__)
    cpu_threads.use_threads(None)
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("seconds", "given", "cores", "expected"),
    [
        ({2: 1.0, 1: 1.9}, 2, 2, 2),
        ({2: 10.0, 1: 1.8}, 2, 2, 1),  # another process holds a core
        ({2: 1.0, 1: 1.0}, 2, 2, 2),
        ({8: 3.0, 4: 0.5, 2: 1.0, 1: 2.0}, 8, 8, 4),
        ({3: 1.0, 1: 2.0}, 8, 3, 3),  # a quota of three cores
        ({1: 2.0}, 8, 1, 1),
        ({1: 2.0}, 1, 8, 1),  # as OMP_NUM_THREADS says
    ],
)
def test_the_quickest_number_is_used_and_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: dict[int, float],
    given: int,
    cores: int,
    expected: int,
) -> None:
    caplog.set_level(logging.WARNING, "pagespec")
    assert chosen(monkeypatch, seconds, given, cores) == expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (expected < given)
    if said:
        assert said[0].startswith(f"CPU threads: {expected}, where torch would use {given} ")


def test_one_trial_serves_all_engines_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits may follow the number of threads, so that it stays."""
    assert chosen(monkeypatch, {2: 10.0, 1: 1.8}, 2, 2) == 1
    monkeypatch.setattr(cpu_threads, "measured", {2: 1.0, 1: 1.8}.__getitem__)
    cpu_threads.use_threads(None)
    assert torch.get_num_threads() == 1


def test_a_trial_measures_and_leaves_the_number_as_it_was() -> None:
    torch.set_num_threads(2)
    assert cpu_threads.measured(1) > 0
    torch.set_num_threads(2)
    assert cpu_threads.quickest() in (1, 2)
    assert torch.get_num_threads() == 2


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


def test_threads_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> int:
        raise AssertionError("no trial")

    monkeypatch.setattr(cpu_threads, "quickest", never)
    folder = save_word_model(tmp_path)
    LLM(folder, device="cpu", num_blocks=4, threads=1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2", 1 << 40])
def test_other_numbers_are_refused(threads: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        LLM("nowhere", threads=threads)  # type: ignore[arg-type]
    assert caught.value.field == "threads"
