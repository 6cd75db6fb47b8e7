"""Sampling defaults from a model's generation config, by the names of ``SamplingParams``, and the
tokens that end generation."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError
from ..model.loaded import LoadedModel

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger("pagespec")

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
_THEIR_NAMES = {"max_tokens": "max_new_tokens"}

# Other settings that change the tokens of `generate`, and the value that does not change them.
_IGNORED: dict[str, object] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}


def default_sampling(config: Any) -> dict[str, Any]:
    """The values that differ from transformers' own defaults, without None.

    As in vLLM's ``get_default_sampling_params``, ``do_sample`` is not among them: a request is
    greedy if its temperature is 0.

    Args:
        config: a ``GenerationConfig`` or None.
    """
    given = {} if config is None else config.to_diff_dict()
    found = {name: given.get(_THEIR_NAMES.get(name, name)) for name in _NAMES}
    return {name: value for name, value in found.items() if value is not None}


def ignored_settings(config: Any, longest: int) -> list[str]:
    """Names of the settings that would change the tokens of ``generate`` and are ignored, sorted.

    Args:
        config: a ``GenerationConfig`` or None.
        longest: the model's context length, in tokens.
    """
    given = {} if config is None else config.to_diff_dict()
    found = [
        name
        for name, neutral in _IGNORED.items()
        if given.get(name, neutral) not in (None, [], {}, neutral)
    ]
    # Of prompt and output together; generate applies it if max_new_tokens is not given.
    most = given.get("max_length")
    if isinstance(most, int) and most < longest and given.get("max_new_tokens") is None:
        found.append("max_length")
    return sorted(found)


def read_generation_config(folder: str) -> Any:
    """The ``GenerationConfig`` of a folder.

    Raises:
        InvalidInputError: its file cannot be read.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(os.path.abspath(folder), local_files_only=True)
    except Exception as error:  # For JSON of another form, transformers raises various errors
        limit = f"must be a folder with a readable generation_config.json ({error})"
        raise InvalidInputError("generation_config", folder, limit) from error


def chosen_sampling(
    loaded: LoadedModel, source: str, config: GenerationConfig | None, *, is_reported: bool
) -> dict[str, Any]:
    """The defaults that requests get from the chosen generation config.

    Args:
        source: "auto" for the model's own, "vllm" for none, or a folder.
        config: of the folder.
        is_reported: whether to log the defaults and the ignored settings.
    """
    if source == "vllm":
        return {}
    found, ignored = loaded.default_sampling, loaded.ignored_settings
    if config is None:
        source = "the model"
    else:
        found = default_sampling(config)
        ignored = ignored_settings(config, loaded.max_position_embeddings)
    if found and is_reported:
        text = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.info("default sampling parameters, by the generation config of %s: %s", source, text)
    if ignored and is_reported:
        text = ", ".join(ignored)
        logger.warning(
            "generation config of %s: ignored, although generate would apply it: %s", source, text
        )
    return found


def end_tokens(
    generation_config: Any, text_config: Any, vocab_size: int
) -> tuple[frozenset[int], list[int]]:
    """The end tokens of the generation config, or of the config if the vocabulary has none of
    those.

    Args:
        generation_config: may be None.
        vocab_size: rows of the LM head.

    Returns:
        The ids, and those that are named but not in the vocabulary, sorted.

    Raises:
        InvalidInputError: a value is neither an integer nor a list of integers.
    """
    found: set[int] = set()
    dropped: set[int] = set()
    for config in (generation_config, text_config):
        named = _listed(getattr(config, "eos_token_id", None))
        found.update(token_id for token_id in named if 0 <= token_id < vocab_size)
        dropped |= named - found
        if found:
            break
    return frozenset(found), sorted(dropped)


def warn_of_dropped(model: str | None, token_ids: Collection[int], vocab_size: int) -> None:
    """Log a warning that names the ids that :func:`end_tokens` has dropped, if any."""
    if token_ids:
        logger.warning(
            "eos_token_id of %s: %s ignored, the vocabulary has %d tokens",
            model or "the model",
            ", ".join(map(str, token_ids)),
            vocab_size,
        )


def _listed(value: Any) -> set[int]:
    ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise InvalidInputError("eos_token_id", value, "must be a token id, or a list of them")
    return set(ids)
