"""vLLM, measured in separate processes with the scripts of a folder (``--peer``).

The folder has ``bench_vllm.py``, ``bench_more.py`` and ``site``, where vLLM is installed. Without
``site``, vLLM is installed there from the two parts of the kit (``install.py``), which must then be
in the folder as well. Caches are in ``FOLDER/cache``, so that a second start is warm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workload import Workload, make_workload, model_folder

PEER_MODELS = ("0.6b", "8b")
_BLOCK_SIZE = 16  # vLLM's own default
_TIMEOUT_S = 560
_GLANCE_S = 0.02  # between two checks of a process's output
# In the first line that bench_vllm.py prints about a measurement.
_FIRST_RUN = " run 0: "
# Python's default, whatever the setting of this process: bytecode that one process compiles is not
# compiled again by the next.
KEPT_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
# The headings under which bench_more.py prints its workloads.
_MORE = {"32 requests": "nano32", "1,024 requests": "1024", "32 x 8,192 in, 256 out": "long"}
_MORE_LINE = re.compile(
    r"^\[vllm (?P<tag>.+)\] (?P<inputs>\d+) in, (?P<outputs>\d+) out, (?P<seconds>[\d.]+) s, "
    r"\d+ tok/s$"
)


class PeerError(RuntimeError):
    """The peer is missing, failed, or did something other than requested."""


@dataclass
class PeerResult:
    """The measurements reported by the peer's processes.

    Attributes:
        version: vLLM's and torch's, if reported.
        seconds: of each repetition, by workload.
        total_s, one_token_s: of each repetition of the latency run.
        kv_tokens: KV slots that fit with its default share of memory; None if not reported.
        start_s: seconds that its engine took to start, per process.
        first_result_s: seconds from the start of a process to the line with its first result, some
            30 tokens after its first one; only from :func:`measure_start`.
    """

    version: str = "vLLM"
    seconds: dict[str, list[float]] = field(default_factory=dict)
    total_s: list[float] = field(default_factory=list)
    one_token_s: list[float] = field(default_factory=list)
    kv_tokens: int | None = None
    start_s: list[float] = field(default_factory=list)
    first_result_s: list[float] = field(default_factory=list)


def read_bench(line: str, into: PeerResult) -> None:
    """Add the result of ``bench_vllm.py --json`` for one run (one JSON line)."""
    row: dict[str, Any] = json.loads(line)
    into.version = f"vLLM {row['version']}, torch {row['torch']}"
    into.start_s.append(row["engine_start_s"])
    if row.get("num_gpu_blocks"):
        into.kv_tokens = row["num_gpu_blocks"] * _BLOCK_SIZE
    if "throughput" in row:
        into.seconds.setdefault("nano", []).extend(run["s"] for run in row["throughput"])
    for run in row.get("latency", ()):
        into.total_s.append(run["total_s"])
        into.one_token_s.append(run["one_token_s"])


def read_more(text: str, workloads: dict[str, Workload], into: PeerResult) -> None:
    """Add the lines that ``bench_more.py`` printed for ``workloads``, one or more for each.

    Raises:
        PeerError: a workload is missing, or its token counts differ from pagespec's.
    """
    found: dict[str, list[tuple[list[int], float]]] = {}
    for line in text.splitlines():
        match = _MORE_LINE.match(line)
        if match and match["tag"] in _MORE:
            counts = [int(match["inputs"]), int(match["outputs"])]
            found.setdefault(_MORE[match["tag"]], []).append((counts, float(match["seconds"])))
    for name, workload in workloads.items():
        if name not in found:
            raise PeerError(f"bench_more.py printed no line for {name}")
        ours = [workload.num_prompt_tokens, workload.num_output_tokens]
        for counts, seconds in found[name]:
            if counts != ours:
                raise PeerError(f"{name}: the peer ran {counts} tokens in and out, we ran {ours}")
            into.seconds.setdefault(name, []).append(seconds)


def require_kit(folder: Path, model: str, names: list[str] | None = None) -> None:
    """Check before a long measurement that the peer can run it.

    Args:
        names: the workloads; the peer must support at least one.

    Raises:
        PeerError: it does not support the model or the workloads, or the kit is not in the folder.
    """
    known = ("nano", *_MORE.values())
    if model not in PEER_MODELS:
        raise PeerError(f"the peer supports {' and '.join(PEER_MODELS)}, not {model}")
    if names is not None and not set(names) & set(known):
        raise PeerError(f"the peer supports {', '.join(known)}, not {', '.join(names)}")
    needed = ["bench_vllm.py", "bench_more.py"]
    if not (folder / "site" / "vllm").is_dir():
        needed += ["install.py", "core.tar.xz.00", "core.tar.xz.01"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise PeerError(f"{folder} is not the folder of the vLLM kit: no {', '.join(missing)}")


def measure_throughput(folder: Path, model: str, names: list[str], repeat: int) -> PeerResult:
    """Run each of ``names`` that the peer supports ``repeat`` times. One process repeats "nano";
    the others run once per process, all together.

    Raises:
        PeerError: see that class.
    """
    result = PeerResult()
    if "nano" in names:
        _run_bench(folder, model, ["--mode", "throughput", "--repeat", str(repeat)], result)
    _run_others(folder, model, names, repeat, result)
    return result


def measure_latency(
    folder: Path, model: str, num_prompt_tokens: int, num_output_tokens: int, repeat: int
) -> PeerResult:
    """One request at a time.

    Raises:
        PeerError: see that class.
    """
    result = PeerResult()
    arguments = ["--mode", "latency", "--repeat", str(repeat)]
    arguments += ["--prompt-tokens", str(num_prompt_tokens)]
    arguments += ["--output-tokens", str(num_output_tokens)]
    _run_bench(folder, model, arguments, result)
    return result


def measure_comparison(
    folder: Path, model: str, names: list[str], repeat: int, is_batch_invariant: bool
) -> PeerResult:
    """Run nano and batch 1 in one process, ``repeat`` times each; and the other supported ``names``
    in another process, once.

    Raises:
        PeerError: see that class.
    """
    result = PeerResult()
    arguments = ["--mode", "both", "--repeat", str(repeat)]
    _run_bench(folder, model, arguments + ["--batch-invariant"] * is_batch_invariant, result)
    if model == "0.6b" and not is_batch_invariant:  # the model of bench_more.py
        _run_others(folder, model, names, 1, result)
    return result


def measure_start(folder: Path, model: str, cache: Path) -> PeerResult:
    """Start an engine with its caches in ``cache``, which generates a few tokens for a prompt of
    128 and ends.

    Raises:
        PeerError: see that class.
    """
    result = PeerResult()
    arguments = ["--mode", "latency", "--repeat", "1", "--output-tokens", "2"]
    seconds = _run_bench(folder, model, arguments, result, cache)
    if seconds is None:
        raise PeerError("bench_vllm.py printed no line for its run")
    result.first_result_s.append(seconds)
    return result


def _run_others(folder: Path, model: str, names: list[str], repeat: int, into: PeerResult) -> None:
    """Run those of ``names`` that bench_more.py supports, in ``repeat`` processes."""
    more = {name: make_workload(name) for name in names if name in _MORE.values()}
    if not more:
        return
    with model_folder(model) as config_folder:
        for _ in range(repeat):
            read_more(_run(folder, "bench_more.py", [str(config_folder)])[0], more, into)


def _run_bench(
    folder: Path, model: str, arguments: list[str], into: PeerResult, cache: Path | None = None
) -> float | None:
    """Return the seconds until the first result was printed."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "result.json"
        arguments = ["--model", model, *arguments, "--json", str(output)]
        _, seconds = _run(folder, "bench_vllm.py", arguments, cache)
        read_bench(output.read_text().splitlines()[-1], into)
    return seconds


def _run(
    folder: Path, script: str, arguments: list[str], cache: Path | None = None
) -> tuple[str, float | None]:
    """Run a script of the kit; returns its output, and the seconds until a line of a first run."""
    folder = folder.resolve()
    site = folder / "site"
    if not (site / "vllm").is_dir():
        checked([sys.executable, str(folder / "install.py"), str(folder), str(site)], {})
    cache = cache or folder / "cache"
    environment = {
        "PYTHONPATH": str(site),
        "PYTHONUNBUFFERED": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        **KEPT_BYTECODE,
    }
    return checked([sys.executable, str(folder / script), *arguments], environment, _FIRST_RUN)


def checked(
    command: list[str], environment: dict[str, str], mark: str | None = None
) -> tuple[str, float | None]:
    """Run a command to its end.

    Args:
        environment: variables added to this process's own.

    Returns:
        Its output, and the seconds from its start until ``mark`` was printed, if it was.

    Raises:
        PeerError: it failed or took too long; with the end of its output.
    """
    # Output goes to files: a pipe that a grandchild keeps open would outlast the time limit.
    with tempfile.TemporaryFile() as output:
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        printed, seconds = b"", None
        status: int | str | None = None
        while status is None:
            status = process.poll()
            # The process writes at the file's position, which pread does not change.
            while part := os.pread(output.fileno(), 1 << 20, len(printed)):
                printed += part
            now = time.monotonic() - begin
            if seconds is None and mark is not None and mark.encode() in printed:
                seconds = now
            if status is None and now > _TIMEOUT_S:
                process.kill()
                process.wait()
                status = f"no result within {_TIMEOUT_S} s"
            time.sleep(_GLANCE_S if status is None else 0)
    text = printed.decode(errors="replace")
    if status != 0:
        tail = "\n".join(text.splitlines()[-30:])
        raise PeerError(f"{' '.join(command[:2])}: {status}\n{tail}")
    return text, seconds
