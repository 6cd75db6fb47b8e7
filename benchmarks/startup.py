"""Seconds from the start of a process to its first token, with cold and with warm caches.

    python -m benchmarks.startup --model 0.6b [--repeat 3] [--peer FOLDER] [--json out.json]

Every start is a fresh process that makes an engine and one token of a prompt of 128. The first one
finds its caches (Inductor's, Triton's, pagespec's, the driver's) in an empty folder, the others
find them as the first left them. The operating system's file cache is warm throughout. Modules are
compiled to bytecode as Python does it by itself: once, wherever the bytecode beside them is missing
or stale, by the first process.

vLLM has two figures: the start of its engine, without interpreter and imports, as it says itself;
and seconds from the start of its process to the line with its first result, for which it makes some
30 tokens more than the first one (about 0.05 s at its 1.5 ms a token on an H100).
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from benchmarks import job as options
from benchmarks.job import Job, given, require_peer, run_job, write_json
from benchmarks.peer import KEPT_BYTECODE, PeerError, measure_start


def main(
    model: options.Model = "0.6b",
    repeat: options.Repeat = 3,
    transparent: options.Transparent = True,
    overlap: options.Overlap = None,
    compile: options.Compile = "auto",
    attention: options.Attention = "auto",
    max_num_seqs: options.MaxNumSeqs = 256,
    memory_utilization: options.MemoryUtilization = None,
    peer: options.Peer = None,
    json: options.Json = None,
) -> None:
    """Seconds to the first token, cold (once) and warm (--repeat times)."""
    require_peer(peer, model)
    settings = given(
        transparent=transparent,
        overlap=overlap,
        compile=compile,
        attention=attention,
        max_num_seqs=max_num_seqs,
        memory_utilization=memory_utilization,
    )
    job = Job("startup", model, settings=settings)
    with tempfile.TemporaryDirectory(prefix="pagespec-startup-") as folder:
        runs = [run_job(job, cache_environment(Path(folder))) for _ in range(1 + repeat)]
    result: dict[str, Any] = {"pagespec": runs}
    write_json(json, result)
    show(model, runs)
    if peer is not None:
        try:
            with tempfile.TemporaryDirectory(prefix="vllm-startup-") as folder:
                starts = [measure_start(peer, model, Path(folder)) for _ in range(2)]
        except PeerError as error:
            typer.echo(f"no peer: {error}", err=True)
            raise typer.Exit(1) from error
        write_json(json, result | {"peer": [asdict(start) for start in starts]})
        cold, warm = starts
        typer.echo(
            f"peer: {cold.version}, seconds cold and warm: process start to first result "
            f"{cold.first_result_s[0]:.1f} and {warm.first_result_s[0]:.1f}, engine start alone "
            f"{cold.start_s[0]:.1f} and {warm.start_s[0]:.1f}"
        )


def cache_environment(folder: Path) -> dict[str, str]:
    """Where compilers and pagespec keep what they have made: under ``folder``; Python's own beside
    the modules."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PAGESPEC_CACHE", "CUDA_CACHE_PATH")
    return {name: str(folder / name.lower()) for name in names} | KEPT_BYTECODE


def phases(run: dict[str, Any]) -> dict[str, float]:
    """Seconds of a start by what they went to; they add up to the last entry."""
    begin, imported, ready, first = (
        run[name] for name in ("process_begin", "imported", "engine_ready", "first_token")
    )
    known = dict(run["stats"]["startup_s"])
    return {
        "interpreter and imports": imported - begin,
        **known,
        "rest of the engine's start": ready - imported - sum(known.values()),
        "first token": first - ready,
        "process start to first token": first - begin,
    }


def show(model: str, runs: list[dict[str, Any]]) -> None:
    cold = phases(runs[0])
    warm = [phases(run) for run in runs[1:]]
    stats, last = runs[0]["stats"], runs[-1]["stats"]
    typer.echo(
        f"Qwen3 {model}, random weights; GPU {runs[0]['gpu']}, torch {runs[0]['torch']}, "
        f"triton {runs[0]['triton']}"
    )
    typer.echo(
        f"captures, kernels compiled or loaded, CUDA graphs: cold {stats['num_captures']}, "
        f"{stats['num_compilations']}, {stats['num_graphs']}; warm {last['num_captures']}, "
        f"{last['num_compilations']}, {last['num_graphs']}"
    )
    typer.echo(f"\n{'seconds':<29} {'cold':>7} {'warm (min..max)':>24}")
    for name, seconds in cold.items():
        values = [run[name] for run in warm]
        spread = f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"
        typer.echo(f"{name:<29} {seconds:>7.2f} {spread:>24}")


if __name__ == "__main__":
    typer.run(main)
