"""The HTTP server compared with offline ``generate`` and with ``vllm serve``: rates and latencies.

    python -m benchmarks.serving --model 0.6b [--repeat 3] [--seconds 20] [--peer SITE]
        [--peer-only] [--json out.json]

Random weights in their real shapes. Offline, one process calls ``generate`` with the workload. Then
a server is started as users start it. Clients in other processes send it the workload at once, not
streamed and streamed. After that ``--streams`` clients stream without pauses for ``--seconds``,
with prompts of 128 to 512 tokens and answers of 128 to 256. Both engines have the same tokenizer,
in which every token has text. ``SITE`` is the folder where vLLM 0.26.0 and the requirements of its
server are installed (``pip install --target``). Without a GPU, ``--model tiny --workload tiny
--streams 8 --seconds 2`` checks only that the script runs.

TTFT, time to first token: from opening the connection to the first chunk with text. ITL,
inter-token latency: between two arrivals of text; one arrival may bring several tokens. TPOT, time
per output token: for each request, from its first arrival to its last, divided by its number of
tokens minus one.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --model tiny runs on a CPU")  # before torch is imported

import math
import os
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import job as options
from benchmarks.http_load import AtOnce, ClosedLoop, Loaded, LoadError, run_load
from benchmarks.http_server import (
    MODEL,
    Engine,
    Server,
    ServerError,
    pagespec_engine,
    running,
    vllm_engine,
    write_tokenizer,
)
from benchmarks.job import Job, run_job, write_json
from benchmarks.workload import LOADS, Workload, make_workload, model_config, model_folder

# Lengths of prompts and answers of the clients without pauses.
_LENGTHS = {"nano": ((128, 512), (128, 256)), "tiny": ((8, 32), (8, 32))}
_PERCENTILES = (50, 99)
# The fraction of the clients' time, and its maximum, in which they get out of step.
_RAMP, _RAMP_S = 0.2, 3.0
_WARM_UP = ClosedLoop(32, 0.5, (16, 32), (8, 16), seed=1)
_MAX_CLIENTS = 8

Options = Annotated[
    list[str], typer.Option(help="More options of the server, as on a command line; repeatable.")
]


def main(
    model: options.Model = "0.6b",
    workload: Annotated[str, typer.Option(help=f"Of {', '.join(_LENGTHS)}.")] = "nano",
    repeat: options.Repeat = 3,
    streams: Annotated[int, typer.Option(min=1, help="Clients that do not pause.")] = 256,
    seconds: Annotated[float, typer.Option(min=1, help="How long they begin requests.")] = 20.0,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Client processes; default: half the cores, up to 8.")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline/--no-offline", help="Measure `generate`, too.")
    ] = True,
    peer: Annotated[
        Path | None, typer.Option(help="Folder where vLLM is installed; it is measured after us.")
    ] = None,
    peer_only: Annotated[bool, typer.Option("--peer-only", help="Measure vLLM alone.")] = False,
    server_option: Options = [],  # noqa: B006 - typer copies it
    peer_option: Options = [],  # noqa: B006
    start_limit: Annotated[
        float, typer.Option(help="Longest that a server may take to start, seconds.")
    ] = 240.0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the servers' logs.")] = None,
    json: options.Json = None,
) -> None:
    """Tokens per second and latencies over HTTP, compared with `generate` and vLLM."""
    if model not in options.MODELS or workload not in _LENGTHS:
        raise typer.BadParameter(f"--model: {options.MODELS}, --workload: {tuple(_LENGTHS)}")
    if peer is not None and not (peer / "vllm").is_dir():
        raise typer.BadParameter(f"--peer: no vllm in {peer}")
    if peer_only and peer is None:
        raise typer.BadParameter("--peer-only needs --peer")
    load = make_workload(workload)
    num_seqs = max(len(load.prompts), streams)
    max_model_len = LOADS[workload].max_model_len
    closed_loop = ClosedLoop(streams, seconds, *_LENGTHS[workload])
    num_clients = clients or min(_MAX_CLIENTS, max(1, len(os.sched_getaffinity(0)) // 2))
    results: dict[str, Any] = {}
    has_failed = False
    with model_folder(model) as folder, tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(folder, model_config(model)["vocab_size"])
        engines: list[Engine] = []
        settings = folder, num_seqs, max_model_len
        if not peer_only:
            engines.append(pagespec_engine(*settings, _split(server_option)))
        if peer is not None:
            engines.append(vllm_engine(peer, *settings, _split(peer_option)))
        if offline and not peer_only:
            results["offline"] = measure_offline(model, workload, repeat, *settings)
        for engine in engines:
            log = (logs or Path(scratch)) / f"{engine.name}.log"
            try:
                with running(engine, start_limit, log) as server:
                    found: dict[str, Any] = {
                        "machine": engine.machine(),
                        "version": server.version,
                        "start_s": server.start_s,
                        "loads": {},
                    }
                    results[engine.name] = found
                    for name, measured in measure(server, load, closed_loop, repeat, num_clients):
                        found["loads"][name] = measured
            except (ServerError, LoadError) as error:
                typer.echo(f"no {engine.name}: {error}", err=True)
                has_failed = True
            write_json(json, results)
    show(model, load, closed_loop, num_clients, results)
    if has_failed:
        raise typer.Exit(1)


def _split(lines: list[str]) -> list[str]:
    return [word for line in lines for word in shlex.split(line)]


def measure_offline(
    model: str, workload: str, repeat: int, folder: Path, num_seqs: int, max_model_len: int
) -> dict[str, Any]:
    """``generate`` with the same settings and tokenizer, in a separate process."""
    settings = {"max_num_seqs": num_seqs, "max_model_len": max_model_len}
    job = Job("throughput", model, [workload], repeat=repeat, settings=settings)
    result = run_job(job, folder=folder)
    seconds = result["workloads"][workload]["seconds"]
    num_tokens = make_workload(workload).num_output_tokens
    rates = [num_tokens / s for s in seconds]
    return {"start_s": result["start_s"], "loads": {"generate": {"rates": rates}}}


def measure(
    server: Server, load: Workload, closed_loop: ClosedLoop, repeat: int, num_clients: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each workload's name and measurements.

    Raises:
        LoadError: a request failed.
    """

    def run(load: AtOnce | ClosedLoop, *, is_streamed: bool) -> Loaded:
        return run_load(server.port, MODEL, load, num_clients, is_streamed=is_streamed)

    for is_streamed in (False, True):
        run(_WARM_UP, is_streamed=is_streamed)
    for name, is_streamed in (("at once, whole", False), ("at once, streamed", True)):
        runs = [run(AtOnce(load), is_streamed=is_streamed) for _ in range(repeat)]
        rates = [load.num_output_tokens / loaded.seconds for loaded in runs]
        yield name, {"rates": rates, **latencies(runs)}
    loaded = run(closed_loop, is_streamed=True)
    begin = min(_RAMP_S, _RAMP * closed_loop.seconds)
    rates = [rate_between(loaded, begin, closed_loop.seconds)]
    yield "without pause", {"rates": rates, **latencies([loaded], begin, closed_loop.seconds)}


def rate_between(loaded: Loaded, begin: float, end: float) -> float:
    """Tokens per second in that time; of each request the fraction of its chunks that arrived in
    it."""
    num_tokens = 0.0
    for answer in loaded.answers:
        num_chunks = sum(begin <= arrival < end for arrival in answer.arrivals)
        num_tokens += answer.num_tokens * num_chunks / len(answer.arrivals)
    return num_tokens / (end - begin)


def latencies(runs: list[Loaded], begin: float = 0.0, end: float = math.inf) -> dict[str, Any]:
    """Percentiles in milliseconds, of requests that began in that time and of gaps that ended in
    it."""
    answers = [answer for loaded in runs for answer in loaded.answers]
    streamed = [answer for answer in answers if answer.arrivals]
    begun = [answer for answer in streamed if begin <= answer.began < end]
    num_chunks = sum(len(answer.arrivals) for answer in streamed)
    return {
        "num_requests": len(answers),
        "client_share": max(loaded.client_share for loaded in runs),
        "tokens_per_chunk": sum(a.num_tokens for a in streamed) / num_chunks if streamed else None,
        "ttft_ms": percentiles([a.arrivals[0] - a.began for a in begun]),
        "itl_ms": percentiles([g for a in streamed for g in gaps(a.arrivals, begin, end)]),
        "tpot_ms": percentiles(
            [
                (a.arrivals[-1] - a.arrivals[0]) / (a.num_tokens - 1)
                for a in begun
                if a.num_tokens > 1
            ]
        ),
    }


def gaps(arrivals: Any, begin: float, end: float) -> Iterator[float]:
    """Seconds between arrivals; chunks from one read have one arrival."""
    for earlier, later in pairwise(arrivals):
        if later > earlier and begin <= later < end:
            yield later - earlier


def percentiles(seconds: list[float]) -> list[float] | None:
    """The nearest of the values, in milliseconds; None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return [ordered[round(last * percent / 100)] * 1e3 for percent in _PERCENTILES]


def show(
    model: str,
    load: Workload,
    closed_loop: ClosedLoop,
    num_clients: int,
    results: dict[str, Any],
) -> None:
    typer.echo(
        f"Qwen3 {model}, random weights; {load.name}: {len(load.prompts)} requests at once, "
        f"{load.num_prompt_tokens:,} tokens in, {load.num_output_tokens:,} out; without pause: "
        f"{closed_loop.num_streams} clients for {closed_loop.seconds:g} s, "
        f"{closed_loop.prompt[0]} to {closed_loop.prompt[1]} in, {closed_loop.output[0]} to "
        f"{closed_loop.output[1]} out; {num_clients} client processes"
    )
    for name, result in results.items():
        if "version" in result:
            typer.echo(
                f"{name} {result['version']}, {result['machine']}, server up after "
                f"{result['start_s']:.1f} s"
            )
    typer.echo(
        f"\n{'':<28} {'tok/s (min..max)':>24} {'TTFT p50/p99':>16} {'ITL p50/p99':>14} "
        f"{'TPOT p50/p99':>14} {'tok/chunk':>9} {'client':>6}"
    )
    for name, result in results.items():
        for label, measured in result["loads"].items():
            typer.echo(row(f"{name}, {label}", measured))
    typer.echo("\nms; client: what the busiest client process took of a core")
    for line in ratios(results):
        typer.echo(line)


def row(label: str, measured: dict[str, Any]) -> str:
    rates = measured["rates"]
    text = f"{statistics.median(rates):,.0f}"
    if len(rates) > 1:
        text += f" ({min(rates):,.0f}..{max(rates):,.0f})"
    line = f"{label:<28} {text:>24}"
    for name, width in (("ttft_ms", 16), ("itl_ms", 14), ("tpot_ms", 14)):
        pair = measured.get(name)
        cell = "-" if pair is None else f"{pair[0]:.1f}/{pair[1]:.1f}"
        line += f" {cell:>{width}}"
    chunk, share = measured.get("tokens_per_chunk"), measured.get("client_share")
    line += f" {'-' if chunk is None else f'{chunk:.2f}':>9}"
    return line + f" {'-' if share is None else f'{share:.0%}':>6}"


def ratios(results: dict[str, Any]) -> Iterator[str]:
    """Ratios of median rates: pagespec's to offline ``generate``, and to vLLM."""
    rates = {
        name: {label: statistics.median(m["rates"]) for label, m in result["loads"].items()}
        for name, result in results.items()
    }
    ours = rates.get("pagespec", {})
    for label, rate in ours.items():
        if "offline" in rates and label != "without pause":
            yield f"{label}: {rate / rates['offline']['generate']:.3f} of offline generate"
    for label, rate in ours.items():
        if label in rates.get("vLLM", {}):
            yield f"{label}: {rate / rates['vLLM'][label]:.2f} of vLLM's tokens per second"


if __name__ == "__main__":
    # On SIGTERM, also end the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    typer.run(main)
