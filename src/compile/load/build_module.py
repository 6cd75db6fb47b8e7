"""Build the transformers module of a config, on the meta device or with its files' weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from contextlib import contextmanager
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
    source: str, name: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The module of ``config`` with its weights, built on ``device`` if that needs no second copy
    of them.

    Args:
        source: the folder or hub id that transformers reads. name: the model's name, for refusals.

    Raises: as :func:`building`, and InvalidInputError if weights are missing or incomplete.
    """
    with building(name, config):
        return read_weights(
            auto_class(config),
            source,
            name,
            config=config,
            dtype=dtype,
            trust_remote_code=False,  # by default, transformers prompts on the terminal
            device_map={"": device} if _is_read_to(device) else None,
        )


@contextmanager
def building(name: str, config: PreTrainedConfig, *, is_dummy: bool = False) -> Iterator[None]:
    """Convert errors while a module is built to refusals of the model ``name``.

    Raises:
        InvalidInputError: a file is damaged, or the config fits no model.
        UnsupportedModelError: transformers has no causal language model for the config, or only
            the model's own code has one.
    """
    limit = "must have a config.json" if is_dummy else "must have weights"
    with as_input_error(name, f"{limit} that a model can be built from"):
        try:
            yield
        except ValueError as error:
            if needs_own_code(error):
                raise code_not_run(name, "class") from error
            if "Unrecognized configuration class" in str(error):
                kind = type(config).__name__
                raise UnsupportedModelError(
                    f"{name}: transformers has no causal language model for {kind}"
                ) from error
            raise


def _is_read_to(device: torch.device) -> bool:
    """Whether transformers reads weights directly to a GPU: with accelerate."""
    return device.type == "cuda" and importlib.util.find_spec("accelerate") is not None


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
    raise_incomplete(name, result[1]["missing_keys"], result[1]["mismatched_keys"])
    return module


def raise_incomplete(name: str, missing: Collection[Any], mismatched: Collection[Any]) -> None:
    """Raise InvalidInputError for a model that has no values, or ones of other shapes, for some
    parameters."""
    for what, keys in (
        ("are missing", missing),
        ("have other shapes than config.json says", mismatched),
    ):
        if keys:
            first = sorted(map(str, keys))[:3]
            raise InvalidInputError(
                "model", name, f"must have all weights; {len(keys)} {what}: {first}"
            )
