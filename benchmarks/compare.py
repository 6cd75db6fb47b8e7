"""Compare pagespec and vLLM for one model in one session on one GPU, in one table: pagespec with
and without schedule transparency, and vLLM with and without its batch-invariant mode.

    python -m benchmarks.compare --model 0.6b --workload nano --workload nano32 --peer FOLDER
        [--repeat 3] [--peer-batch-invariant] [--profile trace.json] [--json out.json]

Each column runs in its own process. The process runs all workloads and batch 1 (128 input tokens,
512 output tokens, greedy). The first workload runs a second time with its requests in another order
of arrival, and the tokens of each request are compared. Without a GPU, ``--model tiny --workload
tiny`` checks only that the script runs.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --model tiny runs on a CPU")  # before torch is imported

import statistics
from dataclasses import asdict
from typing import Annotated, Any

import typer

from benchmarks import job as options
from benchmarks.card import CardRates, card_rates
from benchmarks.job import Job, require_peer, run_job, write_json
from benchmarks.latency import per_token
from benchmarks.model_size import ModelSize
from benchmarks.peer import PeerError, PeerResult, measure_comparison
from benchmarks.roofline import latency_roofline, throughput_roofline
from benchmarks.throughput import Names, describe, host_line, require_workloads, show_profile
from benchmarks.workload import latency_workload, make_workload, model_config

NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 128, 512


def main(
    model: options.Model = "0.6b",
    workload: Names = ["nano"],  # noqa: B006 - typer copies it
    repeat: options.Repeat = 3,
    free: Annotated[
        bool, typer.Option("--free/--no-free", help="Add a column with transparent=False.")
    ] = True,
    orders: Annotated[
        bool, typer.Option("--orders/--no-orders", help="Run the first workload in two orders.")
    ] = True,
    peer: options.Peer = None,
    peer_repeat: options.PeerRepeat = None,
    peer_others: Annotated[
        bool,
        typer.Option(
            "--peer-others/--no-peer-others", help="The peer runs all workloads, not only nano."
        ),
    ] = True,
    peer_batch_invariant: Annotated[
        bool, typer.Option(help="Add a column: vLLM in its batch-invariant mode.")
    ] = False,
    profile: options.Profile = None,
    json: options.Json = None,
) -> None:
    """Measure throughput and latency, transparent or not, against the roofline and vLLM."""
    require_workloads(workload)
    require_peer(peer, model, workload)
    card = card_rates()
    ours: dict[str, dict[str, Any]] = {}
    for name, is_transparent in (("pagespec", True), ("not transparent", False)):
        if is_transparent or free:
            job = Job(
                "throughput",
                model,
                workload if is_transparent else workload[:1],
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                num_output_tokens=NUM_OUTPUT_TOKENS,
                repeat=repeat,
                settings={"transparent": is_transparent},
                profile=str(profile.resolve()) if profile and is_transparent else None,
                with_latency=True,
                with_orders=orders and is_transparent,
            )
            ours[name] = run_job(job)
            write_json(json, ours)
    theirs: dict[str, PeerResult] = {}
    for name, is_invariant in (("vLLM", False), ("vLLM invariant", True)):
        if peer is not None and (peer_batch_invariant or not is_invariant):
            try:
                theirs[name] = measure_comparison(
                    peer,
                    model,
                    workload if peer_others else ["nano"],
                    peer_repeat or repeat,
                    is_invariant,
                )
            except PeerError as error:
                typer.echo(f"no {name}: {error}", err=True)
            write_json(json, ours | {name: asdict(their) for name, their in theirs.items()})
    typer.echo(describe(model, ours["pagespec"], theirs.get("vLLM")))
    table(model, workload, ours, theirs, card)
    for name, result in ours.items():
        if "orders" in result:
            typer.echo(f"{name}, the first workload in two orders of arrival: {result['orders']}")
        for load, measured in result["workloads"].items():
            typer.echo(f"{name}, {load}: {host_line(measured['host_ms_per_step'])}")
    show_profile(ours["pagespec"])
    if peer is not None and len(theirs) < 1 + peer_batch_invariant:
        raise typer.Exit(1)


def table(
    model: str,
    workload: list[str],
    ours: dict[str, dict[str, Any]],
    theirs: dict[str, PeerResult],
    card: CardRates,
) -> None:
    """Print medians with minimum and maximum. A ratio above 1 means that pagespec is faster."""
    size = ModelSize.from_config(model_config(model))
    columns = [*ours, *theirs]
    heads = f"\n{'':<16} {'roofline':>9} {'of it':>6}"
    typer.echo(heads + "".join(f" {c:>30}" for c in columns))
    for name in workload:
        load = make_workload(name)
        roofline = throughput_roofline(load, size, card).tokens_per_second
        runs = {c: r["workloads"].get(name, {}).get("seconds", []) for c, r in ours.items()}
        runs |= {c: r.seconds.get(name, []) for c, r in theirs.items()}
        rates = {c: [load.num_output_tokens / s for s in seconds] for c, seconds in runs.items()}
        typer.echo(row(f"{name}, tok/s", roofline, rates, columns, is_rate=True))
    single = latency_workload(NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS)
    roofline_ms = latency_roofline(single, size, card).weights_s * 1e3
    times = {c: (r["total_s"], r["one_token_s"]) for c, r in ours.items()}
    times |= {c: (r.total_s, r.one_token_s) for c, r in theirs.items()}
    a_token = {c: per_token(*t, NUM_OUTPUT_TOKENS)[0] for c, t in times.items()}
    typer.echo(row("batch 1, ms", roofline_ms, a_token, columns, is_rate=False))
    first = {c: [s * 1e3 for s in t[1]] for c, t in times.items()}
    typer.echo(row("first token, ms", None, first, columns, is_rate=False))
    starts = {c: [r["start_s"]] for c, r in ours.items()}
    starts |= {c: r.start_s[:1] for c, r in theirs.items()}
    typer.echo(row("engine start, s", None, starts, columns, is_rate=False))
    fit = {c: r["kv_tokens"] for c, r in ours.items()} | {c: r.kv_tokens for c, r in theirs.items()}
    typer.echo(f"KV tokens that fit: {fit}\nroofline at {card}")


def row(
    label: str,
    roofline: float | None,
    values: dict[str, list[float]],
    columns: list[str],
    *,
    is_rate: bool,
) -> str:
    """One line of the table. Each other column has the ratio to pagespec's median."""
    digits = 0 if is_rate else 3
    mine = statistics.median(values["pagespec"])
    text = f"{label:<16} " + (f"{roofline:>9,.{digits}f}" if roofline else " " * 9)
    fraction = (mine / roofline if is_rate else roofline / mine) if roofline else None
    text += f" {fraction:>6.1%}" if fraction else " " * 7
    for column in columns:
        runs = values.get(column)
        if not runs:
            text += f" {'-':>30}"
            continue
        median = statistics.median(runs)
        cell = f"{median:,.{digits}f} ({min(runs):,.{digits}f}..{max(runs):,.{digits}f})"
        if column != "pagespec":
            cell += f" {mine / median if is_rate else median / mine:.2f}x"
        text += f" {cell:>30}"
    return text


if __name__ == "__main__":
    typer.run(main)
