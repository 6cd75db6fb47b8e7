"""Load the drafter of EAGLE-3 from a folder.

Configs have two forms. In the first, the config of a llama has additional fields. In the form of
the package speculators, ``transformer_layer_config`` has the config of the decoder layers, and the
additional fields are beside it::

    draft_vocab_size                    rows of the head; default: the vocabulary
    eagle_aux_hidden_state_layer_ids    layers of the target, also in ``eagle_config``
    norm_before_residual, norm_output   of the layers, see :mod:`..model.eagle3_head`

Tensors: ``fc`` combines the target's hidden states, ``input_norm`` or ``fc_norm.i`` are norms
before it, ``layers.i`` (``midlayer`` in the first form), ``norm``, ``lm_head``, ``d2t`` (the
target's id less the draft's id), and optionally ``embed_tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...errors import InvalidInputError
from ..model.eagle3_head import Eagle3Head, HiddenCombiner
from ..model.loaded import LoadedDrafter, LoadedModel
from ..model.mtp_head import randomize
from .build_module import read_weights
from .checkpoint import Checkpoint, CheckpointPart, as_input_error, check_float, files_of
from .quantization_schemes import scheme_of
from .quantized_load import read_quantized
from .source import ModelSource

MODEL_KEY = "speculative_config.model"
_NUM_LAYERS_READ = 3
_OWN = ("layers.", "norm.", "lm_head.", "embed_tokens.")


class Eagle3Config(NamedTuple):
    """A checked config.

    Attributes:
        layers: of the decoder layers. target_layers: ``aux_layers`` of the target; empty for the
            default, which depends on its number of layers.
        has_norm_output: whether the drafter is applied again to normed hidden states.
        quantization: the ``quantization_config``, or None.
    """

    layers: PreTrainedConfig
    target_layers: tuple[int, ...]
    has_norm_output: bool
    quantization: Mapping[str, Any] | None


def read_eagle3_config(source: ModelSource) -> Eagle3Config:
    """The config of a drafter's folder.

    Raises:
        InvalidInputError: the file is missing or damaged, or has a setting that is not supported.
    """
    with as_input_error(source.name, "must have the config.json of an EAGLE-3 drafter"):
        folder = files_of(source.files, allow_patterns=["*.json", "*.safetensors"])
        given = json.loads((folder / "config.json").read_text())
        of_layers = dict(given.get("transformer_layer_config") or given)
        # Only in this form are both vocabularies in one config.
        of_layers.pop("architectures", None)
        quantization = given.get("quantization_config") or of_layers.pop(
            "quantization_config", None
        )
        of_layers.pop("quantization_config", None)
        layers: Any = AutoConfig.for_model(of_layers.pop("model_type"), **of_layers)
        nested = given.get("eagle_config") or {}
        settings = {**nested, **given}
        layers.draft_vocab_size = settings.get("draft_vocab_size") or layers.vocab_size
        layers.norm_before_residual = bool(settings.get("norm_before_residual", False))
        ids = settings.get("eagle_aux_hidden_state_layer_ids") or ()
        if not all(isinstance(number, int) and number >= 0 for number in ids):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids = {ids}")
    if settings.get("use_aux_hidden_state") is False:
        limit = "must read three layers of the target: use_aux_hidden_state = false is unsupported"
        raise InvalidInputError(MODEL_KEY, source.name, limit)
    has_norm_output = bool(settings.get("norm_output", False))
    return Eagle3Config(layers, tuple(ids), has_norm_output, quantization)


def target_layers(config: Eagle3Config, target: LoadedModel) -> tuple[int, ...]:
    """The layers of the target whose hidden states the drafter reads.

    Raises:
        InvalidInputError: the target has fewer layers.
    """
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    ids = config.target_layers or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= number <= num_layers for number in ids):
        limit = f"reads the target's layers {ids}, and the target has {num_layers}"
        raise InvalidInputError(MODEL_KEY, config.layers.model_type, limit)
    return ids


def load_eagle3(source: ModelSource, target: LoadedModel, load_format: str) -> LoadedDrafter:
    """The drafter in a folder, with the target's dtype.

    Args:
        target: loaded with ``aux_layers`` from :func:`target_layers`.
        load_format: as in :func:`.load_model`.

    Raises:
        InvalidInputError: the files are missing or damaged, or do not fit the target.
        UnsupportedModelError: its layers or its quantization are unknown.
    """
    config = read_eagle3_config(source)
    layers = target_layers(config, target)
    with as_input_error(source.name, "must have the weights of an EAGLE-3 drafter"):
        if load_format == "dummy":
            parts = _dummy(config, target, len(layers))
        else:
            parts = _Reader(source, config, target).read()
    module, of_head = parts.module, parts.module.config.draft_vocab_size
    num_read = len(layers) * target.config.get_text_config(decoder=True).hidden_size
    if parts.combine.in_features != num_read:
        limit = f"reads {parts.combine.in_features} hidden values per token, not {num_read}"
        raise InvalidInputError(MODEL_KEY, source.name, limit)
    ids = parts.token_ids
    if ids is None and of_head != target.vocab_size:
        limit = f"needs d2t: it has {of_head} tokens, and the target {target.vocab_size}"
        raise InvalidInputError(MODEL_KEY, source.name, limit)
    if ids is not None:
        _check_ids(source.name, ids, of_head, target.vocab_size)
    loaded = replace(
        target.without_shard(),
        module=module.eval(),
        config=module.config,
        vocab_size=of_head,
        recurrent=[],
        quantized=parts.quantized,
        quantization=parts.scheme,
        is_quantized_at_load=False,
        names=None,
        aux_layers=() if config.has_norm_output else (len(module.layers),),  # type: ignore[arg-type]
        num_hidden_inputs=module.config.hidden_size,
    )
    return LoadedDrafter(
        "eagle3",
        loaded,
        target.vocab_size,
        token_ids=ids,
        target_layers=layers,
        combine=parts.combine,
        recycles_aux=not config.has_norm_output,
    )


def has_own_head(source: ModelSource) -> bool:
    """Whether a drafter's files have its LM head. Raises as :func:`load_eagle3`."""
    with as_input_error(source.name, "must have the weights of an EAGLE-3 drafter"):
        folder = files_of(source.files, allow_patterns=["*.json", "*.safetensors"])
        return any(_own_name(name) == "lm_head.weight" for name in Checkpoint(folder).names)


class _Parts(NamedTuple):
    module: PreTrainedModel
    combine: HiddenCombiner
    token_ids: Tensor | None
    quantized: dict[str, Any]
    scheme: str | None


class _Reader:
    """Reads the tensors of a drafter to the target's device, in the target's dtype."""

    def __init__(self, source: ModelSource, config: Eagle3Config, target: LoadedModel) -> None:
        self._name, self._config, self._target = source.name, config, target
        folder = files_of(source.files, allow_patterns=["*.json", "*.safetensors"])
        self._whole = Checkpoint(folder)
        self._names = {_own_name(old): old for old in self._whole.names}

    def read(self) -> _Parts:
        module, quantized, scheme = self._head()
        eps = self._config.layers.rms_norm_eps
        norms = [f"fc_norm.{i}.weight" for i in range(_NUM_LAYERS_READ)]
        combine = HiddenCombiner(
            self._tensor("fc.weight"),
            self._tensor("input_norm.weight") if "input_norm.weight" in self._names else None,
            [self._tensor(name) for name in norms if name in self._names],
            eps,
        )
        ids = None
        if "d2t" in self._names:
            offsets = self._whole.get(self._names["d2t"]).long()
            ids = (torch.arange(len(offsets)) + offsets).to(self._target.device)
        if "mask_hidden" in self._names:
            limit = "has mask_hidden: drafts of several tokens in one pass are not supported"
            raise InvalidInputError(MODEL_KEY, self._name, limit)
        return _Parts(module, combine, ids, quantized, scheme)

    def _tensor(self, name: str) -> Tensor:
        """A tensor that is not quantised."""
        tensor = self._whole.get(self._names[name])
        check_float(name, tensor)
        return tensor.to(device=self._target.device, dtype=self._target.dtype)

    def _head(self) -> tuple[PreTrainedModel, dict[str, Any], str | None]:
        """The module, its quantised weights by name, and the name of their scheme. What the files
        lack is the target's."""
        config, target = self._config.layers, self._target
        names = {new: old for new, old in self._names.items() if new.startswith(_OWN)}
        checkpoint = CheckpointPart(self._whole, names)
        shared: dict[str, Any] = {}
        if "lm_head.weight" not in names:
            shared["lm_head"] = target.head
        if "embed_tokens.weight" not in names:
            shared["embed_tokens"] = target.module.get_input_embeddings()
        state: dict[str, Any] = {f"{part}.weight": owner.weight for part, owner in shared.items()}
        options: dict[str, Any] = {"config": config, "dtype": target.dtype}
        found = self._config.quantization
        scheme = None if found is None else scheme_of(self._name, found)
        quantized: dict[str, Any]
        if scheme is not None:
            with torch.device("meta"):
                skeleton = Eagle3Head(config)
            module, quantized = read_quantized(
                checkpoint,
                self._name,
                skeleton,
                scheme,
                target.device,
                is_made=False,
                more=state,
                **options,
            )
        else:
            state |= {new: checkpoint.get(new) for new in names}
            module = read_weights(Eagle3Head, None, self._name, state_dict=state, **options)
            module, quantized = module.to(target.device), {}  # type: ignore[arg-type]
        for part, owner in shared.items():
            setattr(module, part, owner)
        return module, quantized, None if scheme is None else scheme.name


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _check_ids(name: str, ids: Tensor, num_drafted: int, vocab_size: int) -> None:
    is_known = bool((ids >= 0).all()) and bool((ids < vocab_size).all())
    if len(ids) != num_drafted or not is_known or len(ids.unique()) != len(ids):
        limit = f"must have in d2t an own token of the target's {vocab_size} for each of its tokens"
        raise InvalidInputError(MODEL_KEY, name, limit)


def _dummy(config: Eagle3Config, target: LoadedModel, num_layers: int) -> _Parts:
    """Random weights."""
    devices = [target.device] if target.device.type == "cuda" else []
    hidden_size = target.config.get_text_config(decoder=True).hidden_size
    with torch.random.fork_rng(devices=devices), target.device:
        torch.manual_seed(0)
        module: PreTrainedModel = Eagle3Head._from_config(config.layers, dtype=target.dtype)
        randomize(module)
        size, width = config.layers.hidden_size, num_layers * hidden_size
        linear = torch.randn(size, width, dtype=target.dtype) * width**-0.5
        ids = torch.arange(config.layers.draft_vocab_size)
    combine = HiddenCombiner(linear, None, [], config.layers.rms_norm_eps)
    return _Parts(module, combine, ids, {}, None)
