"""Sparse attention of DeepSeek-V3.2 on a GPU, one layer: the indexer's selection and attention to
it.

    python -m benchmarks.sparse

128 heads over latents of 512 and 64, 64 index heads of 128, 2,048 selected positions, bfloat16,
blocks of 64. Calls are timed in CUDA graphs, over caches that together exceed the L2 cache. They
are compared with attention to all positions, of the same queries.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.mla import BF16, PAGE, RANK, WIDTH, Rows, seconds_of
from pagespec.kernels.arguments import LatentKV
from pagespec.kernels.mla import launch
from pagespec.kernels.sparse import index_kernels

HEADS, INDEX_HEADS, INDEX_DIM, TOPK = 128, 64, 128, 2048
CASES = [(1, 8192, 1), (64, 8192, 1), (1, 65536, 1), (1, 4096, 4096)]


def times_of(num_rows: int, context: int, num_new: int) -> dict[str, float]:
    """Seconds per layer of each part."""
    rows = Rows(num_rows, context, num_new)
    positions = torch.arange(context - num_new, context).repeat(num_rows).cuda()
    row_of = torch.arange(num_rows).repeat_interleave(num_new).cuda()
    slots = rows.tables[row_of, positions // PAGE].long() * PAGE + positions % PAGE

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=BF16, device="cuda")

    query, key = normal(rows.num_tokens, INDEX_HEADS, INDEX_DIM), normal(rows.num_tokens, INDEX_DIM)
    weights = torch.randn(rows.num_tokens, INDEX_HEADS, device="cuda")
    sets = [(x.unsqueeze(2), i.unsqueeze(2)) for x, i in rows.caches(WIDTH, INDEX_DIM)]
    latent_query = normal(rows.num_tokens, HEADS, WIDTH)

    def choose(index_keys: Tensor) -> Tensor:
        of_step = (index_keys, slots, *rows.batch)
        return index_kernels.index_topk(query, key, weights, *of_step, 0.1, TOPK)

    chosen = choose(sets[0][1])

    def attend(cache: Tensor, indices: Tensor | None) -> Tensor:
        kv = LatentKV(cache, *rows.batch)
        return launch.attention(latent_query, kv, 0.1, RANK, indices=indices)

    def seconds(call: Callable[[Tensor, Tensor], Any]) -> float:
        return seconds_of(lambda: [call(*caches) for caches in sets], 10, len(sets))

    return {
        "choice": seconds(lambda _, keys: choose(keys)),
        "attention": seconds(lambda cache, _: attend(cache, chosen)),
        "to all": seconds(lambda cache, _: attend(cache, None)),
    }


def main() -> None:
    print("us per layer", torch.cuda.get_device_name())
    print(f"{'rows x new of context':24}{'choice':>10}{'attention':>11}{'to all':>10}")
    for num_rows, context, num_new in CASES:
        times = {name: s * 1e6 for name, s in times_of(num_rows, context, num_new).items()}
        case = f"{num_rows} x {num_new} of {context:,}"
        print(f"{case:24}{times['choice']:10.1f}{times['attention']:11.1f}{times['to all']:10.1f}")


if __name__ == "__main__":
    main()
