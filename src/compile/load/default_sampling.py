"""What a model's generation config asks of sampling, by the names of ``SamplingParams``."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError
from ..model.loaded import LoadedModel

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger("pagespec")

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

# What else changes the tokens that `generate` returns, and its value that does not.
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
    """The values that differ from transformers' own defaults; none of None.

    As in vLLM's ``get_default_sampling_params``, ``do_sample`` is not among them: a request is
    greedy if its temperature is 0.

    Args:
        config: a ``GenerationConfig`` or None.
    """
    given = {} if config is None else config.to_diff_dict()
    found = {name: given.get(theirs) for theirs, name in _NAMES.items()}
    return {name: value for name, value in found.items() if value is not None}


def ignored_settings(config: Any, longest: int) -> list[str]:
    """Names of what would change the tokens of ``generate`` and is not kept, sorted.

    Args:
        config: a ``GenerationConfig`` or None.
        longest: context of the model, in tokens.
    """
    given = {} if config is None else config.to_diff_dict()
    found = [
        name
        for name, neutral in _IGNORED.items()
        if given.get(name, neutral) not in (None, [], {}, neutral)
    ]
    # Of prompt and output together; generate heeds it where max_new_tokens is not given.
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
    except Exception as error:  # of JSON of another form, transformers raises various ones
        limit = f"must be a folder with a readable generation_config.json ({error})"
        raise InvalidInputError("generation_config", folder, limit) from error


def chosen_sampling(
    loaded: LoadedModel, source: str, config: GenerationConfig | None, *, is_reported: bool
) -> dict[str, Any]:
    """What requests get from the chosen generation config.

    Args:
        source: "auto" for the model's own, "vllm" for none, or a folder.
        config: of the folder.
        is_reported: whether it is logged.
    """
    if source == "vllm":
        return {}
    found, ignored = loaded.default_sampling, loaded.ignored_settings
    if config is not None:
        found = default_sampling(config)
        ignored = ignored_settings(config, loaded.max_position_embeddings)
    if is_reported:
        _report("the model" if config is None else source, found, ignored)
    return found


def _report(source: str, found: dict[str, Any], ignored: Sequence[str]) -> None:
    """Log what requests get from a generation config, and what is ignored of it.

    Args:
        source: what has the config: "the model", or a folder.
        found: of :func:`default_sampling`.
        ignored: of :func:`ignored_settings`.
    """
    if found:
        logger.info(
            "default sampling parameters, by the generation config of %s: %s",
            source,
            ", ".join(f"{name}={value}" for name, value in found.items()),
        )
    if ignored:
        logger.warning(
            "generation config of %s: ignored, though generate would heed it: %s",
            source,
            ", ".join(ignored),
        )
