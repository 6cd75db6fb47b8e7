"""Runs test files of vLLM, each in a process of its own, and reads their records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FILE_S = 1800
TEST_S = 480

# The sizes of its tests of batch invariance, which read them from the environment.
_SIZES = {
    "VLLM_NEEDLE_TRIALS": "3",
    "VLLM_NEEDLE_BATCH_SIZE": "16",
    "VLLM_MIN_PROMPT": "64",
    "VLLM_MAX_PROMPT": "256",
}

_running: set[subprocess.Popen[bytes]] = set()


def environment(stage: Path, **more: str) -> dict[str, str]:
    """The environment of a process that runs in ``stage``."""
    # Tests hold the key of each client, and need no network.
    paths = [str(stage), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    absolute = [str((REPOSITORY / path).resolve()) for path in paths if path]
    own = {"PYTHONPATH": os.pathsep.join(absolute), "HF_HUB_OFFLINE": "1"}
    return dict(os.environ) | _SIZES | own | more


def run_file(stage: Path, name: str, records: Path) -> list[Mapping[str, Any]]:
    """Run one file.

    Returns:
        Its record, as :mod:`.plugin` describes it. A process that ends early adds an entry for the
        file itself.
    """
    record = record_of(records, name)
    for old in (record, record.with_suffix(".flags")):
        old.unlink(missing_ok=True)
    log = record.with_suffix(".log")
    flags = ("-q", "-p", "no:cacheprovider", "-p", "peer_harness.plugin", f"--timeout={TEST_S}")
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", *flags, name]
    begin = time.monotonic()
    code = run_to_end(command, stage, log, FILE_S, PEER_RECORD=str(record))
    if code not in (0, 1, 2, 5):
        seconds = round(time.monotonic() - begin, 1)
        how = "did not end" if code is None else f"ended with {code}"
        reason = f"the process {how} after {seconds} s"
        with record.open("a") as file:
            entry = {"id": name, "outcome": "failed", "reason": reason, "seconds": 0.0}
            file.write(json.dumps(entry) + "\n")
    return read_record(record)


def run_to_end(
    command: list[str], stage: Path, log: Path, limit_s: float, **environment_too: str
) -> int | None:
    """The exit code of a command in ``stage``; None if it did not end in time.

    Servers that it starts belong to its session, and end with it.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=stage,
            env=environment(stage, **environment_too),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _running.add(process)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)
        _running.discard(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    except ProcessLookupError:
        pass
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_all() -> None:
    """End every process that runs; each ``run_to_end`` then returns."""
    for process in list(_running):
        _end(process)


def record_of(records: Path, name: str) -> Path:
    return records / (name.replace("/", "+") + ".jsonl")


def note_left_out(name: str) -> None:
    """Record an argument that pagespec refuses: a test of other things runs without it."""
    record = os.environ.get("PEER_RECORD")
    if record:
        with Path(record).with_suffix(".flags").open("a") as file:
            file.write(name + "\n")


def left_out(records: Path, names: list[str]) -> list[str]:
    """Arguments and flags that were refused and left out while these files ran."""
    paths = [record_of(records, name).with_suffix(".flags") for name in names]
    return sorted({flag for path in paths if path.exists() for flag in path.read_text().split()})


def read_record(path: Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
