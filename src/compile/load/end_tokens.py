"""The tokens that end generation, as the files of a model name them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from ...errors import InvalidInputError

logger = logging.getLogger("pagespec")


def end_tokens(
    generation_config: Any, text_config: Any, vocab_size: int
) -> tuple[frozenset[int], list[int]]:
    """Those of the generation config or, if none of its ids is in the vocabulary, of the config.

    Args:
        generation_config: may be None.
        vocab_size: rows of the LM head.

    Returns:
        The ids, and those that are named and not in the vocabulary, sorted.

    Raises:
        InvalidInputError: a value is no integer, and no list of integers.
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
    """Logs a warning that names the ids :func:`end_tokens` has dropped, if any."""
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
