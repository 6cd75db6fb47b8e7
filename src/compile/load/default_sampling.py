"""What a model's generation config asks of sampling, by the names of ``SamplingParams``."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
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
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
