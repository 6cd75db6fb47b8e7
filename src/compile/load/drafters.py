"""Load a model that drafts tokens for another one: an ordinary model, the multi-token prediction
layer of the target's own checkpoint, or an EAGLE-3 head."""

from __future__ import annotations

import os
from typing import Any

from ...errors import InvalidInputError
from ..model.loaded import LoadedDrafter, LoadedModel
from .load import load_model
from .quantized_drafter import check_target, quantize_drafter
from .source import ModelSource, find_source

MODEL_KEY = "speculative_config.model"


def load_drafter(
    kind: str,
    model: str | os.PathLike[str] | None,
    target: LoadedModel,
    *,
    dtype: Any = "auto",
    load_format: str = "auto",
    max_model_len: int | None = None,
    quantization: str | None = None,
) -> LoadedDrafter:
    """Load the drafter of a target, whole. Of several ranks only the first one has a drafter.

    Args:
        target: with several ranks, loaded with the whole head if :func:`reads_head`.
        model: the folder or hub id of a "draft_model" or "eagle3".
        dtype: as in :func:`.load_model`, of a "draft_model"; other drafters have the target's.
        load_format: as in :func:`.load_model`.
        max_model_len: the longest request; None for the target's own limit.
        quantization: "fp8" quantises linear layers and the head, see :func:`.quantize_drafter`.
            None follows the checkpoint.

    Raises:
        InvalidInputError: as :func:`.load_model`, or the drafter does not fit the target.
        UnsupportedModelError: as :func:`.load_model`.
    """
    if kind == "draft_model":
        assert model is not None  # speculative() has checked it
        source = find_source(model)
        options = {"dtype": dtype, "load_format": load_format, "max_model_len": max_model_len}
        drafter = _load_draft_model(source, target, quantization, **options)
    else:
        if quantization is not None:
            check_target(target)
        drafter = _load_head(kind, model, target, load_format)
    return drafter if quantization is None else quantize_drafter(drafter)


def _load_head(
    kind: str, model: str | os.PathLike[str] | None, target: LoadedModel, load_format: str
) -> LoadedDrafter:
    """A drafter that reads the target's hidden states."""
    if kind == "mtp":
        from .mtp import load_mtp

        return load_mtp(target, load_format)
    from .eagle3 import load_eagle3

    assert model is not None  # speculative() has checked it
    return load_eagle3(find_source(model), target, load_format)


def _load_draft_model(
    source: ModelSource,
    target: LoadedModel,
    quantization: str | None,
    *,
    dtype: Any,
    load_format: str,
    max_model_len: int | None,
) -> LoadedDrafter:
    if quantization is not None and source.name.endswith(".gguf"):
        limit = "must be absent for a .gguf file, whose weights are quantised already"
        raise InvalidInputError("quantization", quantization, limit)
    loaded = load_model(
        source,
        dtype=dtype,
        device=target.device,
        load_format=load_format,
        quantization=quantization,
        max_model_len=max_model_len,
    )
    longest = max_model_len or target.max_position_embeddings
    if loaded.max_position_embeddings < longest:
        limit = (
            f"must support max_model_len = {longest} tokens, not {loaded.max_position_embeddings}"
        )
        raise InvalidInputError(MODEL_KEY, source.name, limit)
    return check_draft_model(source.name, loaded, target)


def target_aux_layers(kind: str, model: str | None, target: LoadedModel) -> tuple[int, ...]:
    """The ``aux_layers`` with which the target must be captured for this drafter.

    Raises:
        InvalidInputError: the drafter's config is missing or damaged, or does not fit the target.
    """
    if kind != "eagle3" or model is None:
        return ()
    from .eagle3 import read_eagle3_config, target_layers

    return target_layers(read_eagle3_config(find_source(model)), target)


def reads_head(kind: str, model: str | None, load_format: str) -> bool:
    """Whether the drafter computes with the target's LM head.

    Args:
        load_format: as in :func:`.load_model`.

    Raises:
        InvalidInputError: the drafter's files are missing or damaged.
    """
    if kind != "eagle3" or model is None:
        return kind == "mtp"
    from .eagle3 import has_own_head

    return load_format == "auto" and not has_own_head(find_source(model))


def check_draft_model(name: str, loaded: LoadedModel, target: LoadedModel) -> LoadedDrafter:
    """Check that an ordinary model can draft for the target.

    Args:
        name: of the model, for refusals.

    Raises:
        InvalidInputError: the token ids of the two models may differ.
    """
    if loaded.tokenizer is not None and target.tokenizer is not None:
        if loaded.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            limit = "must have the target's tokenizer: its tokens have other ids"
            raise InvalidInputError(MODEL_KEY, name, limit)
    elif loaded.vocab_size != target.vocab_size:
        limit = (
            f"must have the target's {target.vocab_size} tokens, not {loaded.vocab_size}: without "
            "two tokenizers the ids cannot be compared"
        )
        raise InvalidInputError(MODEL_KEY, name, limit)
    return LoadedDrafter("draft_model", loaded, target.vocab_size)
