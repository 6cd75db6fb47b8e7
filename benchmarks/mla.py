"""Latent attention on a GPU: GB/s of its cache in decode, TFLOP/s in prefill, and whole steps.

    python -m benchmarks.mla [--kernels] [--engine] [--layers 6] [--caches latent expanded]

The shape is that of DeepSeek-V2-Lite (16 heads, latents of 512 and 64), with ``--v3`` that of
DeepSeek-V3's attention (128 heads). Kernels are timed in CUDA graphs of several calls over caches
that together exceed the L2 cache. The roofline of decode is one read of each cached byte at the
run's plain read rate. "expanded" is the same attention with every head's keys and values cached. An
engine's step is that of a model with a few dense layers and random weights, with DeepSeek-V3's
code.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.card import rates_of_this_process
from pagespec import LLM, SamplingParams
from pagespec.kernels.arguments import AttentionParams, LatentKV, PagedKV
from pagespec.kernels.attention import launch as paged
from pagespec.kernels.mla import dispatch, launch

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
WIDTH = RANK + ROPE
_POOL_BYTES = 300 << 20
BF16 = torch.bfloat16
PAGE = 64
PREFILLS = [(1, 2048, 2048), (4, 2048, 2048), (1, 8192, 8192), (8, 4224, 128)]
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 64,  # dense layers: only attention and the cache are measured
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}


def seconds_of(call: Callable[[], Any], repeats: int = 20, calls: int = 1) -> float:
    """Median seconds of a captured call's replays, per one of the ``calls`` in it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / calls


class Rows:
    """Rows of ``num_new`` queries at the end of ``context`` positions, with scattered blocks."""

    def __init__(self, num_rows: int, context: int, num_new: int) -> None:
        blocks = -(-context // PAGE)
        self.num_blocks = num_rows * blocks
        self.num_tokens, self.num_rows, self.context = num_rows * num_new, num_rows, context
        order = torch.randperm(self.num_blocks, dtype=torch.int32)
        self.tables = order.view(num_rows, blocks).cuda()
        self.starts = (torch.arange(num_rows + 1, dtype=torch.int32) * num_new).cuda()
        self.contexts = torch.full((num_rows,), context, dtype=torch.int32).cuda()
        self.table_rows = torch.arange(num_rows, dtype=torch.int32).cuda()
        self.pairs = num_rows * sum(range(context - num_new + 1, context + 1))

    def caches(self, *widths: int) -> list[tuple[Tensor, ...]]:
        """As many sets as together exceed the L2 cache."""
        num_bytes = sum(widths) * 2 * self.num_blocks * PAGE
        count = min(16, max(1, _POOL_BYTES // num_bytes))
        shape = (self.num_blocks + 1, PAGE)
        return [
            tuple(torch.randn(*shape, w, dtype=BF16, device="cuda") for w in widths)
            for _ in range(count)
        ]

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.starts, self.contexts, self.tables, self.table_rows


def latent_seconds(rows: Rows, num_heads: int, tiling: Any = None) -> float:
    query = torch.randn(rows.num_tokens, num_heads, WIDTH, dtype=BF16, device="cuda")
    caches = [c.unsqueeze(2) for (c,) in rows.caches(WIDTH)]

    def call() -> None:
        for cache in caches:
            launch.attention(query, LatentKV(cache, *rows.batch), 0.1, RANK, tiling)

    return seconds_of(call, calls=len(caches))


def expanded_seconds(rows: Rows, num_heads: int) -> float:
    k_dim = NOPE + ROPE
    query = torch.randn(rows.num_tokens, num_heads, k_dim, dtype=BF16, device="cuda")
    caches = [
        (k.unflatten(2, (num_heads, -1)), v.unflatten(2, (num_heads, -1)))
        for k, v in rows.caches(num_heads * k_dim, num_heads * VALUE)
    ]
    params = AttentionParams(0.1)

    def call() -> None:
        for k, v in caches:
            paged.paged_attention(query, PagedKV(k, v, *rows.batch), params)

    return seconds_of(call, calls=len(caches))


def heads_seconds(num_tokens: int, num_heads: int) -> float:
    """Seconds to map queries into the latent space and values out of it."""
    weights = [
        torch.randn(num_heads, NOPE + VALUE, RANK, dtype=BF16, device="cuda") for _ in range(8)
    ]
    query = torch.randn(num_tokens, num_heads, NOPE + ROPE, dtype=BF16, device="cuda")
    mixed = torch.randn(num_tokens, num_heads, RANK, dtype=BF16, device="cuda")

    def call() -> None:
        for w in weights:
            dispatch.latent_query(query, w[:, :NOPE])
            dispatch.head_values(mixed, w[:, NOPE:].transpose(1, 2))

    return seconds_of(call, calls=len(weights))


def kernels(heads: Sequence[int], decode: Sequence[tuple[int, int]]) -> None:
    bandwidth = rates_of_this_process().read_bandwidth
    print(f"plain read {bandwidth / 1e9:.0f} GB/s; us per layer and call")
    print("heads rows context | latent roofline GB/s | expanded roofline | matmuls of heads")
    for num_heads in heads:
        for num_rows, context in decode:
            rows = Rows(num_rows, context, 1)
            num_bytes = num_rows * context * WIDTH * 2
            took = latent_seconds(rows, num_heads)
            roofline = num_bytes / bandwidth
            cells = [f"{took * 1e6:8.1f} {roofline * 1e6:7.1f} {num_bytes / took / 1e9:5.0f}"]
            wide = num_rows * context * num_heads * (NOPE + ROPE + VALUE) * 2
            if wide < 20 << 30:
                other = expanded_seconds(rows, num_heads)
                cells.append(f"{other * 1e6:8.1f} {wide / bandwidth * 1e6:7.1f}")
            cells.append(f"{heads_seconds(num_rows, num_heads) * 1e6:6.1f}")
            print(f"{num_heads:4} {num_rows:4} {context:6} | " + " | ".join(cells), flush=True)
        for num_rows, context, num_new in PREFILLS:
            rows = Rows(num_rows, context, num_new)
            took, other = latent_seconds(rows, num_heads), expanded_seconds(rows, num_heads)
            flops = [2 * rows.pairs * num_heads * n for n in (WIDTH + RANK, NOPE + ROPE + VALUE)]
            print(
                f"{num_heads:4} prefill {num_rows} x {num_new} of {context}: "
                f"latent {took * 1e3:.2f} ms {flops[0] / took / 1e12:.0f} TFLOP/s, "
                f"expanded {other * 1e3:.2f} ms "
                f"{flops[1] / other / 1e12:.0f} TFLOP/s; matmuls of heads "
                f"{heads_seconds(rows.num_tokens, num_heads) * 1e3:.2f} ms",
                flush=True,
            )


@contextmanager
def model_folder(num_layers: int) -> Iterator[str]:
    """A folder with only the ``config.json``."""
    with TemporaryDirectory(prefix="deepseek-v2-lite-") as folder:
        config = {**CONFIG, "num_hidden_layers": num_layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def engine(num_layers: int, caches: Sequence[str], batches: Sequence[int], context: int) -> None:
    num_out = 48
    with model_folder(num_layers) as folder:
        for name in caches:
            llm = LLM(
                folder,
                dtype="bfloat16",
                load_format="dummy",
                max_model_len=8192,
                max_num_seqs=256,
                mla_latent_cache=name == "latent",
                memory_utilization=0.3,
                block_size=PAGE,
                graph_batch_sizes=list(batches),
            )
            stats = llm.stats()
            num_tokens = llm.num_blocks * PAGE
            cache, start = stats.memory_bytes["kv_cache"], sum(stats.startup_s.values())
            print(
                f"{name}: start {start:.1f} s, {num_tokens:,} tokens in {cache / 2**30:.2f} GiB, "
                f"{cache / (num_tokens + PAGE):.0f} bytes per token",
                flush=True,
            )
            for batch in batches:
                prompts = [[(7 * i + j) % 90_000 for j in range(context)] for i in range(batch)]
                took = []
                for tokens in (1, num_out):
                    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
                    llm.reset_prefix_cache()
                    begin = time.perf_counter()
                    llm.generate(prompts, params, use_tqdm=False)
                    took.append(time.perf_counter() - begin)
                step = (took[1] - took[0]) / (num_out - 1) * 1e3
                print(
                    f"  {batch:3} rows of {context}: prefill {took[0] * 1e3:.0f} ms, "
                    f"decode {step:.3f} ms per step",
                    flush=True,
                )
            del llm
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--v3", action="store_true")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--caches", nargs="+", default=["latent", "expanded"])
    given = parser.parse_args()
    if given.kernels:
        decode = [(1, 1024), (1, 8192), (16, 4096), (64, 2048), (256, 2048)]
        kernels([128] if given.v3 else [16], decode)
    if given.engine:
        engine(given.layers, given.caches, (1, 64, 256), 1024)


if __name__ == "__main__":
    main()
