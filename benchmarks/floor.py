"""The least time a workload can take on a GPU: the bytes that must be read, and the operations
that must be done, at the rates measured on the card.

    python -m benchmarks.floor [MODEL] [WORKLOAD]
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from benchmarks.workload import Workload, make_workload, model_config

# H100 SXM: read bandwidth and dense bfloat16 matrix rate, both measured.
READ_BANDWIDTH = 3.05e12  # bytes/s
MATRIX_RATE = 798e12  # operations/s
_NUM_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class ModelSize:
    """What the arithmetic needs of a dense decoder with gated MLPs and grouped heads.

    Attributes:
        num_layer_weights: elements of the matrices of all layers; norms are left out.
        num_head_weights: elements of the LM head.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_layer_weights: int
    num_head_weights: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelSize:
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        num_q_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        attention = hidden * head_dim * (2 * num_q_heads + 2 * num_kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        return cls(
            config["num_hidden_layers"],
            num_q_heads,
            num_kv_heads,
            head_dim,
            config["num_hidden_layers"] * (attention + mlp),
            config["vocab_size"] * hidden,
        )

    @property
    def kv_bytes_a_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _NUM_BYTES

    @property
    def num_step_weights(self) -> int:
        """Elements read by any step, however small."""
        return self.num_layer_weights + self.num_head_weights


@dataclass(frozen=True)
class Floor:
    """Seconds at least, by what takes them.

    Attributes:
        kv_s: reading the KV cache in decode steps, once a step and request.
        weights_s: a decode step of b requests reads all weights or multiplies them by b rows,
            whichever takes longer; all requests run at once.
        prefill_s: multiplying the layers' weights by all prompt tokens.
        attention_s: the two products of prefill attention over the visible pairs.
    """

    num_output_tokens: int
    kv_bytes: int
    num_steps: int
    kv_s: float
    weights_s: float
    prefill_s: float
    attention_s: float

    @property
    def total_s(self) -> float:
        return self.kv_s + self.weights_s + self.prefill_s + self.attention_s

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.total_s

    def __str__(self) -> str:
        return (
            f"KV {self.kv_bytes / 1e12:.2f} TB {self.kv_s:.3f} s + weights of "
            f"{self.num_steps} steps {self.weights_s:.3f} s + prefill {self.prefill_s:.3f} s + "
            f"prefill attention {self.attention_s:.3f} s = {self.total_s:.3f} s for "
            f"{self.num_output_tokens:,} tokens = {self.tokens_per_second:,.0f} tok/s"
        )


RATES = f"{READ_BANDWIDTH / 1e12:.2f} TB/s read, {MATRIX_RATE / 1e12:.0f} TFLOP/s"


def throughput_floor(workload: Workload, size: ModelSize) -> Floor:
    """The floor of a whole workload. A request's first token comes from its prefill."""
    lengths = [len(prompt) for prompt in workload.prompts]
    # A decode step reads its context, the token it computes included.
    num_read = sum(
        (n - 1) * length + n * (n - 1) // 2
        for length, n in zip(lengths, workload.num_outputs, strict=True)
    )
    num_visible_pairs = sum(n * (n + 1) // 2 for n in lengths)
    kv_bytes = num_read * size.kv_bytes_a_token
    weights_s, num_steps = _weights_seconds(workload.num_outputs, size)
    return Floor(
        num_output_tokens=workload.num_output_tokens,
        kv_bytes=kv_bytes,
        num_steps=num_steps,
        kv_s=kv_bytes / READ_BANDWIDTH,
        weights_s=weights_s,
        prefill_s=2 * size.num_layer_weights * sum(lengths) / MATRIX_RATE,
        attention_s=4
        * size.head_dim
        * size.num_q_heads
        * size.num_layers
        * num_visible_pairs
        / MATRIX_RATE,
    )


def _weights_seconds(num_outputs: list[int], size: ModelSize) -> tuple[float, int]:
    """Seconds of all steps, and how many there are."""
    num_ending = Counter(num_outputs)
    num_running = len(num_outputs)
    num_steps = max(num_outputs)
    read_s = size.num_step_weights * _NUM_BYTES / READ_BANDWIDTH
    seconds = 0.0
    for step in range(num_steps):
        num_running -= num_ending[step]
        seconds += max(read_s, 2 * size.num_step_weights * num_running / MATRIX_RATE)
    return seconds, num_steps


@dataclass(frozen=True)
class LatencyFloor:
    """Seconds a decode step of one request takes at least."""

    weights_s: float
    kv_s: float

    def __str__(self) -> str:
        return (
            f"weights {self.weights_s * 1e3:.3f} ms a token (KV, not counted in the fraction: "
            f"{self.kv_s * 1e3:.3f} ms more)"
        )


def latency_floor(workload: Workload, size: ModelSize) -> LatencyFloor:
    """Of a workload of one request: its weights, and its KV in the mean step."""
    num_outputs = workload.num_outputs[0]
    mean_context = len(workload.prompts[0]) + num_outputs / 2
    return LatencyFloor(
        weights_s=size.num_step_weights * _NUM_BYTES / READ_BANDWIDTH,
        kv_s=mean_context * size.kv_bytes_a_token / READ_BANDWIDTH,
    )


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "0.6b"
    workload = make_workload(sys.argv[2] if len(sys.argv) > 2 else "nano")
    print(f"{RATES}: {throughput_floor(workload, ModelSize.from_config(model_config(model)))}")


if __name__ == "__main__":
    main()
