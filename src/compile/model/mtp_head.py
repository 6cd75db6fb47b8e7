"""The multi-token prediction layer of a model, as a module that the probe and the trace can call.

transformers' ``MtpModel`` builds the layer from the classes of the main model. This module gives it
the arguments of a causal language model: token ids, positions and the rows of the logits. The
hidden states of the main model are an input of the step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.modeling_outputs import CausalLMOutput

from .aux_states import given_hidden
from .forward import cache_parameter


class MtpHead(MtpModel):  # type: ignore[misc]
    """The first layer for multi-token prediction::

        x_p = projection(cat(norm(embedding(token p + 1)), norm(hidden_p)))
        hidden'_p = norm(decoder_layer(x_p)), logits_p = head(hidden'_p)

    Args:
        config: of the layer, from ``get_mtp_config()``.
        main: the model that it was trained for. Only its classes are used; :meth:`tie` sets its
            embedding, its head and its rotary embedding.
    """

    def __init__(self, config: PreTrainedConfig, main: PreTrainedModel) -> None:
        decoder = SimpleNamespace(layers=main.get_decoder().layers)
        classes: Any = SimpleNamespace(
            config=SimpleNamespace(get_mtp_config=lambda: config),
            get_decoder=lambda: decoder,
            get_input_embeddings=lambda: None,
            lm_head=None,
        )
        super().__init__(classes, 1)
        strict = (
            *(self._keep_in_fp32_modules_strict or ()),
            *(main._keep_in_fp32_modules_strict or ()),
        )
        self._keep_in_fp32_modules_strict = set(strict)
        self._has_axes = False
        self._cache_name = cache_parameter(MtpLayer.forward)

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """That of every model; ``MtpModel`` has one for its main model's files."""
        own: Any = PreTrainedModel.from_pretrained
        return own.__func__(cls, *args, **options)

    @classmethod
    def is_custom_code(cls) -> bool:
        """transformers applies the conversions of weights for this type of model."""
        return False

    def tie(self, main: PreTrainedModel, head: Any) -> None:
        """Use the embedding and the rotary embedding of ``main``, and its head with all rows."""
        self.tie_with_main_model(main)
        self.shared_head = head
        self._has_axes = hasattr(self.rotary_emb, "mrope_section")

    def get_output_embeddings(self) -> Any:
        """The head of the main model."""
        return self.shared_head

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **_: Any
    ) -> CausalLMOutput:
        """Logits ``[1, S, V]`` of the tokens ``logits_to_keep``.

        Args:
            input_ids: int64 ``[1, T]``, the token at position p + 1 for slot p.
            position_ids: int64 ``[1, T]``, the slots.
        """
        embedded = self.embed_tokens(input_ids)
        hidden = given_hidden(embedded)
        positions = position_ids + 1
        rotation = None
        if self.rotary_emb is not None:
            # Text has the same position on each of the three axes of such a model.
            axes = positions.expand(3, *positions.shape) if self._has_axes else positions
            rotation = self.rotary_emb(embedded, position_ids=axes)
        no_cache: Any = None
        masks = self.create_masks_for_mtp_layer(0, embedded, no_cache, positions)
        cache = {} if self._cache_name is None else {self._cache_name: None}
        hidden = self.layers[0](
            embedded,
            hidden,
            position_embeddings=rotation,
            position_ids=positions,
            **cache,
            **masks,
        )
        if self.use_shared_post_norm:
            hidden = self.shared_post_norm(hidden)
        logits: Any = self._project_to_logits(hidden[:, logits_to_keep, :])
        return CausalLMOutput(logits=logits)


def randomize(module: PreTrainedModel) -> None:
    """Random weights for benchmarks and tests: matrices from a normal distribution."""
    std = getattr(module.config, "initializer_range", None) or 0.02
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std)
