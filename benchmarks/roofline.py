"""The roofline of a workload: the least time that it can take on a GPU. The bytes that must be read
and the operations that must be done are divided by the measured rates (:mod:`benchmarks.card`).

    python -m benchmarks.roofline [MODEL] [WORKLOAD] [--read TB/s --multiply TFLOP/s]

Give both rates to compute the roofline of another GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

from benchmarks.card import CardRates, card_rates
from benchmarks.gpu import require_gpu
from benchmarks.model_size import NUM_BYTES, ModelSize
from benchmarks.workload import (
    LATENCY,
    MODELS,
    WORKLOADS,
    Workload,
    latency_workload,
    make_workload,
    model_config,
)


@dataclass(frozen=True)
class Roofline:
    """Lower bounds in seconds, by cause.

    Attributes:
        kv_s: time to read the KV cache, once per decode step and request.
        weights_s: time of the weights in decode steps. A step of b requests reads all weights or
            multiplies them by b rows, whichever takes longer. All requests run at once.
        prefill_s: time of the linear layers for all prompt tokens.
        attention_s: time of the two matmuls of prefill attention over the visible pairs.
        states_s: time to write the states of recurrent layers once per prompt, and to read and
            write them in each decode step.
    """

    num_output_tokens: int
    kv_bytes: int
    num_steps: int
    kv_s: float
    weights_s: float
    prefill_s: float
    attention_s: float
    states_s: float

    @property
    def total_s(self) -> float:
        return self.kv_s + self.weights_s + self.prefill_s + self.attention_s + self.states_s

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.total_s

    def __str__(self) -> str:
        return (
            f"KV {self.kv_bytes / 1e12:.2f} TB {self.kv_s:.3f} s + weights of "
            f"{self.num_steps} steps {self.weights_s:.3f} s + prefill {self.prefill_s:.3f} s + "
            f"prefill attention {self.attention_s:.3f} s + states {self.states_s:.3f} s = "
            f"{self.total_s:.3f} s for {self.num_output_tokens:,} tokens = "
            f"{self.tokens_per_second:,.0f} tok/s"
        )


def throughput_roofline(workload: Workload, size: ModelSize, card: CardRates) -> Roofline:
    """The roofline of a whole workload on ``card``. Prefill computes a request's first token."""
    lengths = [len(prompt) for prompt in workload.prompts]
    # A decode step reads its context, which includes the token that it computes.
    num_read = sum(
        (n - 1) * length + n * (n - 1) // 2
        for length, n in zip(lengths, workload.num_outputs, strict=True)
    )
    num_visible_pairs = sum(n * (n + 1) // 2 for n in lengths)
    kv_bytes = num_read * size.kv_bytes_per_token
    state_bytes = sum(2 * n - 1 for n in workload.num_outputs) * size.state_bytes
    weights_s, num_steps = _weights_seconds(workload.num_outputs, size, card)
    return Roofline(
        num_output_tokens=workload.num_output_tokens,
        kv_bytes=kv_bytes,
        num_steps=num_steps,
        kv_s=kv_bytes / card.read_bandwidth,
        weights_s=weights_s,
        prefill_s=2 * size.num_layer_weights_per_token * sum(lengths) / card.matrix_rate,
        attention_s=size.pair_operations * num_visible_pairs / card.matrix_rate,
        states_s=state_bytes / card.read_bandwidth,
    )


def _weights_seconds(num_outputs: list[int], size: ModelSize, card: CardRates) -> tuple[float, int]:
    """Seconds of all decode steps, and the number of steps."""
    num_ending = Counter(num_outputs)
    num_running = len(num_outputs)
    num_steps = max(num_outputs)
    num_multiplied = size.num_layer_weights_per_token + size.num_head_weights
    seconds = 0.0
    for step in range(num_steps):
        num_running -= num_ending[step]
        read_s = size.num_weights_read(num_running) * NUM_BYTES / card.read_bandwidth
        seconds += max(read_s, 2 * num_multiplied * num_running / card.matrix_rate)
    return seconds, num_steps


@dataclass(frozen=True)
class LatencyRoofline:
    """Lower bounds in seconds of a decode step of one request."""

    weights_s: float
    kv_s: float

    def __str__(self) -> str:
        return (
            f"weights {self.weights_s * 1e3:.3f} ms per token (KV and states, not counted in the "
            f"fraction: {self.kv_s * 1e3:.3f} ms more)"
        )


def latency_roofline(workload: Workload, size: ModelSize, card: CardRates) -> LatencyRoofline:
    """The roofline of a workload of one request: weights, and KV and states in the mean step."""
    num_outputs = workload.num_outputs[0]
    mean_context = len(workload.prompts[0]) + num_outputs / 2
    return LatencyRoofline(
        weights_s=size.num_weights_read(1) * NUM_BYTES / card.read_bandwidth,
        kv_s=(mean_context * size.kv_bytes_per_token + 2 * size.state_bytes) / card.read_bandwidth,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="0.6b", choices=MODELS)
    parser.add_argument("workload", nargs="?", default="nano", choices=WORKLOADS)
    parser.add_argument("--read", type=float, help="TB/s of another card")
    parser.add_argument("--multiply", type=float, help="TFLOP/s of another card")
    options = parser.parse_args()
    if (options.read is None) != (options.multiply is None):
        parser.error("--read and --multiply go together")
    size = ModelSize.from_config(model_config(options.model))
    if options.read is None:
        require_gpu(hint="; --read and --multiply give the rates of another one")
        card = card_rates()
        rates = str(card)
    else:
        card = CardRates("given", "", options.read * 1e12, options.multiply * 1e12)
        rates = f"{options.read:.2f} TB/s read, {options.multiply:.0f} TFLOP/s"
    print(f"{rates}: {throughput_roofline(make_workload(options.workload), size, card)}")
    single = latency_workload(LATENCY.prompt[0], LATENCY.output[0])
    print(f"batch 1: {latency_roofline(single, size, card)}")


if __name__ == "__main__":
    main()
