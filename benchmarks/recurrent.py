"""Recurrent layers on a GPU: the kernels alone, and steps of a few layers of Qwen3-Next-80B-A3B.

    python -m benchmarks.recurrent [--kernels] [--layers] [--repeats 10]

Kernels: microseconds per call, and GB/s of the bytes that it must move (states read and written,
inputs read, outputs written, each once), compared with the GPU's plain read. Each CUDA graph has
the calls of several layers over states that together exceed the L2 cache. Figures are medians of
replays. Prompts are one row.

Layers: milliseconds of a decode step, and of a prompt, of four layers (three delta rules, one
attention) with random weights. They are compared with the time for the bytes that a step must read
and write (weights of the experts that are used on average, states, keys and values; no
activations), and, for a prompt, for its matmuls at 760 TFLOP/s.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu()  # before torch is imported

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.attention import environment
from benchmarks.card import rates_of_this_process
from benchmarks.gpu_timing import median_seconds
from benchmarks.other_models import qwen3_next
from pagespec.kernels.recurrent import ops
from pagespec.kernels.recurrent import recurrent_spec as spec

_POOL_BYTES = 400 << 20
_MOST_LAYERS = 64
_ROWS_OF_PROMPTS = 256  # of a step with prompts, most of them without tokens
_FLOPS = 760e12
BF16 = torch.bfloat16
Rows = tuple[Tensor, Tensor, Tensor, Tensor, int, None]


@dataclass(frozen=True)
class Kernel:
    """An op in the shape of a model.

    Attributes:
        per_token: creates the inputs of T tokens. call: the op, which takes those, states and rows.
        state: shape per slot. state_dtype: its dtype.
        num_state: elements of the state in a slot, if its tail is counted separately.
    """

    name: str
    per_token: Callable[[int], list[Tensor]]
    call: Callable[..., Tensor]
    state: tuple[int, ...]
    state_dtype: torch.dtype = torch.float32
    num_state: int = 0

    def decode_bytes(self) -> float:
        """Bytes of a slot that a decode step must read and write, on average."""
        num_bytes = math.prod(self.state) * self.state_dtype.itemsize
        if not self.num_state:
            return 2 * num_bytes
        return in_chunks(num_bytes, self.num_state * self.state_dtype.itemsize)


def in_chunks(slot_bytes: int, state_bytes: int) -> float:
    """Bytes of a slot that a decode step moves, on average: the state is written at a chunk's end;
    before that, half of the inputs in a slot are read and one is written."""
    size = spec.CHUNK
    of_an_input = (slot_bytes - state_bytes) / size
    return state_bytes * (1 + 1 / size) + of_an_input * ((size - 1) / 2 + 1)


def _normal(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(sizes, device="cuda").to(dtype)


def short_conv(name: str, channels: int, width: int) -> Kernel:
    weight = _normal(channels, width)
    return Kernel(
        name,
        lambda n: [_normal(n, channels)],
        lambda x, states, rows: ops.short_conv(*x, weight, None, states, *rows, "silu"),
        (width - 1, channels),
        BF16,
    )


def delta_rule(name: str, heads: int, key_heads: int, dim: int, *, per_channel: bool) -> Kernel:
    def tokens(n: int) -> list[Tensor]:
        shape = (n, heads, dim) if per_channel else (n, heads)
        decay = -torch.rand(shape, device="cuda")
        keys = [_normal(n, key_heads, dim) for _ in "qk"]
        return [*keys, _normal(n, heads, dim), decay, torch.rand(n, heads, device="cuda").to(BF16)]

    return Kernel(
        name,
        tokens,
        lambda x, states, rows: ops.delta_rule(*x, states, *rows, dim**-0.5, True),
        (heads, dim, dim) if per_channel else spec.slot_shape(heads, dim, dim, BF16, BF16),
        num_state=0 if per_channel else heads * dim * dim,
    )


def ssd_scan(name: str, heads: int, groups: int, dim: int, size: int) -> Kernel:
    rates, skip, bias = -torch.rand(heads, device="cuda"), _normal(heads), _normal(heads)

    def call(x: list[Tensor], states: Tensor, rows: Rows) -> Tensor:
        v, dt, B, C = x
        return ops.ssd_scan(v, dt, rates, B, C, skip, bias, states, *rows, True, 0.0, float("inf"))

    def tokens(n: int) -> list[Tensor]:
        keys = [_normal(n, groups, size) for _ in "BC"]
        return [_normal(n, heads, dim), _normal(n, heads), *keys]

    slot = spec.slot_shape(heads, size, dim, BF16, BF16)
    return Kernel(name, tokens, call, slot, num_state=heads * size * dim)


def selective_scan(name: str, inner: int, size: int) -> Kernel:
    rates, skip, bias = -torch.rand(inner, size, device="cuda"), _normal(inner), _normal(inner)

    def call(x: list[Tensor], states: Tensor, rows: Rows) -> Tensor:
        v, dt, B, C, z = x
        return ops.selective_scan(v, dt, rates, B, C, skip, z, bias, states, *rows, True)

    def tokens(n: int) -> list[Tensor]:
        return [_normal(n, inner), _normal(n, inner), *(_normal(n, size) for _ in "BC"),
                _normal(n, inner)]  # fmt: skip

    return Kernel(name, tokens, call, (size, inner))


def kernels() -> list[Kernel]:
    return [
        short_conv("short_conv, Qwen3-Next", 8192, 4),
        delta_rule("delta_rule, Qwen3-Next", 32, 16, 128, per_channel=False),
        delta_rule("delta_rule, Kimi Linear", 32, 32, 128, per_channel=True),
        ssd_scan("ssd_scan, Nemotron-H-8B", 128, 8, 64, 128),
        selective_scan("selective_scan, Jamba", 8192, 16),
    ]


def _rows(num_rows: int, num_tokens: int) -> Rows:
    """All rows have ``num_tokens``. Decode rows continue from a state, at positions spread over a
    chunk. A step with prompts has as many rows as requests may run: the others have no tokens."""
    starts = torch.arange(num_rows + 1, device="cuda", dtype=torch.int32) * num_tokens
    contexts = torch.full((num_rows,), num_tokens, device="cuda", dtype=torch.int32)
    if num_tokens == 1:
        contexts += 8 + torch.arange(num_rows, device="cuda", dtype=torch.int32) % 16
    else:
        num_empty = _ROWS_OF_PROMPTS - num_rows
        starts = torch.cat((starts, starts[-1:].expand(num_empty)))
        contexts = torch.cat((contexts, contexts.new_zeros(num_empty)))
    tables = torch.arange(len(contexts), device="cuda", dtype=torch.int32)[:, None] % num_rows
    of_rows = torch.arange(len(contexts), device="cuda", dtype=torch.int32)
    tables = tables.repeat(1, -(-num_tokens // 256) + 1)
    return starts, contexts, tables, of_rows, 256, None


def measure(kernel: Kernel, num_rows: int, num_tokens: int, repeats: int) -> tuple[float, int]:
    """(seconds, bytes) per call."""
    total = num_rows * num_tokens
    inputs, rows = kernel.per_token(total), _rows(num_rows, num_tokens)
    state = torch.zeros(num_rows + 1, *kernel.state, dtype=kernel.state_dtype, device="cuda")
    state_bytes = state[0].nbytes * num_rows
    out = kernel.call(inputs, state, rows)
    token_bytes = sum(x.nbytes for x in inputs) + out.nbytes
    is_decode = num_tokens == 1
    num_bytes = token_bytes + int(kernel.decode_bytes() * num_rows if is_decode else state_bytes)
    num_layers = min(_MOST_LAYERS, max(2, math.ceil(_POOL_BYTES / num_bytes)))
    states = [state, *(torch.zeros_like(state) for _ in range(num_layers - 1))]
    calls = [lambda s=s: kernel.call(inputs, s, rows) for s in states]
    return median_seconds(calls, repeats), num_bytes


def print_kernels(read: float, repeats: int) -> None:
    print(f"{'kernel':<26} {'rows x tokens':>13} {'us':>9} {'GB/s':>7} {'of read':>7}")
    for kernel in kernels():
        for num_rows, num_tokens in ((1, 1), (64, 1), (256, 1), (1, 8192), (8, 1024)):
            seconds, num_bytes = measure(kernel, num_rows, num_tokens, repeats)
            rate = num_bytes / seconds / 1e9
            print(
                f"{kernel.name:<26} {f'{num_rows} x {num_tokens}':>13} {seconds * 1e6:>9.1f} "
                f"{rate:>7,.0f} {rate / read:>7.2f}",
                flush=True,
            )
            torch.cuda.empty_cache()


QWEN3_NEXT = qwen3_next(4)


def roofline_ms(num_rows: int, num_tokens: int, read: float) -> float:
    """Lower bound of a step of these four layers and the LM head, in which each row has
    ``num_tokens``."""
    c, total = QWEN3_NEXT, num_rows * num_tokens
    hidden, expert = c["hidden_size"], 3 * c["hidden_size"] * c["moe_intermediate_size"]
    share = 1 - (1 - c["num_experts_per_tok"] / c["num_experts"]) ** total
    experts = expert * (c["num_experts"] * share + 1) + hidden * c["num_experts"]
    delta = hidden * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * hidden
    attention = hidden * (2 * 4096 + 2 * 512) + 4096 * hidden
    head = hidden * c["vocab_size"]
    weights = 2 * (4 * experts + 3 * delta + attention + head)
    slot = 4 * math.prod(spec.slot_shape(32, 128, 128, BF16, BF16))
    state, conv = 4 * 32 * 128 * 128, 2 * 3 * 8192
    moved = in_chunks(slot, state) + 2 * conv if num_tokens == 1 else slot + conv
    memory = (weights + 3 * moved * num_rows) / read / 1e9
    active = 4 * expert * (c["num_experts_per_tok"] + 1) + 3 * delta + attention
    return 1e3 * max(memory, 2 * (active * total + head * num_rows) / _FLOPS)


def print_layers(read: float) -> None:
    from pagespec import LLM, SamplingParams

    with TemporaryDirectory(prefix="qwen3-next-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_NEXT))
        begin = time.perf_counter()
        llm = LLM(
            folder,
            device="cuda",
            load_format="dummy",
            max_num_seqs=256,
            max_model_len=8448,
            enable_prefix_caching=False,
        )
        start_s = time.perf_counter() - begin
    print(f"ready in {start_s:.1f} s; {llm.stats().memory_bytes}")

    def seconds(num_rows: int, num_prompt: int, num_outputs: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
        prompts = [[(i * 7919 + j * 31) % 100_000 for j in range(num_prompt)]
                   for i in range(num_rows)]  # fmt: skip
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - begin)
        return median(times)

    print(f"{'step':<18} {'ms':>8} {'roofline':>8} {'of it':>10}")
    for num_rows in (1, 64, 256):
        few, many = seconds(num_rows, 16, 16), seconds(num_rows, 16, 80)
        ms, least = 1e3 * (many - few) / 64, roofline_ms(num_rows, 1, read)
        print(f"{f'decode, {num_rows}':<18} {ms:>8.3f} {least:>8.3f} {least / ms:>10.2f}")
    ms, least = 1e3 * seconds(1, 8192, 1), roofline_ms(1, 8192, read)
    print(f"{'a prompt of 8,192':<18} {ms:>8.3f} {least:>8.3f} {least / ms:>10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    read = rates_of_this_process().read_bandwidth / 1e9
    print(environment())
    print(f"plain read: {read:,.0f} GB/s")
    if options.kernels or not options.layers:
        print_kernels(read, options.repeats)
    if options.layers or not options.kernels:
        print_layers(read)


if __name__ == "__main__":
    main()
