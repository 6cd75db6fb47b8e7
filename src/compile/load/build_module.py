"""Build the transformers module of a config, with the weights of its files or random ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...errors import InvalidInputError, UnsupportedModelError
from ..model.loaded import Shard
from .checkpoint import as_input_error, code_not_run, needs_own_code


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class that builds the model: one that also reads images (Mistral 3) if there is no
    text-only class. It only gets text."""
    is_seeing = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if is_seeing and not is_text else AutoModelForCausalLM


def skeleton_of(config: PreTrainedConfig, kind: Any = None, **options: Any) -> PreTrainedModel:
    """The module of ``config`` on the meta device, without weights, built by :func:`auto_class` or
    another class."""
    kind = kind or auto_class(config)
    with torch.device("meta"):
        skeleton: PreTrainedModel = kind.from_config(config, trust_remote_code=False, **options)
    return skeleton


def build_module(
    source: str,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    load_format: str,
    device: torch.device,
    shard: Shard,
) -> PreTrainedModel:
    """The module of ``config``, built on ``device`` if that needs no second copy of its weights.

    Args:
        source: the folder or hub id that transformers reads. name: the model's name, for refusals.
        load_format: "dummy" for random weights.
        shard: with several ranks, each reads only its slices.

    Raises:
        InvalidInputError: weights are missing or incomplete, or a file is damaged.
        UnsupportedModelError: transformers has no causal language model for the config, or only
            the model's own code has one.
    """
    is_dummy = load_format == "dummy"
    limit = "must have a config.json" if is_dummy else "must have weights"
    with as_input_error(name, f"{limit} that a model can be built from"):
        try:
            if is_dummy:
                return _dummy(config, dtype, device)
            return read_weights(
                auto_class(config),
                source,
                name,
                config=config,
                dtype=dtype,
                trust_remote_code=False,  # by default, transformers prompts on the terminal
                **_placement(device, shard),
            )
        except ValueError as error:
            if needs_own_code(error):
                raise code_not_run(name, "class") from error
            if "Unrecognized configuration class" in str(error):
                kind = type(config).__name__
                raise UnsupportedModelError(
                    f"{name}: transformers has no causal language model for {kind}"
                ) from error
            raise


def _dummy(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    devices = [device] if device.type == "cuda" else []
    # Created on the target device: a CPU needs minutes for the random values of a large model.
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(0)
        module: PreTrainedModel = auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    return module


def require_accelerate(num_ranks: int) -> None:
    """Raises InvalidInputError if several ranks could not read their slices."""
    if importlib.util.find_spec("accelerate") is None:
        limit = "needs the package accelerate: pip install accelerate, or install pagespec[tp]"
        raise InvalidInputError("tensor_parallel_size", num_ranks, limit)


def _placement(device: torch.device, shard: Shard) -> dict[str, Any]:
    """With accelerate, weights are read directly from the file to a GPU. With several ranks, each
    reads only the slices of transformers' plan."""
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    if shard.num_ranks == 1:
        is_direct = device.type == "cuda" and has_accelerate
        return {"device_map": {"": device} if is_direct else None}
    require_accelerate(shard.num_ranks)
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=shard.num_ranks)}


def read_weights(kind: Any, source: str | None, name: str, **options: Any) -> PreTrainedModel:
    """``from_pretrained``, which here refuses incomplete weights.

    Args:
        kind: class of the model. source: None if ``options`` has a ``state_dict``.

    Raises:
        InvalidInputError: weights are missing, or have other shapes than in the config.
    """
    result: Any = kind.from_pretrained(
        source,
        output_loading_info=True,
        # This does not accept them: they are named in the error below.
        ignore_mismatched_sizes=True,
        **options,
    )
    module: PreTrainedModel = result[0]
    # transformers would use random weights for these.
    for what, keys in (
        ("are missing", result[1]["missing_keys"]),
        ("have other shapes than config.json says", result[1]["mismatched_keys"]),
    ):
        if keys:
            first = sorted(map(str, keys))[:3]
            raise InvalidInputError(
                "model", name, f"must have all weights; {len(keys)} {what}: {first}"
            )
    return module
