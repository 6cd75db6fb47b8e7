"""Checks sampling parameters that are lists or mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import as_float, as_int, is_list

MAX_LOGIT_BIAS = 1024  # over HTTP
MAX_BAD_WORDS = 1000
MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM
MAX_TOKEN_IDS = 1 << 18  # more than any vocabulary
_BIAS_LIMIT = 100.0


def checked_logit_bias(name: str, value: Any) -> dict[int, float]:
    """Biases by token id. Ids may be strings, as JSON keys are."""
    if not isinstance(value, Mapping) or len(value) > MAX_TOKEN_IDS:
        limit = f"must be a dict of at most {MAX_TOKEN_IDS} token ids and biases"
        raise InvalidInputError(name, value, limit)
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _token_id(key)
        if token_id is None:
            raise InvalidInputError(name, key, "every key must be an integer >= 0")
        if token_id in checked:
            raise InvalidInputError(name, key, "is given twice")
        kept = as_float(bias)
        if kept is None or not -_BIAS_LIMIT <= kept <= _BIAS_LIMIT:
            raise InvalidInputError(name, bias, "every bias must be from -100 to 100")
        checked[token_id] = float(kept)
    return checked


def _token_id(key: object) -> int | None:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
        return int(key)
    kept = as_int(key)
    return kept if kept is not None and kept >= 0 else None


def checked_token_ids(name: str, value: Any) -> list[int]:
    """A list of token ids, or None for none. The request factory checks them against the
    vocabulary."""
    if value is None:
        return []
    if not is_list(value):
        raise InvalidInputError(name, value, "must be a list of token ids")
    if len(value) > MAX_TOKEN_IDS:
        raise InvalidInputError(name, f"{len(value)} ids", f"must be at most {MAX_TOKEN_IDS} ids")
    kept = list(map(as_int, value))
    checked = [token_id for token_id in kept if token_id is not None and token_id >= 0]
    if len(checked) < len(kept):
        raise InvalidInputError(name, value, "every id must be an integer >= 0")
    return checked


def checked_allowed_token_ids(name: str, value: Any) -> list[int]:
    token_ids = checked_token_ids(name, value)
    if not token_ids:
        raise InvalidInputError(name, value, "must not be empty")
    return token_ids


def checked_logprob_token_ids(name: str, value: Any) -> list[int]:
    token_ids = list(dict.fromkeys(checked_token_ids(name, value)))
    if len(token_ids) > MAX_LOGPROB_TOKEN_IDS:
        limit = f"must be at most {MAX_LOGPROB_TOKEN_IDS} ids"
        raise InvalidInputError(name, f"{len(token_ids)} ids", limit)
    return token_ids


def checked_bad_words(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if not is_list(value) or len(value) > MAX_BAD_WORDS:
        limit = f"must be a list of at most {MAX_BAD_WORDS} words"
        raise InvalidInputError(name, value, limit)
    for word in value:
        if not isinstance(word, str) or not word.strip():
            raise InvalidInputError(name, value, "every word must be text with a letter")
    return list(dict.fromkeys(value))


def checked_truncation(name: str, value: Any) -> int:
    kept = as_int(value)
    if kept is None or (kept != -1 and kept < 1):
        limit = "must be an integer of 1 or more, or -1 for as many as fit"
        raise InvalidInputError(name, value, limit)
    return kept


def checked_extra_args(name: str, value: Any) -> dict[str, Any] | None:
    """A copy of a dict; None for an empty one."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidInputError(name, value, "must be a dict with names as keys")
    return dict(value) or None


def checked_processors(name: str, value: Any) -> list[Callable[..., Any]]:
    if value is None:
        return []
    if not is_list(value) or not all(callable(processor) for processor in value):
        raise InvalidInputError(name, value, "must be a list of functions")
    return list(value)
