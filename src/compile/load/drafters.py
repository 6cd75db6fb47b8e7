"""Load a model that drafts tokens for another one: an ordinary model, the multi-token prediction
layer of the target's own checkpoint, or an EAGLE-3 head."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ...errors import InvalidInputError
from ..model.loaded import LoadedModel
from .load import load_model
from .source import find_source

Kind = Literal["draft_model", "mtp", "eagle3"]
MODEL_KEY = "speculative_config.model"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDrafter:
    """A drafter before its capture.

    Attributes:
        token_ids: int64 ``[V_draft]``, the target's id of each row of the drafter's head; None if
            the heads have the same rows.
        target_vocab_size: rows of the target's head.
        target_layers: ``aux_layers`` of the target, whose hidden states the drafter reads; empty
            for the states before the target's head.
        combine: from the target's hidden states of several layers, ``[T, n * H_target]``, to the
            input ``[T, H]`` of a step; None if these are the same.
        recycles_aux: whether the drafter is applied again to :attr:`.StepOutputs.aux`, instead of
            the states before its own head.
    """

    kind: Kind
    loaded: LoadedModel
    target_vocab_size: int
    token_ids: Tensor | None = None
    target_layers: tuple[int, ...] = ()
    combine: nn.Linear | None = None
    recycles_aux: bool = False


def load_drafter(
    kind: str,  # noqa: ARG001
    model: str | os.PathLike[str] | None,
    target: LoadedModel,
    *,
    dtype: Any = "auto",
    load_format: str = "auto",
    max_model_len: int | None = None,
) -> LoadedDrafter:
    """Load the drafter of a target.

    Args:
        model: the folder or hub id of a "draft_model" or "eagle3".
        dtype, load_format: as in :func:`.load_model`.
        max_model_len: the longest request; None for the target's own limit.

    Raises:
        InvalidInputError: as :func:`.load_model`, or the drafter does not fit the target.
        UnsupportedModelError: as :func:`.load_model`.
    """
    options: dict[str, Any] = {"dtype": dtype, "load_format": load_format, "device": target.device}
    if target.shard.num_ranks > 1:
        limit = "must be 1: a model drafts on one rank only"
        raise InvalidInputError("tensor_parallel_size", target.shard.num_ranks, limit)
    assert model is not None
    source = find_source(model)
    loaded = load_model(source, max_model_len=max_model_len, **options)
    longest = max_model_len or target.max_position_embeddings
    if loaded.max_position_embeddings < longest:
        limit = (
            f"must support max_model_len = {longest} tokens, not {loaded.max_position_embeddings}"
        )
        raise InvalidInputError(MODEL_KEY, source.name, limit)
    return check_draft_model(source.name, loaded, target)


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
