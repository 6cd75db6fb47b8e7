"""The router of one layer of Qwen3-30B-A3B, and its rows to the experts and back, on a GPU.

    python -m benchmarks.expert_rows [--tokens 1 64 256 8192]
    TRITON_INTERPRET=1 python -m benchmarks.expert_rows --dry       # a tiny shape, on a CPU

Each is compared with its roofline (the bytes read and written at the GPU's read bandwidth) and with
torch's operations. Experts are drawn as in :mod:`benchmarks.experts`.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --dry runs on a CPU")  # before torch is imported

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.card import rates_of_this_process
from benchmarks.experts import _CALLS, _DRY, _QWEN3_30B_A3B, Shape, draw_calls
from benchmarks.plain_read import seconds_of
from pagespec.kernels.moe.expert_rows import combine_experts, spread_rows
from pagespec.kernels.moe.route import route
from pagespec.kernels.moe.sort_by_expert import sort_by_expert

Calls = list[Callable[[], object]]


def torch_route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), top_k)
    weights /= weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def torch_combine(
    rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, top_k: int
) -> Tensor:
    products = (rows * weights[order].unsqueeze(-1))[inverse]
    return products.view(-1, top_k, rows.shape[1]).sum(1)


def cases(
    shape: Shape, num_tokens: int, device: torch.device
) -> Iterator[tuple[str, int, Calls, Calls]]:
    """Name, bytes read and written, pagespec's calls, and torch's."""
    top_k, dtype, size = shape.top_k, shape.dtype, shape.dtype.itemsize
    num_rows = num_tokens * top_k

    def normal(*sizes: int) -> list[Tensor]:
        return [torch.randn(sizes, device=device).to(dtype) for _ in range(_CALLS)]

    logits = normal(num_tokens, shape.num_experts)
    num_bytes = size * num_tokens * shape.num_experts + (size + 8) * num_rows
    ours: Calls = [partial(route, x, top_k, "renormalised", dtype) for x in logits]
    yield "route", num_bytes, ours, [partial(torch_route, x, top_k) for x in logits]

    drawn = draw_calls(shape, num_tokens, device)
    sorts = [sort_by_expert(c.ids, shape.num_experts)[1:3] for c in drawn]
    tokens = normal(num_tokens, shape.hidden)
    num_bytes = size * shape.hidden * (num_tokens + num_rows) + 8 * num_rows
    ours = [
        partial(spread_rows, x, inverse, top_k)
        for x, (_, inverse) in zip(tokens, sorts, strict=True)
    ]
    theirs: Calls = [
        partial(lambda x, order: x[order // top_k], x, order)
        for x, (order, _) in zip(tokens, sorts, strict=True)
    ]
    yield "spread", num_bytes, ours, theirs

    inputs = list(zip(normal(num_rows, shape.hidden), normal(num_rows), sorts, strict=True))
    ours = [partial(combine_experts, x, w, inverse, top_k, dtype) for x, w, (_, inverse) in inputs]
    theirs = [partial(torch_combine, x, w, *sort, top_k) for x, w, sort in inputs]
    yield "combine", num_bytes + size * num_rows, ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 8192])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="a tiny shape, on a CPU")
    options = parser.parse_args()
    card = rates_of_this_process()
    print(card)
    shape, device = (_DRY, "cpu") if options.dry else (_QWEN3_30B_A3B, "cuda")
    print(f"\n{'tokens':>6} {'':<9} {'us':>9} {'roofline':>8} {'of it':>6} {'torch':>10}")
    for num_tokens in [1, 3] if options.dry else options.tokens:
        for name, num_bytes, ours, theirs in cases(shape, num_tokens, torch.device(device)):
            for call in (*ours, *theirs):  # compiled before they are timed
                call()
            found, other = (
                seconds_of(calls, options.repeats, torch.device(device)) for calls in (ours, theirs)
            )
            roofline = num_bytes / card.read_bandwidth
            print(
                f"{num_tokens:>6} {name:<9} {found * 1e6:>9.1f} {roofline * 1e6:>8.1f} "
                f"{roofline / found:>6.0%} {other * 1e6:>10.1f}"
            )


if __name__ == "__main__":
    main()
