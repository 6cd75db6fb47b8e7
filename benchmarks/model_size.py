"""The sizes of a model that rooflines need: matrices, experts, KV cache and states.

transformers builds the modules on the meta device, so most architectures are supported. Attention
must have the projections of Llama or DeepSeek, experts must be stacked in one tensor, and
recurrences must have a ``conv1d`` and an ``out_proj``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_BYTES = 2  # bfloat16
_STATE_NUM_BYTES = 4  # float32
_STATE_SIZES = ("mamba_d_state", "ssm_state_size", "linear_key_head_dim")


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a decoder that the arithmetic needs, without norms and weights of convolutions.

    Attributes:
        num_layer_weights: elements of the matrices of all layers that every token uses.
        num_head_weights: elements of the LM head.
        kv_bytes_per_token: of all layers; windows are ignored.
        pair_operations: multiplications and additions per pair of positions, all layers.
        num_expert_weights: elements of one expert per layer, summed over layers.
        num_experts: per layer, 0 for none. top_k: experts per token.
        state_bytes: per request, all recurrent layers.
    """

    num_layer_weights: int
    num_head_weights: int
    kv_bytes_per_token: int
    pair_operations: int
    num_expert_weights: int = 0
    num_experts: int = 0
    top_k: int = 0
    state_bytes: int = 0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelSize:
        modules = list(_meta_model(config).modules())
        layer_weights = expert_weights = num_experts = 0
        kv_width = pair_operations = state_bytes = 0
        for module in modules:
            for name, weight in module.named_parameters(recurse=False):
                if weight.ndim == 3 and not hasattr(module, "padding"):  # not a convolution
                    num_experts = len(weight)
                    expert_weights += weight.numel() // num_experts
                elif weight.ndim == 2 and name == "weight" and not hasattr(module, "padding_idx"):
                    layer_weights += weight.numel()
            if hasattr(module, "o_proj"):
                kv_width += _kv_width(module)
                pair_operations += _pair_operations(module, config)
            elif hasattr(module, "conv1d") and hasattr(module, "out_proj"):
                state_bytes += _state_bytes(module, config)
        head = config["vocab_size"] * config["hidden_size"]
        # The LM head is a separate module even if it shares the weight of the embedding.
        return cls(
            layer_weights - head,
            head,
            kv_width * NUM_BYTES,
            pair_operations,
            expert_weights,
            num_experts,
            config["num_experts_per_tok"] if num_experts else 0,
            state_bytes,
        )

    @property
    def num_layer_weights_per_token(self) -> int:
        """Elements of the layers' matrices that one token is multiplied by."""
        return self.num_layer_weights + self.top_k * self.num_expert_weights

    def num_weights_read(self, num_rows: int) -> float:
        """Elements that a step of ``num_rows`` must read. Of the experts it counts those with a
        row: the expected number if each row's experts are drawn uniformly."""
        dense = self.num_layer_weights + self.num_head_weights
        if not self.num_experts:
            return dense
        missed = (1 - self.top_k / self.num_experts) ** num_rows
        return dense + self.num_experts * (1 - missed) * self.num_expert_weights


def _meta_model(config: dict[str, Any]) -> Any:
    # Imported here, because loads and a peer's process do not need these seconds.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def _kv_width(attention: Any) -> int:
    if hasattr(attention, "kv_a_proj_with_mqa"):
        return attention.kv_a_proj_with_mqa.out_features
    return attention.k_proj.out_features + attention.v_proj.out_features


def _pair_operations(attention: Any, config: dict[str, Any]) -> int:
    """For the matmuls with keys and values as heads, which for a prompt are fewer FLOPs than with
    latents."""
    values = keys = attention.o_proj.in_features
    if hasattr(attention, "kv_a_proj_with_mqa"):
        keys = config["num_attention_heads"] * (
            config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        )
    return 2 * (keys + values)


def _state_bytes(recurrence: Any, config: dict[str, Any]) -> int:
    size = next(config[key] for key in _STATE_SIZES if key in config)
    channels, _, width = recurrence.conv1d.weight.shape
    matrix = recurrence.out_proj.in_features * size * _STATE_NUM_BYTES
    return matrix + channels * (width - 1) * NUM_BYTES
