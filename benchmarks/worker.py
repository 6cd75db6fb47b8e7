"""The process that runs the engine: reads a job (JSON) from standard input, measures, and writes
the result. Started only by ``benchmarks.job.run_job``.

    python -m benchmarks.worker MODEL_FOLDER RESULT_FILE < JOB
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.job import Job
from benchmarks.workload import LATENCY, LOADS, Workload, latency_workload, make_workload

MAX_NUM_SEQS = 512


def main() -> None:
    job = Job(**json.load(sys.stdin))
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    measure = {
        "throughput": throughput,
        "latency": latency,
        "startup": startup,
        "tracing": tracing,
    }[job.kind]
    output.write_text(json.dumps(measure(job, folder)))


def make_llm(job: Job, folder: Path, workloads: Sequence[Workload], max_model_len: int) -> Any:
    """An engine for the workloads. Prefix caching is off, as in the peer: otherwise repetitions of
    a workload would find their prompts computed."""
    from pagespec import LLM

    settings = {
        # A folder with only a config, or a file or folder with weights.
        "load_format": "dummy" if folder.is_dir() and not holds_weights(folder) else "auto",
        "max_num_seqs": min(MAX_NUM_SEQS, max(len(w.prompts) for w in workloads)),
        "enable_prefix_caching": False,
        "max_model_len": max_model_len,
        **job.settings,
    }
    return LLM(str(folder), **settings)


def holds_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def timed(llm: Any, workload: Workload, temperature: float, num_outputs: list[int]) -> float:
    """Seconds of one ``generate``.

    Raises:
        RuntimeError: some request did not get its number of tokens.
    """
    from pagespec import SamplingParams

    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in num_outputs
    ]
    begin = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    got = [len(output.outputs[0].token_ids) for output in outputs]
    if got != num_outputs:
        raise RuntimeError(f"{workload.name}: {sum(got)} tokens instead of {sum(num_outputs)}")
    return seconds


def host_times(llm: Any, before: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of host time per step since ``before``, by activity."""
    after = dataclasses.asdict(llm.stats())
    num_steps = after["num_steps"] - before["num_steps"]
    return {
        name: (seconds - before["host_s"].get(name, 0.0)) / num_steps * 1e3
        for name, seconds in after["host_s"].items()
    } | {"steps": num_steps}


def throughput(job: Job, folder: Path) -> dict[str, Any]:
    workloads = [make_workload(name) for name in job.workloads]
    single = latency_workload(job.num_prompt_tokens, job.num_output_tokens)
    max_model_len = max(LOADS[name].max_model_len for name in job.workloads)
    if job.with_latency:
        max_model_len = max(max_model_len, LATENCY.max_model_len)
    begin = time.perf_counter()
    llm = make_llm(job, folder, workloads, max_model_len)
    result = described(llm, time.perf_counter() - begin)
    # As in the peer's benchmark: one short request before anything is timed.
    timed(llm, Workload("warm-up", [[1, 2, 3, 4]], [16]), 1.0, [16])
    result["workloads"] = {}
    for workload in workloads:
        before = dataclasses.asdict(llm.stats())
        seconds = [timed(llm, workload, 0.6, workload.num_outputs) for _ in range(job.repeat)]
        result["workloads"][workload.name] = {
            "seconds": seconds,
            "host_ms_per_step": host_times(llm, before),
        }
        print(f"{workload.name}: {[round(s, 3) for s in seconds]} s", file=sys.stderr, flush=True)
    if job.with_latency:
        result |= batch_1(llm, single, job)
    if job.with_orders:
        result["orders"] = in_two_orders(llm, workloads[0])
    result["stats"] = dataclasses.asdict(llm.stats())
    if job.profile is not None:
        result["profile"] = profiled(llm, workloads[0], 0.6, job.profile)
        if job.with_latency:
            trace = Path(job.profile)
            trace = trace.with_name(f"{trace.stem}-batch-1{trace.suffix}")
            result["profile_batch_1"] = profiled(llm, single, 0.0, str(trace))
    return result


def latency(job: Job, folder: Path) -> dict[str, Any]:
    workload = latency_workload(job.num_prompt_tokens, job.num_output_tokens)
    begin = time.perf_counter()
    llm = make_llm(job, folder, [workload], max(LATENCY.max_model_len, workload.longest))
    result = described(llm, time.perf_counter() - begin)
    result |= batch_1(llm, workload, job)
    result["stats"] = dataclasses.asdict(llm.stats())
    if job.profile is not None:
        result["profile"] = profiled(llm, workload, 0.0, job.profile)
    return result


def batch_1(llm: Any, workload: Workload, job: Job) -> dict[str, Any]:
    """Seconds of one request, for its first token alone and for all tokens."""
    timed(llm, workload, 0.0, [16])
    before = dataclasses.asdict(llm.stats())
    return {
        "one_token_s": [timed(llm, workload, 0.0, [1]) for _ in range(job.repeat)],
        "total_s": [timed(llm, workload, 0.0, workload.num_outputs) for _ in range(job.repeat)],
        "host_ms_per_step": host_times(llm, before),
    }


def in_two_orders(llm: Any, workload: Workload) -> dict[str, int]:
    """The number of requests that get the same tokens if they arrive shuffled."""
    from pagespec import SamplingParams

    requests = list(range(len(workload.prompts)))
    shuffled = random.Random(2).sample(requests, len(requests))
    answers = []
    for order in (requests, shuffled):
        params = [
            SamplingParams(
                temperature=0.6, seed=i, ignore_eos=True, max_tokens=workload.num_outputs[i]
            )
            for i in order
        ]
        outputs = llm.generate([workload.prompts[i] for i in order], params, use_tqdm=False)
        answers.append({i: o.outputs[0].token_ids for i, o in zip(order, outputs, strict=True)})
    num_equal = sum(answers[0][i] == answers[1][i] for i in requests)
    return {"requests": len(requests), "equal": num_equal}


def startup(job: Job, folder: Path) -> dict[str, Any]:
    """Times are of the monotonic clock, which all processes of the machine share."""
    called = time.monotonic()
    workload = latency_workload(job.num_prompt_tokens, 1)
    from pagespec.llm import import_engine

    # With all its imports, which are not part of the engine's own start.
    import_engine()
    imported = time.monotonic()
    llm = make_llm(job, folder, [workload], LATENCY.max_model_len)
    started = time.monotonic()
    timed(llm, workload, 0.0, [1])
    first_token = time.monotonic()
    result = described(llm, started - imported)
    result |= {
        "called": called,
        "imported": imported,
        "engine_ready": started,
        "first_token": first_token,
        "num_modules": len(sys.modules),
    }
    result["stats"] = dataclasses.asdict(llm.stats())
    return result


def tracing(job: Job, folder: Path) -> dict[str, Any]:
    """Whole workloads, alternately without and with a step trace."""
    from pagespec.engine.trace import TraceWriter

    workloads = [make_workload(name) for name in job.workloads]
    begin = time.perf_counter()
    llm = make_llm(job, folder, workloads, max(LOADS[name].max_model_len for name in job.workloads))
    result = described(llm, time.perf_counter() - begin)
    result["workloads"] = {}
    engine = llm.engine
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.jsonl"
        for workload in workloads:
            timed(llm, workload, 0.6, workload.num_outputs)
            plain_s, traced_s = [], []
            for _ in range(job.repeat):
                engine._trace = engine.scheduler.account = None
                plain_s.append(timed(llm, workload, 0.6, workload.num_outputs))
                engine._trace = TraceWriter(trace, engine.scheduler)  # and the account
                traced_s.append(timed(llm, workload, 0.6, workload.num_outputs))
            engine._trace = engine.scheduler.account = None
            result["workloads"][workload.name] = {
                "plain_s": plain_s,
                "traced_s": traced_s,
                "trace_bytes": trace.stat().st_size,
            }
            print(f"{workload.name}: {plain_s}, traced {traced_s} s", file=sys.stderr, flush=True)
    result["stats"] = dataclasses.asdict(llm.stats())
    return result


def profiled(llm: Any, workload: Workload, temperature: float, trace: str) -> dict[str, Any]:
    from benchmarks.profiling import profile_steps

    profile = profile_steps(
        llm,
        lambda: timed(llm, workload, temperature, workload.num_outputs),
        Path(trace),
    )
    return {"table": str(profile), "workload": workload.name, **profile.summary()}


def described(llm: Any, start_s: float) -> dict[str, Any]:
    """Versions and device of the run, and how many KV tokens fit."""
    import torch

    is_gpu = str(llm.device).startswith("cuda")
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "gpu": torch.cuda.get_device_name(llm.device) if is_gpu else "none (CPU)",
        "torch": torch.__version__,
        "triton": triton,
        "start_s": start_s,
        "kv_tokens": llm.num_blocks * llm.config.block_size,
        "settings": dataclasses.asdict(llm.config),
    }


if __name__ == "__main__":
    main()
