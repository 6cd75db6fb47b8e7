"""Milliseconds per token of a single request, against the roofline and vLLM.

    python -m benchmarks.latency --model 0.6b [--repeat 3] [--peer FOLDER] [--profile trace.json]

Batch 1, greedy, 128 input tokens and 512 output tokens. "ms/token" is the time of ``generate``
divided by its tokens, as for the peer. "decode" subtracts a ``generate`` of one token, which is the
prefill. Without a GPU, ``--model tiny`` checks only that the script runs.
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
from benchmarks.job import Job, given, require_peer, run_job, write_json
from benchmarks.model_size import ModelSize
from benchmarks.peer import PeerError, PeerResult, measure_latency
from benchmarks.roofline import latency_roofline
from benchmarks.throughput import describe, host_line, show_profile
from benchmarks.workload import latency_workload, model_config


def main(
    model: options.Model = "0.6b",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=2)] = 512,
    repeat: options.Repeat = 3,
    transparent: options.Transparent = True,
    overlap: options.Overlap = None,
    compile: options.Compile = "auto",
    attention: options.Attention = "auto",
    quantization: options.Quantization = None,
    block_size: options.BlockSize = None,
    memory_utilization: options.MemoryUtilization = None,
    peer: options.Peer = None,
    peer_repeat: options.PeerRepeat = None,
    profile: options.Profile = None,
    json: options.Json = None,
) -> None:
    """Milliseconds per token at batch 1, against the roofline and, with --peer, vLLM."""
    require_peer(peer, model)
    settings = given(
        transparent=transparent,
        overlap=overlap,
        compile=compile,
        attention=attention,
        quantization=quantization,
        block_size=block_size,
        memory_utilization=memory_utilization,
    )
    card = card_rates()
    job = Job(
        "latency",
        model,
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=output_tokens,
        repeat=repeat,
        settings=settings,
        profile=str(profile.resolve()) if profile else None,
    )
    result = run_job(job)
    write_json(json, {"pagespec": result})
    their = None
    if peer is not None:
        try:
            their = measure_latency(
                peer, model, prompt_tokens, output_tokens, peer_repeat or repeat
            )
        except PeerError as error:
            typer.echo(f"no peer: {error}", err=True)
        else:
            write_json(json, {"pagespec": result, "peer": asdict(their)})
    show(job, result, their, card)
    if peer is not None and their is None:
        raise typer.Exit(1)


def per_token(
    total_s: list[float], one_token_s: list[float], num_outputs: int
) -> list[list[float]]:
    """Milliseconds per token of each run: over all tokens, and over those after the first."""
    return [
        [total / num_outputs * 1e3 for total in total_s],
        [
            (total - one) / (num_outputs - 1) * 1e3
            for total, one in zip(total_s, one_token_s, strict=True)
        ],
    ]


def show(job: Job, result: dict[str, Any], their: PeerResult | None, card: CardRates) -> None:
    workload = latency_workload(job.num_prompt_tokens, job.num_output_tokens)
    roofline = latency_roofline(workload, ModelSize.from_config(model_config(job.model)), card)
    roofline_ms = roofline.weights_s * 1e3
    typer.echo(describe(job.model, result, their))
    typer.echo(
        f"\n{'batch 1':<10} {'median (min..max)':>24} {'roofline':>8} {'of it':>6} "
        f"{'peer median (min..max)':>24} {'peer / ours':>11}"
    )
    ours = per_token(result["total_s"], result["one_token_s"], job.num_output_tokens)
    peers = their and per_token(their.total_s, their.one_token_s, job.num_output_tokens)
    for i, name in enumerate(("ms/token", "decode")):
        median = statistics.median(ours[i])
        row = f"{name:<10} {spread(ours[i]):>24} {roofline_ms:>8.3f} {roofline_ms / median:>6.1%}"
        if peers:
            row += f" {spread(peers[i]):>24} {statistics.median(peers[i]) / median:>11.2f}"
        typer.echo(row)
    first_ms = [s * 1e3 for s in result["one_token_s"]]
    typer.echo(f"{'1 token':<10} {spread(first_ms):>24}")
    typer.echo(f"\nroofline at {card}: {roofline}")
    typer.echo(host_line(result["host_ms_per_step"]))
    show_profile(result)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


if __name__ == "__main__":
    typer.run(main)
