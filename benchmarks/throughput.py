"""Output tokens per second of whole workloads, against the roofline and vLLM.

    python -m benchmarks.throughput --model 0.6b --workload nano [--workload nano32 ...]
        [--repeat 3] [--peer FOLDER] [--profile trace.json] [--json out.json]

The model has random weights in its real shapes. All requests arrive at once, use temperature 0.6
and ignore end-of-sequence tokens: each generates its full number of output tokens. The measured
time is that of the ``generate`` call. pagespec and then vLLM run on the same GPU, each in its own
process. Without a GPU, ``--model tiny --workload tiny`` checks only that the script runs.
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
from benchmarks.peer import PeerError, PeerResult, measure_throughput
from benchmarks.roofline import Roofline, throughput_roofline
from benchmarks.workload import WORKLOADS, make_workload, model_config

Names = Annotated[
    list[str], typer.Option("--workload", help=f"Repeatable; of {', '.join(WORKLOADS)}.")
]


def main(
    model: options.Model = "0.6b",
    workload: Names = ["nano"],  # noqa: B006 - typer copies it
    repeat: options.Repeat = 3,
    transparent: options.Transparent = True,
    overlap: options.Overlap = None,
    compile: options.Compile = "auto",
    attention: options.Attention = "auto",
    quantization: options.Quantization = None,
    block_size: options.BlockSize = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    memory_utilization: options.MemoryUtilization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    peer: options.Peer = None,
    peer_repeat: options.PeerRepeat = None,
    profile: options.Profile = None,
    json: options.Json = None,
) -> None:
    """Output tokens per second, against the roofline and, with --peer, vLLM."""
    require_workloads(workload)
    require_peer(peer, model, workload)
    settings = given(
        transparent=transparent,
        overlap=overlap,
        compile=compile,
        attention=attention,
        quantization=quantization,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_utilization=memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
    )
    card = card_rates()
    result = run_job(
        Job(
            "throughput",
            model,
            workload,
            repeat=repeat,
            settings=settings,
            profile=str(profile.resolve()) if profile else None,
        )
    )
    write_json(json, {"pagespec": result})
    their = None
    if peer is not None:
        try:
            their = measure_throughput(peer, model, workload, peer_repeat or repeat)
        except PeerError as error:
            typer.echo(f"no peer: {error}", err=True)
        else:
            write_json(json, {"pagespec": result, "peer": asdict(their)})
    show(model, result, their, card)
    if peer is not None and their is None:
        raise typer.Exit(1)


def require_workloads(names: list[str]) -> None:
    """Raise typer.BadParameter if a workload is unknown."""
    unknown = sorted(set(names) - set(WORKLOADS))
    if unknown:
        raise typer.BadParameter(f"--workload must be of {', '.join(WORKLOADS)}, not {unknown[0]}")


def rate(seconds: list[float], num_tokens: int) -> tuple[float, str]:
    """Median tokens per second, and a text with the slowest and the fastest run."""
    rates = [num_tokens / s for s in seconds]
    median = statistics.median(rates)
    return median, f"{median:,.0f} ({min(rates):,.0f}..{max(rates):,.0f})"


def show(model: str, result: dict[str, Any], their: PeerResult | None, card: CardRates) -> None:
    size = ModelSize.from_config(model_config(model))
    typer.echo(describe(model, result, their))
    typer.echo(
        f"\n{'workload':<9} {'in':>8} {'out':>8} {'tok/s out (min..max)':>26} {'roofline':>8} "
        f"{'of it':>8} {'peer tok/s (min..max)':>26} {'ratio':>6}"
    )
    rooflines: dict[str, Roofline] = {}
    for name, measured in result["workloads"].items():
        load = make_workload(name)
        rooflines[name] = throughput_roofline(load, size, card)
        roofline = rooflines[name].tokens_per_second
        median, text = rate(measured["seconds"], load.num_output_tokens)
        row = (
            f"{name:<9} {load.num_prompt_tokens:>8,} {load.num_output_tokens:>8,} {text:>26} "
            f"{roofline:>8,.0f} {median / roofline:>8.1%}"
        )
        if their is not None and name in their.seconds:
            peer_median, peer_text = rate(their.seconds[name], load.num_output_tokens)
            row += f" {peer_text:>26} {median / peer_median:>6.2f}"
        typer.echo(row)
    typer.echo(f"\nroofline at {card}:")
    for name, roofline_of_load in rooflines.items():
        typer.echo(f"  {name}: {roofline_of_load}")
    for name, measured in result["workloads"].items():
        typer.echo(f"  {name}: {host_line(measured['host_ms_per_step'])}")
    show_profile(result)


def describe(model: str, result: dict[str, Any], their: PeerResult | None) -> str:
    """The engine settings of a run and its memory use."""
    stats, settings = result["stats"], result["settings"]
    memory = ", ".join(f"{name} {n / 2**30:.2f}" for name, n in stats["memory_bytes"].items())
    lines = [
        f"Qwen3 {model}, random weights; GPU {result['gpu']}, torch {result['torch']}, "
        f"triton {result['triton']}",
        f"pagespec: attention {stats['attention']}, compile {settings['compile']}, transparent "
        f"{settings['transparent']}, {settings['max_num_seqs']} sequences, started in "
        f"{result['start_s']:.1f} s; {stats['num_captures']} captures, "
        f"{stats['num_compilations']} kernels compiled or loaded, {stats['num_graphs']} CUDA "
        "graphs",
        f"KV tokens that fit: {result['kv_tokens']:,}; memory, GiB: {memory}",
    ]
    if their is not None:
        kv = f"{their.kv_tokens:,}" if their.kv_tokens else "not reported"
        starts = ", ".join(f"{s:.1f} s" for s in their.start_s)
        lines.append(
            f"peer: {their.version}, engine started in {starts or 'not reported'}; "
            f"KV tokens that fit: {kv}"
        )
    return "\n".join(lines)


def host_line(host_ms: dict[str, float]) -> str:
    parts = ", ".join(f"{n} {ms:.3f}" for n, ms in host_ms.items() if n != "steps")
    return f"host, ms per step over {host_ms['steps']:,.0f} steps: {parts}"


def show_profile(result: dict[str, Any]) -> None:
    for name in ("profile", "profile_batch_1"):
        if name in result:
            typer.echo(f"\n{result[name]['workload']}:\n{result[name]['table']}")


if __name__ == "__main__":
    typer.run(main)
