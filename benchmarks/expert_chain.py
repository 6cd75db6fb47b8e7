"""A layer of Qwen3-30B-A3B without its attention, for few tokens, as a chain of kernels on a GPU.

    python -m benchmarks.expert_chain [--tokens 1 4 16 64] [--layers 8]
    TRITON_INTERPRET=1 python -m benchmarks.expert_chain --dry       # a tiny shape, on a CPU

q, k, v and o, norm, router, experts, their sum, residual and norm, in layers with different
weights, in one CUDA graph, as in the engine. One token is a step of two tokens, of which the second
is padding. The first line is the chain before any change. Each further line has one more change
than the line before, up to "now"; the lines after that are other settings. Times are us per layer.
The roofline is the time to read the weights, with the number of experts that this many tokens have
on average.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --dry runs on a CPU")  # before torch is imported

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.card import rates_of_this_process
from benchmarks.experts import _DRY, _QWEN3_30B_A3B, Shape
from benchmarks.plain_read import seconds_of
from pagespec.kernels.device import Gpu
from pagespec.kernels.fused.dispatch import add_rms_norm
from pagespec.kernels.matmul.dispatch import linear
from pagespec.kernels.matmul.matmul import matmul
from pagespec.kernels.matmul.tiles import choose_tile
from pagespec.kernels.moe import expert_rows, grouped_mm, route_rows
from pagespec.kernels.moe.expert_rows import combine_experts, spread_rows
from pagespec.kernels.moe.route import route
from pagespec.kernels.moe.sort_by_expert import sort_by_expert

_MIN_TOKENS = 2  # per step
_MAX_CUSTOM_ROWS = 64
_EPS = 1e-6


@dataclass(frozen=True)
class Variant:
    """The changes in a chain.

    Attributes:
        knows_padding: padding goes to no expert. has_router_tile: programs have 8 rows of the
            router's weight.
        joins_route: router, sort and copy are one launch. joins_norm: sum, residual and norm are
            one launch.
        late_rows, ahead_rows: see :mod:`.grouped_mm`. is_norm_late: whether the joined norm lets
            the next kernel start after its own wait.
    """

    name: str
    knows_padding: bool = False
    has_router_tile: bool = False
    joins_route: bool = False
    joins_norm: bool = False
    late_rows: int = 0
    ahead_rows: int = 0
    is_norm_late: bool = True


def variants() -> Iterator[Variant]:
    now = Variant("before")
    yield now
    for name, change in (
        ("padding to no expert", {"knows_padding": True}),
        ("router's tile", {"has_router_tile": True}),
        ("router, sort, copy: one", {"joins_route": True}),
        ("sum, residual, norm: one", {"joins_norm": True}),
        ("late start after gate, up", {"late_rows": grouped_mm.LATE_TRIGGER_ROWS}),
        ("now: down prefetches", {"ahead_rows": grouped_mm.AHEAD_ROWS}),
    ):
        now = replace(now, name=name, **change)
        yield now
    for rows in (1, 4, 8, 16, 1 << 20):
        yield replace(now, name=f"now, but {rows} rows ahead", ahead_rows=rows)
    yield replace(now, name="now, but early after the norm", is_norm_late=False)


class Layer:
    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            weight = torch.empty(sizes, dtype=shape.dtype, device=device)
            return weight.normal_(0.0, sizes[-1] ** -0.5, generator=generator)

        self.shape = shape
        self.width = 2 * shape.hidden  # of queries
        self.qkv = normal(self.width + shape.hidden // 2, shape.hidden)
        self.o = normal(shape.hidden, self.width)
        self.router = normal(shape.num_experts, shape.hidden)
        self.gate_up = normal(shape.num_experts, 2 * shape.inner, shape.hidden).mT
        self.down = normal(shape.num_experts, shape.hidden, shape.inner).mT
        self.norms = torch.ones(2, shape.hidden, dtype=shape.dtype, device=device)

    def num_bytes(self, num_experts: int) -> int:
        """Bytes that a step reads if its tokens have this many experts."""
        dense = self.qkv.numel() + self.o.numel() + self.router.numel()
        experts = (self.gate_up.numel() + self.down.numel()) // self.shape.num_experts
        return (dense + num_experts * experts) * self.qkv.itemsize

    def run(
        self, x: Tensor, hidden: Tensor, starts: Tensor, variant: Variant
    ) -> tuple[Tensor, Tensor]:
        """The next layer's normalised input and residual."""
        queries = linear(x, self.qkv, None, _MAX_CUSTOM_ROWS)[:, : self.width]
        attended = linear(queries, self.o, None, _MAX_CUSTOM_ROWS)
        x, hidden = add_rms_norm(attended, hidden, self.norms[0], _EPS, "rounded")
        logits = self.route(x, variant.has_router_tile)
        top_k = self.shape.top_k
        query_starts = starts if variant.knows_padding else None
        if variant.joins_route:
            rows, weights, inverse, offs = route_rows.route_rows(
                logits, x, top_k, "renormalised", x.dtype, query_starts
            )
        else:
            weights, ids = route(logits, top_k, "renormalised", x.dtype)
            _, _, inverse, offs = sort_by_expert(
                ids.view(-1), self.shape.num_experts, top_k, query_starts
            )
            rows = spread_rows(x, inverse, top_k)
        rows = grouped_mm.grouped_mm(rows, self.gate_up, offs, has_gate=True)
        rows = grouped_mm.grouped_mm(rows, self.down, offs, has_old_offs=variant.ahead_rows > 0)
        given = rows, weights.view(-1), inverse, top_k
        if variant.joins_norm:
            return expert_rows.combine_add_rms_norm(*given, hidden, self.norms[1], _EPS, "rounded")
        summed = combine_experts(*given, x.dtype)
        return add_rms_norm(summed, hidden, self.norms[1], _EPS, "rounded")

    def route(self, x: Tensor, has_tile: bool) -> Tensor:
        if has_tile:
            return linear(x, self.router, None, _MAX_CUSTOM_ROWS)
        card = Gpu.of(x.device)
        tile = choose_tile(len(x), *self.router.shape, x.itemsize, False, card)
        return matmul(x, self.router, tile=tile)


@contextmanager
def settings_of(variant: Variant) -> Iterator[None]:
    def is_late(num_rows: int) -> bool:
        return variant.is_norm_late and num_rows <= 4

    with (
        patch.object(grouped_mm, "LATE_TRIGGER_ROWS", variant.late_rows),
        patch.object(grouped_mm, "AHEAD_ROWS", variant.ahead_rows),
        patch.object(expert_rows, "triggers_dependents_late", is_late),
    ):
        yield


def chain(
    layers: list[Layer], x: Tensor, hidden: Tensor, starts: Tensor, variant: Variant
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        normed, residual = x, hidden
        for layer in layers:
            normed, residual = layer.run(normed, residual, starts, variant)
        return normed

    return run


def show(layers: list[Layer], num_real: int, repeats: int, read_bandwidth: float) -> None:
    """Print a line per variant; bits of real tokens are compared with those of the first
    variant."""
    device, shape = layers[0].qkv.device, layers[0].shape
    num_tokens = max(num_real, _MIN_TOKENS)
    generator = torch.Generator(device).manual_seed(num_real)
    sizes = num_tokens, shape.hidden
    hidden = torch.empty(sizes, dtype=shape.dtype, device=device).normal_(generator=generator)
    starts = torch.tensor([0, num_real], dtype=torch.int32, device=device)
    drawn = 1 - (1 - shape.top_k / shape.num_experts) ** num_real  # of the experts, on average
    num_bytes = layers[0].num_bytes(round(drawn * shape.num_experts))
    print(f"\n{num_real} tokens: roofline {num_bytes / read_bandwidth * 1e6:.1f} us")
    expected = None
    for variant in variants():
        call = chain(layers, hidden, hidden, starts, variant)
        with settings_of(variant):
            found = call()[:num_real].clone()
            seconds = seconds_of([call], repeats, device) / len(layers)
        expected = found if expected is None else expected
        bits = "" if torch.equal(found, expected) else " OTHER BITS"
        print(f"  {variant.name:<32} {seconds * 1e6:>9.1f}{bits}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--layers", type=int, default=8, help="1.3 GB each")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="a tiny shape, on a CPU")
    options = parser.parse_args()
    card = rates_of_this_process()
    print(card)
    shape, device = (_DRY, "cpu") if options.dry else (_QWEN3_30B_A3B, "cuda")
    num_layers = 2 if options.dry else options.layers
    layers = [Layer(shape, torch.device(device), seed) for seed in range(num_layers)]
    for num_tokens in [1, 3] if options.dry else options.tokens:
        show(layers, num_tokens, options.repeats, card.read_bandwidth)


if __name__ == "__main__":
    main()
