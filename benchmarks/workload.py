"""The models and workloads that the benchmarks measure.

Workloads draw their values in the order of the peer's ``bench_vllm.py`` (seed 0) and
``bench_more.py`` (seed 1): each prompt (its length, then its tokens), then every output length. So
both engines get the same token ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.other_models import OTHER_MODELS

LARGEST_TOKEN_ID = 10_000

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "tie_word_embeddings": False,
    },
    # A mixture of experts, and its first layers, because 61 GB of random weights take long to
    # create.
    "30b-a3b": _QWEN3_MOE,
    "30b-a3b-4": {**_QWEN3_MOE, "num_hidden_layers": 4},
    "llama-8b": _LLAMA_8B,
    # Llama-3.3-70B: for four GPUs.
    "llama-70b": {
        **_LLAMA_8B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    # Heads of 256; five of six layers see a window of 1,024.
    "gemma3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5
        + ["sliding_attention"] * 4,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_sliding_window": None,
        "vocab_size": 262208,
    },
    # For a machine without a GPU: checks that a benchmark runs; its times mean nothing.
    "tiny": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": LARGEST_TOKEN_ID + 240,
    },
}
MODELS = (*_SHAPES, *OTHER_MODELS)


def model_config(name: str) -> dict[str, Any]:
    """``config.json`` of a model in its real shape (``tiny``: an artificial one)."""
    if name in OTHER_MODELS:
        return dict(OTHER_MODELS[name])
    config = {**_QWEN3, **_SHAPES[name]}
    config["max_window_layers"] = config["num_hidden_layers"]
    return config


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """A temporary folder with only the model's ``config.json``."""
    with TemporaryDirectory(prefix=f"{name}-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(name), indent=2))
        yield Path(folder)


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once.

    Attributes:
        prompts: token ids of each.
        num_outputs: tokens that each generates; end tokens are ignored.
    """

    name: str
    prompts: list[list[int]]
    num_outputs: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(p) + n for p, n in zip(self.prompts, self.num_outputs, strict=True))


@dataclass(frozen=True)
class Load:
    """How a workload is drawn: lengths are uniform in the given (low, high), ends included.

    Attributes:
        max_model_len: also passed to the peer, so that both reserve the same memory.
    """

    seed: int
    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    max_model_len: int

    def draw(self, name: str) -> Workload:
        rng = random.Random(self.seed)
        prompts = [
            [rng.randint(0, LARGEST_TOKEN_ID) for _ in range(_length(rng, self.prompt))]
            for _ in range(self.num_requests)
        ]
        return Workload(name, prompts, [_length(rng, self.output) for _ in prompts])


def _length(rng: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    # The peer draws no value for a fixed length.
    return low if low == high else rng.randint(low, high)


_NANO = (100, 1024)
LOADS = {
    "nano": Load(0, 256, _NANO, _NANO, 4096),
    "nano32": Load(1, 32, _NANO, _NANO, 16384),
    "1024": Load(1, 1024, _NANO, _NANO, 16384),
    "long": Load(1, 32, (8192, 8192), (256, 256), 16384),
    # Prompts alone, as for a classifier: every request ends with its first token.
    "short": Load(3, 2000, (20, 200), (1, 1), 4096),
    "tiny": Load(0, 8, (8, 64), (8, 32), 128),
}
# Batch 1, greedy. Seed, prompt and output length are those of the peer's latency mode.
LATENCY = Load(1, 1, (128, 128), (512, 512), 4096)
WORKLOADS = tuple(LOADS)


def make_workload(name: str) -> Workload:
    return LOADS[name].draw(name)


def latency_workload(num_prompt_tokens: int, num_output_tokens: int) -> Workload:
    """One request, with the tokens that the peer's latency mode draws."""
    lengths = (num_prompt_tokens,) * 2, (num_output_tokens,) * 2
    return Load(LATENCY.seed, 1, *lengths, LATENCY.max_model_len).draw("batch 1")
