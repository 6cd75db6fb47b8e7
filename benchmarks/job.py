"""A measurement that runs in a separate process. When that process has ended, the GPU is free
again, and the peer finds it as pagespec found it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.peer import PeerError, require_kit
from benchmarks.workload import MODELS, model_folder

ROOT = Path(__file__).resolve().parent.parent

# Options that the benchmarks share.
Model = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(MODELS)}: Qwen3 with random weights; tiny is for trials on a CPU."
    ),
]
Repeat = Annotated[int, typer.Option(min=1, help="Timed runs; medians are shown.")]
Transparent = Annotated[
    bool,
    typer.Option("--transparent/--no-transparent", help="Bits independent of the schedule."),
]
Overlap = Annotated[
    bool | None, typer.Option("--overlap/--no-overlap", help="Default: the engine's choice.")
]
Compile = Annotated[str, typer.Option(help="auto, graph, inductor or eager.")]
Attention = Annotated[str, typer.Option(help="auto, triton, flash or reference.")]
Quantization = Annotated[
    str | None, typer.Option(help='"fp8": linear layers are made FP8. Default: as they are.')
]
BlockSize = Annotated[int | None, typer.Option(help="Default: the engine's.")]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Default: the requests of the largest workload, 512 at most.")
]
KvCacheDtype = Annotated[str, typer.Option(help="auto or fp8.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Default: the engine's.")]
MemoryUtilization = Annotated[
    float | None, typer.Option(help="Default on a GPU: 0.9, as the peer's.")
]
Peer = Annotated[
    Path | None,
    typer.Option(help="Folder of the vLLM kit (see benchmarks/peer.py); it is measured after us."),
]
PeerRepeat = Annotated[int | None, typer.Option(min=1, help="Timed runs of the peer.")]
Json = Annotated[Path | None, typer.Option(help="Write everything measured to this file.")]
Profile = Annotated[
    Path | None,
    typer.Option(help="Profile 20 decode steps; the chrome trace goes to this file."),
]


@dataclass(frozen=True)
class Job:
    """One engine and the measurements to make with it.

    Attributes:
        kind: "throughput", "latency", "startup" or "tracing".
        model: a name of ``benchmarks.workload.MODELS``.
        workloads: names of ``benchmarks.workload.WORKLOADS``; for throughput and tracing.
        num_prompt_tokens, num_output_tokens: of the single request of "latency" and "startup".
        settings: keyword arguments of ``LLM``.
        profile: file of the Chrome trace, or None for no profile.
        with_latency: for throughput: also measure what "latency" measures, with the same engine.
        with_orders: for throughput: whether to check that the first workload gives the same tokens
            in another order of arrival.
    """

    kind: str
    model: str
    workloads: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 128
    num_output_tokens: int = 512
    repeat: int = 3
    settings: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    with_latency: bool = False
    with_orders: bool = False


def given(**settings: Any) -> dict[str, Any]:
    """The settings that are not None; the engine's defaults apply to the others."""
    return {name: value for name, value in settings.items() if value is not None}


def require_peer(folder: Path | None, model: str, workloads: list[str] | None = None) -> None:
    """Raise typer.BadParameter, before anything is measured, if the peer could not run."""
    if folder is not None:
        try:
            require_kit(folder, model, workloads)
        except PeerError as error:
            raise typer.BadParameter(f"--peer: {error}") from error


def run_job(
    job: Job, environment: dict[str, str] | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Run ``job`` in a new process; returns its result, as written by ``benchmarks.worker``.

    Args:
        environment: variables added to this process's own.
        folder: the model's folder or file; None creates one with only its ``config.json``.

    Raises:
        typer.BadParameter: the model is unknown, and no folder is given.
        typer.Exit: the process failed; it printed the reason.
    """
    if folder is None and job.model not in MODELS:
        raise typer.BadParameter(f"--model must be one of {', '.join(MODELS)}, not {job.model}")
    made = model_folder(job.model) if folder is None else nullcontext(folder)
    with tempfile.TemporaryDirectory() as scratch, made as model:
        output = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "benchmarks.worker", str(model), str(output)]
        begin = time.monotonic()
        process = subprocess.run(
            command,
            input=json.dumps(asdict(job)),
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            check=False,
        )
        if process.returncode != 0:
            typer.echo(f"the measuring process ended with {process.returncode}", err=True)
            raise typer.Exit(1)
        result: dict[str, Any] = json.loads(output.read_text())
    result["process_begin"] = begin
    return result


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")
