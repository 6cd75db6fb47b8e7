"""``LoadedModel``: a model on its device, and the properties of it that an engine reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig, PreTrainedModel

    from ...kernels.matmul.quantized.quantized_weight import QuantizedWeight
    from ...kernels.recurrent.recurrent_spec import RecurrentSpec
    from ..weights import Cut, WeightNames


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that a process has.

    Attributes:
        rank: from 0. num_ranks: size of the group; 1 is a whole model.
    """

    rank: int = 0
    num_ranks: int = 1


WHOLE = Shard()
Kind = Literal["draft_model", "mtp", "eagle3"]
"""Kinds of drafters, see :mod:`..captured_drafter`."""
# The first of these that a config has is the number of positions that the model supports: by
# transformers' name, of the decoder of a model that also has an encoder, of MPT and of BLOOM.
_CONTEXT_FIELDS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device.

    Attributes:
        tokenizer: None if the model came without one.
        eos_token_ids: the tokens that end generation; each is below ``vocab_size``.
        dropped_eos_token_ids: those that the files name but the vocabulary lacks.
        cuts: parts of the parameters of which a rank has a part, by name.
        names: creates the names of the checkpoint's tensors; None for a module in memory, which
            uses its own names.
        vocab_size: rows of the LM head, which may exceed the tokenizer's vocabulary.
        max_position_embeddings: the longest context in tokens, from the config or from the caller.
        shard: the part of the model that ``module`` is.
        vocab_sizes: of each rank's head in order; None if each has all of it.
        whole_head: the head with the rows of all ranks, if :func:`.load_model` keeps it.
        model_type: of the config.
        recurrent: its recurrent calls, after the probe.
        quantized: weights to keep quantised, by parameter name; None stands for float16. Empty
            after the capture.
        default_sampling: settings of the generation config, by names of ``SamplingParams``.
        ignored_settings: names of its other settings that would change the tokens of ``generate``.
        quantization: a description of how a checkpoint's layers are quantised; their parameters are
            stand-ins (:mod:`..weights`).
        is_quantized_at_load: whether the loader quantised them, because the checkpoint is not
            quantised.
        files: the folder or hub id of its files; None for a module in memory.
        aux_layers: numbers of decoder layers. A step also returns the hidden states that enter
            them; the number of layers stands for those that leave the last one.
        num_hidden_inputs: elements per token of the input ``hidden_states`` of its steps; 0 if it
            has no such input.
        module, config: for a restored model (:mod:`..start_record`), a :class:`TensorTree` and
            None.
    """

    module: PreTrainedModel
    config: PreTrainedConfig
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_position_embeddings: int
    shard: Shard = WHOLE
    vocab_sizes: list[int] | None = None
    whole_head: nn.Module | None = None
    model_type: str | None = None
    recurrent: list[RecurrentSpec] = field(default_factory=list)
    quantized: dict[str, QuantizedWeight | None] = field(default_factory=dict)
    quantization: str | None = None
    default_sampling: dict[str, Any] = field(default_factory=dict)
    ignored_settings: list[str] = field(default_factory=list)
    is_quantized_at_load: bool = False
    dropped_eos_token_ids: list[int] = field(default_factory=list)
    cuts: dict[str, Cut] = field(default_factory=dict)
    names: Callable[[], WeightNames] | None = None
    files: str | None = None
    aux_layers: tuple[int, ...] = ()
    num_hidden_inputs: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV caches."""
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def architecture(self) -> str:
        module: object = self.module
        return module.architecture if isinstance(module, TensorTree) else type(module).__name__

    @property
    def head(self) -> Any:
        """The LM head, with all rows."""
        assert self.vocab_sizes is None or self.whole_head is not None, "it was not kept"
        return self.whole_head or self.module.get_output_embeddings()

    def without_shard(self) -> LoadedModel:
        """This description for a whole module in place of a rank's part."""
        return replace(self, shard=WHOLE, vocab_sizes=None, whole_head=None, cuts={})

    def quantized_by_id(self) -> dict[int, QuantizedWeight | None]:
        """``quantized`` by the ``id`` of the parameter."""
        named = self.module.named_parameters(remove_duplicate=False)
        return {id(p): self.quantized[name] for name, p in named if name in self.quantized}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDrafter:
    """A drafter before its capture.

    Attributes:
        token_ids: int64 ``[V_draft]``, the target's id of each row of the drafter's head; None if
            the heads have the same rows.
        target_vocab_size: rows of the target's head.
        target_layers: ``aux_layers`` of the target, whose hidden states the drafter reads; empty
            for the states before the target's head.
        combine: a module with ``in_features``: from the target's hidden states of several layers,
            ``[T, n * H_target]``, to the input ``[T, H]`` of a step; None if these are the same.
        recycles_aux: whether the drafter is applied again to :attr:`.StepOutputs.aux`, instead of
            the states before its own head.
    """

    kind: Kind
    loaded: LoadedModel
    target_vocab_size: int
    token_ids: Tensor | None = None
    target_layers: tuple[int, ...] = ()
    combine: Any | None = None
    recycles_aux: bool = False


class TensorTree(nn.Module):
    """Parameters and buffers of a model under their names. It cannot compute.

    Args:
        architecture: name of the model's class.
    """

    def __init__(self, architecture: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.architecture = architecture
        self.eval()
        for name, tensor in tensors:
            *path, last = name.split(".")
            part: nn.Module = self
            for step in path:
                if step not in part._modules:
                    part.add_module(step, nn.Module())
                part = part.get_submodule(step)
            if isinstance(tensor, nn.Parameter):
                part.register_parameter(last, tensor)
            else:
                part.register_buffer(last, tensor)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by name. A tensor with two names occurs twice."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype have one shape and equal bytes: NaN equals itself, and 0 is
    not -0."""
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*parts)


def longest_context(config: PreTrainedConfig) -> int | None:
    """The most tokens that a model supports according to its config; None if the config gives no
    number."""
    text_config = config.get_text_config(decoder=True)
    for name in _CONTEXT_FIELDS:
        limit = getattr(text_config, name, None)
        if limit is not None:
            return limit if isinstance(limit, int) and limit >= 1 else None
    return None
