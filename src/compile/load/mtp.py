"""Load the multi-token prediction layer in the checkpoint of a model.

With several such layers the first one is used: it is applied again to its own results.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import InvalidInputError
from ..model.loaded import LoadedDrafter, LoadedModel
from ..model.mtp_head import MtpHead, randomize
from .build_module import read_weights
from .checkpoint import Checkpoint, CheckpointPart, as_input_error, files_of
from .load import read_config
from .mtp_names import parameter_of
from .quantization_schemes import scheme_of
from .quantized_load import quantization_of, quantize_module, read_quantized, stays_quantised
from .source import ModelSource

METHOD = "speculative_config.method"
_NUMBERS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


def load_mtp(target: LoadedModel, load_format: str) -> LoadedDrafter:
    """The drafter in the files of a loaded target, with the target's dtype and quantization.

    Args:
        load_format: as in :func:`.load_model`.

    Raises:
        InvalidInputError: the files have no such layer, or it is damaged.
        UnsupportedModelError: its quantization is unknown.
    """
    main, name = target.module, target.files
    # A quantised model's own config does not have its quantization.
    of_files = target.config if name is None else read_config(ModelSource(name, name))
    config = mtp_config(of_files, name or target.architecture)
    options: dict[str, Any] = {"quantization": None, "is_quantized_at_load": False}
    weights: dict[str, Any] = {}
    if load_format == "dummy":
        with torch.random.fork_rng(devices=_devices(target)), target.device:
            torch.manual_seed(0)
            module: PreTrainedModel = MtpHead._from_config(config, dtype=target.dtype, main=main)
            randomize(module)
    elif name is None:
        raise InvalidInputError(METHOD, "mtp", "needs a model in files, not in memory")
    else:
        with as_input_error(name, "must have the weights of its multi-token prediction layer"):
            module, weights, options["quantization"] = _read(target, config, name, of_files)
    if target.is_quantized_at_load:
        weights, options["quantization"] = quantize_module(module)
        options["is_quantized_at_load"] = True
    module.tie(main, target.head)  # type: ignore[operator]
    loaded = replace(
        target.without_shard(),
        module=module.eval(),
        config=module.config,
        recurrent=[],
        quantized=weights,
        names=None,
        aux_layers=(),
        num_hidden_inputs=module.config.hidden_size,
        **options,
    )
    return LoadedDrafter("mtp", loaded, target.vocab_size)


def mtp_config(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """The config of a model's first layer for multi-token prediction.

    Raises:
        InvalidInputError: the config has no such layer. ``name`` is the model's.
    """
    own: Any = copy.deepcopy(config.get_text_config(decoder=True))
    if not any(getattr(own, number, None) for number in _NUMBERS):
        limit = f"needs a model with a multi-token prediction layer; the config of {name} has none"
        raise InvalidInputError(METHOD, "mtp", limit)
    own.num_mtp_layers = 1
    for types, default in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(own, types, None) is not None:
            given = getattr(own, f"mtp_{types}", None) or [default]
            setattr(own, f"mtp_{types}", given[:1])
    own._name_or_path = name
    if quantization_of(own) is not None:
        del own.quantization_config
    return own.get_mtp_config()  # type: ignore[no-any-return]


def _read(
    target: LoadedModel, config: PreTrainedConfig, name: str, of_files: PreTrainedConfig
) -> tuple[PreTrainedModel, dict[str, Any], str | None]:
    """The module, its quantised weights by name, and the name of their scheme."""
    whole = Checkpoint(files_of(name, allow_patterns=["*.json", "*.safetensors"]))
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    names = {new: old for old in whole.names if (new := parameter_of(old, num_layers)) is not None}
    if not names:
        limit = "needs a multi-token prediction layer; the files have no tensors of one"
        raise InvalidInputError(METHOD, "mtp", limit)
    checkpoint = CheckpointPart(whole, names)
    main, dtype = target.module, target.dtype
    options: dict[str, Any] = {"config": config, "dtype": dtype, "main": main}
    found = quantization_of(of_files)
    if found is not None and stays_quantised(of_files):
        scheme = scheme_of(name, found)
        end = f".{scheme.marker}"
        if any(new.endswith(end) for new in names):
            layers = {_layer(new): _layer(old) for new, old in names.items()}
            own = replace(scheme, is_excluded=lambda n: scheme.is_excluded(layers.get(n, n)))
            with torch.device("meta"):
                skeleton = MtpHead(config, main)
            read = read_quantized(
                checkpoint, name, skeleton, own, target.device, is_made=False, **options
            )
            return *read, scheme.name
    state = {new: checkpoint.get(new) for new in names}
    module = read_weights(MtpHead, None, name, state_dict=state, **options)
    return module.to(target.device), {}, None  # type: ignore[arg-type]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _devices(target: LoadedModel) -> list[torch.device]:
    return [target.device] if target.device.type == "cuda" else []
