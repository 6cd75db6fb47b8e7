"""All workloads of one model on one engine, pagespec or vLLM, with the same calls.

    python -m benchmarks.loads pagespec --model 8b --load nano --load one --json ours.json
    PYTHONPATH=$SITE:. python -m benchmarks.loads vllm --model 8b --load nano --json theirs.json
    python -m benchmarks.loads table ours.json theirs.json

The file is rewritten after each workload, so that results survive a process that is killed. Both
engines have random weights, bfloat16, no prefix cache, and 0.9 of the GPU's memory. ``--model tiny
--load tiny`` with pagespec checks on a CPU only that the script runs.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu("table", hint="; --model tiny runs on a CPU")  # before torch is imported

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.workload import (
    LARGEST_TOKEN_ID,
    LATENCY,
    LOADS,
    MODELS,
    Workload,
    latency_workload,
    make_workload,
    model_config,
    model_folder,
)

MAX_NUM_SEQS = 512
# Prompts of one length, each computed for one output token; about this many tokens in total.
_PREFILL_LENGTHS = {"512": 512, "2k": 2048, "8k": 8192, "32k": 32_000, "130k": 130_000}
_NUM_PREFILL_TOKENS = 65_536
_LOGPROBS = {"nano-logprobs0": 0, "nano-logprobs5": 5}
ONE = "one"
PREFILLS = tuple(f"prefill-{name}" for name in _PREFILL_LENGTHS)
NAMES = (*LOADS, ONE, *PREFILLS, *_LOGPROBS)

app = typer.Typer(pretty_exceptions_enable=False, help=(__doc__ or "").splitlines()[0])
Model = Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")]
Load = Annotated[
    list[str], typer.Option(help=f"Repeatable; NAME or NAME@RUNS, of {', '.join(NAMES)}.")
]
Json = Annotated[Path, typer.Option(help="Everything measured is written to this file.")]
Quantization = Annotated[str | None, typer.Option(help="fp8, or none.")]
KvCacheDtype = Annotated[str, typer.Option(help="auto or fp8.")]
TensorParallelSize = Annotated[int, typer.Option(min=1, help="GPUs that share the model.")]


@app.command()
def pagespec(
    model: Model,
    load: Load,
    json: Json,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    tensor_parallel_size: TensorParallelSize = 1,
) -> None:
    """Measure pagespec."""
    runs = parsed(load)
    import torch

    import pagespec as engine

    settings: dict[str, Any] = {
        "kv_cache_dtype": kv_cache_dtype,
        "tensor_parallel_size": tensor_parallel_size,
    }
    if quantization is not None:
        settings["quantization"] = quantization
    with model_folder(model) as folder:
        begin = time.perf_counter()
        llm = engine.LLM(
            str(folder),
            load_format="dummy",
            max_model_len=longest(runs),
            max_num_seqs=most_requests(runs),
            enable_prefix_caching=False,
            **settings,
        )
        start_s = time.perf_counter() - begin
        about = {
            "engine": f"pagespec, torch {torch.__version__}",
            "kv_tokens": llm.num_blocks * llm.config.block_size,
            "memory_bytes": llm.stats().memory_bytes,
            "startup_s": llm.stats().startup_s,
        }
        measure(
            llm.generate,
            engine.SamplingParams,
            runs,
            json,
            {
                **about,
                "gpu": gpu_name(),
                "start_s": start_s,
                "model": named(model, quantization, kv_cache_dtype, tensor_parallel_size),
            },
        )


@app.command()
def vllm(
    model: Model,
    load: Load,
    json: Json,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    tensor_parallel_size: TensorParallelSize = 1,
    batch_invariant: Annotated[bool, typer.Option(help="In its batch-invariant mode.")] = False,
) -> None:
    """Measure vLLM, which must be in PYTHONPATH."""
    runs = parsed(load)
    if batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import torch

    with model_folder(model) as folder:
        engine, llm, start_s = vllm_engine(
            model,
            folder,
            max_model_len=longest(runs),
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=tensor_parallel_size,
        )
        config = llm.llm_engine.vllm_config
        about = {
            "engine": f"vLLM {engine.__version__}{', batch-invariant' * batch_invariant}, "
            f"torch {torch.__version__}",
            "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }
        measure(
            llm.generate,
            engine.SamplingParams,
            runs,
            json,
            {
                **about,
                "gpu": gpu_name(),
                "start_s": start_s,
                "model": named(model, quantization, kv_cache_dtype, tensor_parallel_size),
            },
        )


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def vllm_engine(
    model: str, folder: Path, *, tensor_parallel_size: int = 1, **settings: Any
) -> tuple[Any, Any, float]:
    """The module of vLLM; an engine of a model with random weights, in this process if it uses one
    GPU; the seconds of its start without imports.

    Args:
        folder: of the model's ``config.json``.
        settings: other arguments of vLLM's LLM.
    """
    # Run its engine in this process, without network look-ups or missing kernels. vLLM reads these
    # variables when it is imported.
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if tensor_parallel_size == 1 else "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_PLUGINS": "",
    }.items():
        os.environ.setdefault(name, value)
    import vllm as engine

    from benchmarks.vllm_weights import spread_weights

    spread_weights()
    backend = "FLASH_ATTN_MLA" if "kv_lora_rank" in model_config(model) else "FLASH_ATTN"
    begin = time.perf_counter()
    llm = engine.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        seed=0,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        attention_config={"backend": backend},
        disable_log_stats=True,
        tensor_parallel_size=tensor_parallel_size,
        **settings,
    )
    return engine, llm, time.perf_counter() - begin


def named(
    model: str, quantization: str | None, kv_cache_dtype: str, tensor_parallel_size: int
) -> str:
    parts = [model]
    if quantization is not None:
        parts.append(quantization)
    if kv_cache_dtype != "auto":
        parts.append(f"cache {kv_cache_dtype}")
    if tensor_parallel_size > 1:
        parts.append(f"{tensor_parallel_size} GPUs")
    return ", ".join(parts)


def parsed(loads: list[str]) -> dict[str, int]:
    """Number of runs per workload.

    Raises:
        typer.BadParameter: a workload is unknown, or its number of runs is not an integer from 1.
    """
    runs = {}
    for text in loads:
        name, _, count = text.partition("@")
        if name not in NAMES:
            raise typer.BadParameter(f"--load must be of {', '.join(NAMES)}, not {name}")
        if count and (not count.isdigit() or count == "0"):
            raise typer.BadParameter(f"--load {text}: runs must be a number from 1")
        runs[name] = int(count or 3)
    return runs


def workload(name: str) -> Workload:
    if name == ONE:
        return latency_workload(*LATENCY.prompt[:1], *LATENCY.output[:1])
    if name in PREFILLS:
        length = _PREFILL_LENGTHS[name.removeprefix("prefill-")]
        rng = random.Random(2)
        prompts = [
            [rng.randint(0, LARGEST_TOKEN_ID) for _ in range(length)]
            for _ in range(max(1, _NUM_PREFILL_TOKENS // length))
        ]
        return Workload(name, prompts, [1] * len(prompts))
    return make_workload("nano" if name in _LOGPROBS else name)


def longest(runs: dict[str, int]) -> int:
    """Most tokens of a request; at least 4,096, as in the peer's own scripts."""
    return max(LATENCY.max_model_len, *(workload(name).longest for name in runs))


def most_requests(runs: dict[str, int]) -> int:
    return min(MAX_NUM_SEQS, max(len(workload(name).prompts) for name in runs))


def measure(
    generate: Callable[..., Any],
    sampling_params: Callable[..., Any],
    runs: dict[str, int],
    path: Path,
    about: dict[str, Any],
) -> None:
    """Run each workload; returns the seconds of its runs. For batch 1 also those of its first token
    alone."""
    result: dict[str, Any] = {**about, "seconds": {}}
    print(about, flush=True)

    def timed(load: Workload, temperature: float, **asked: Any) -> float:
        params = [
            sampling_params(
                temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False, **asked
            )
            for n in load.num_outputs
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]
        begin = time.perf_counter()
        outputs = generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        got = [len(output.outputs[0].token_ids) for output in outputs]
        if got != load.num_outputs:
            raise RuntimeError(f"{load.name}: {sum(got)} tokens, not {load.num_output_tokens}")
        return seconds

    timed(Workload("warm-up", [[1, 2, 3, 4]], [16]), 1.0)
    for name, count in runs.items():
        load = workload(name)
        if name == ONE:
            timed(Workload("warm-up", load.prompts, [16]), 0.0)
            first = Workload("first token", load.prompts, [1])
            result["seconds"]["first"] = [timed(first, 0.0) for _ in range(count)]
        asked = {"logprobs": _LOGPROBS[name]} if name in _LOGPROBS else {}
        temperature = 0.0 if name == ONE else 0.6
        if name in PREFILLS:
            timed(load, temperature)
        result["seconds"][name] = [timed(load, temperature, **asked) for _ in range(count)]
        print(name, [round(s, 3) for s in result["seconds"][name]], flush=True)
        path.write_text(json.dumps(result) + "\n")


@app.command()
def table(files: Annotated[list[Path], typer.Argument(help="What was measured.")]) -> None:
    """Print one table per model: medians (smallest to largest) and pagespec's ratio, above 1 if it
    is faster."""
    results = [json.loads(path.read_text()) for path in files if path.exists()]
    for model in dict.fromkeys(result["model"] for result in results):
        columns = [result for result in results if result["model"] == model]
        typer.echo(f"\n{model}, random weights, {columns[0]['gpu']}")
        for result in columns:
            typer.echo(
                f"  {result['engine']}: started in {result['start_s']:.1f} s, "
                f"{result['kv_tokens']:,} KV tokens"
            )
        for name in dict.fromkeys(name for result in columns for name in result["seconds"]):
            if name != "first":
                typer.echo(line(name, columns))


def line(name: str, columns: list[dict[str, Any]]) -> str:
    cells = [values(name, result["seconds"]) for result in columns]
    text = f"  {name + unit(name):<28}"
    medians = [statistics.median(cell) if cell else 0.0 for cell in cells]
    for cell, median in zip(cells, medians, strict=True):
        digits = 3 if name == ONE else 0
        text += (
            f" {median:>12,.{digits}f} ({min(cell):,.{digits}f} to {max(cell):,.{digits}f})"
            if median
            else f" {'-':>12}"
        )
    if len(medians) == 2 and all(medians):
        ratio = medians[0] / medians[1]
        text += f"  {1 / ratio if name == ONE else ratio:.2f}"
    return text


def unit(name: str) -> str:
    if name == ONE:
        return ", ms per token"
    return ", prompt tok/s" if name in PREFILLS else ", tok/s"


def values(name: str, seconds: dict[str, list[float]]) -> list[float]:
    """Per run: tokens per second (of prompts if these are measured); for batch 1 milliseconds per
    token after the first."""
    load = workload(name)
    runs = seconds.get(name, [])
    if name == ONE:
        first = statistics.median(seconds.get("first", [0.0]))
        return [(s - first) / (load.num_output_tokens - 1) * 1e3 for s in runs]
    num_tokens = load.num_prompt_tokens if name in PREFILLS else load.num_output_tokens
    return [num_tokens / s for s in runs]


if __name__ == "__main__":
    app()
