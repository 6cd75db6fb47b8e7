"""The drafter of EAGLE-3 (Li et al. 2025, arXiv 2503.01840), built from the decoder layers of
transformers.

The first layer reads the embedding of the next token beside the hidden state::

    x_p = cat(input_layernorm(embedding(token p + 1)), hidden_norm(hidden_p))
    a_p = residual_p + attention(x_p),  hidden'_p = a_p + mlp(post_attention_layernorm(a_p))
    logits_p = head(norm(hidden'_p))

where the residual is hidden_p, or its norm with ``norm_before_residual``. Layers behind the first
one are ordinary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ...errors import UnsupportedModelError
from .aux_states import given_hidden

_WIDENED = ("q_proj", "k_proj", "v_proj")


class _FirstLayer:
    """A decoder layer whose attention reads two vectors per token."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    hidden_norm: Any
    post_attention_layernorm: Any
    is_norm_residual: bool

    def forward(self, hidden_states: Tensor, embedded: Tensor, **options: Any) -> Tensor:
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.is_norm_residual else hidden_states
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        between: Tensor = residual + self.self_attn(hidden_states=both, **options)[0]
        result: Tensor = between + self.mlp(self.post_attention_layernorm(between))
        return result


@cache
def _first_of(own: Any) -> type:
    return type(f"Eagle3{own.__name__}", (_FirstLayer, own), {})


class Eagle3Head(PreTrainedModel):
    """Token ids and positions to logits over the draft vocabulary. The hidden states are an input
    of the step.

    Args:
        config: of its decoder layers. Its own attributes: ``draft_vocab_size``, and
            ``norm_before_residual``.

    Raises:
        UnsupportedModelError: the layers of this type of model cannot be widened.
    """

    _supports_sdpa = True
    embed_tokens: Any

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        own: Any = config
        with torch.device("meta"):
            decoder: Any = AutoModel.from_config(config)
        layer_class, norm_class = type(decoder.layers[0]), type(decoder.norm)
        size, eps = own.hidden_size, own.rms_norm_eps
        self.layers = nn.ModuleList(
            layer_class(config, number) for number in range(own.num_hidden_layers)
        )
        first: Any = self.layers[0]
        for name in _WIDENED:
            narrow = getattr(first.self_attn, name, None)
            if not isinstance(narrow, nn.Linear):
                kind = layer_class.__name__
                raise UnsupportedModelError(f"eagle3: {kind} has no linear layer {name} to widen")
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = norm_class(size, eps=eps)
        first.is_norm_residual = bool(getattr(own, "norm_before_residual", False))
        first.__class__ = _first_of(layer_class)  # type: ignore[arg-type]
        self.norm = norm_class(size, eps=eps)
        self.embed_tokens = nn.Embedding(own.vocab_size, size)
        self.lm_head = nn.Linear(size, own.draft_vocab_size, bias=False)
        self.rotary_emb = type(decoder.rotary_emb)(config)
        self.post_init()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def get_output_embeddings(self) -> Any:
        """The head over the draft vocabulary."""
        return self.lm_head

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **_: Any
    ) -> CausalLMOutput:
        """Logits ``[1, S, draft_vocab_size]`` of the tokens ``logits_to_keep``.

        Args:
            input_ids: int64 ``[1, T]``, the token at position p + 1 for slot p.
            position_ids: int64 ``[1, T]``, the slots.
        """
        embedded = self.embed_tokens(input_ids)
        hidden = given_hidden(embedded)
        options = {
            "position_embeddings": self.rotary_emb(hidden, position_ids=position_ids),
            "position_ids": position_ids,
            "attention_mask": None,  # attention is causal
        }
        hidden = self.layers[0](hidden, embedded, **options)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **options)
        hidden = self.norm(hidden)
        return CausalLMOutput(logits=self.lm_head(hidden[:, logits_to_keep, :]))


class HiddenCombiner(nn.Module):
    """From the hidden states of several layers of the target, ``[T, n * H_target]``, to ``[T, H]``:
    optional norms, then a linear layer.

    Args:
        linear: its weight ``[H, n * H_target]``. norm: weight of a norm of all, or None.
        norms: weights of a norm of each layer's hidden states, or empty. eps: of the norms.
    """

    def __init__(
        self, linear: Tensor, norm: Tensor | None, norms: list[Tensor], eps: float
    ) -> None:
        super().__init__()
        self.in_features = linear.shape[1]
        self.linear: Tensor
        self.norm: Tensor | None
        self.norms: Tensor | None
        self.register_buffer("linear", linear)
        self.register_buffer("norm", norm)
        self.register_buffer("norms", torch.cat(norms) if norms else None)
        self._num_norms, self._eps = len(norms), eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[T, H]`` from ``[T, n * H_target]``."""
        for weight, num_parts in ((self.norm, 1), (self.norms, self._num_norms)):
            if weight is not None:
                parts = hidden.unflatten(-1, (num_parts, -1))
                normed = nn.functional.rms_norm(parts, parts.shape[-1:], None, self._eps)
                hidden = normed.flatten(-2) * weight
        return nn.functional.linear(hidden, self.linear)
